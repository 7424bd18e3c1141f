"""The step loop over scripted workers: same tokens whatever happens, no starvation, no leak, one end."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep_common.errors import ContextLengthExceeded, InvalidRequest, LockstepError, Overloaded, Unavailable
from lockstep_common.steps import Kind
from lockstep_scheduler.books import MAX_LOSSES
from lockstep_scheduler.request import End, Phase
from tests.scripted_worker import Script
from tests.unit.scheduler.simulation import Simulation, prefills


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start * 7 + i * 13) % 997 for i in range(length)]


def test_one_request() -> None:
    sim = Simulation()
    request = sim.submit(prompt(10), max_tokens=9)
    sim.run()
    sim.check_answers([request])
    assert sim.got(request).end is End.LENGTH


@given(
    seed=st.integers(0, 10_000),
    dp=st.integers(1, 3),
    num_blocks=st.sampled_from([34, 40, 64]),
    window=st.sampled_from([1, 2, 8]),
    a=st.sampled_from([1, 2, 4]),
    losses=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
)
@example(
    seed=400, dp=1, num_blocks=34, window=1, a=1, losses=0.0
)  # the only decoding row is the youngest, and there is no block
@settings(max_examples=80, deadline=None)
def test_random_arrivals(seed: int, dp: int, num_blocks: int, window: int, a: int, losses: float) -> None:
    """Arrivals, sizes, stops, cancels, stop strings, n, priorities at random; small pools force preemption, and the group may be
    lost at any moment, with requests that come and go before it has formed again."""
    choose = random.Random(seed)
    sim = Simulation(
        dp=dp,
        num_blocks=num_blocks,
        seed=seed,
        max_rows=4,
        a=a,
        b=2 * a,
        max_window=window,
        generated_reusable=bool(seed % 2),
    )
    kept, cut = [], []
    epoch = losing = 1
    for _ in range(choose.randint(1, 14)):
        if sim.loop.group is None and choose.random() < 0.5:
            epoch += 1
            sim.form(epoch)
        for _ in range(choose.randint(0, 12)):
            sim.turn()
        if choose.random() < losses and losing < MAX_LOSSES:
            losing += 1
            sim.lose(LockstepError("worker 0 is gone"), gone=[r for r in range(dp) if choose.random() < 0.4])
        request = sim.submit(
            prompt(choose.randint(1, 60), choose.randint(1, 3)),
            n=choose.choice([1, 1, 1, 2, 3]),
            priority=choose.choice([0, 0, 1]),
            max_tokens=choose.randint(1, 50),
            temperature=choose.choice([0.0, 1.0]),
            seed=choose.randint(0, 9),
            stop_ids=tuple(choose.sample(range(1000), 20)),
            min_tokens=0,
        )
        kept.append(request)
        if choose.random() < 0.25:
            victim = choose.choice(kept)
            kept.remove(victim)
            cut.append(victim)
            if choose.random() < 0.5:
                sim.loop.cancel(victim)
            else:
                for choice in victim.choices:
                    sim.loop.finish(victim, choice.index, sim.loop._generated(choice))
    if sim.loop.group is None:
        sim.form(epoch + 1)
    sim.run()
    sim.check_answers(kept)
    for request in cut:
        for choice in range(request.n):
            got = sim.got(request, choice)
            assert got.ends == 1
            assert got.tokens == sim.expected(request, choice)[: len(got.tokens)]


def test_logprobs_travel_with_their_tokens_through_preemption() -> None:
    alone = Simulation(num_blocks=33)
    reference = alone.submit(prompt(10, 2), max_tokens=60, logprobs=2)
    alone.run()
    sim = Simulation(num_blocks=33)
    others = [sim.submit(prompt(10, 1), max_tokens=60) for _ in range(2)]
    request = sim.submit(prompt(10, 2), max_tokens=60, logprobs=2)
    sim.run()
    sim.check_answers([*others, request])
    assert sim.loop.stats.preemptions > 0
    assert len(sim.got(request).logprobs) == len(sim.got(request).tokens) == 60
    assert sim.got(request).logprobs == alone.got(reference).logprobs


def test_small_pool_never_goes_round_in_circles() -> None:
    """Ten blocks, three requests that each need six: all finish, the oldest is never preempted, preemptions are bounded."""
    sim = Simulation(num_blocks=11, block_size=4, max_model_len=40)
    requests = [sim.submit(prompt(4, i), max_tokens=20) for i in range(1, 4)]
    sim.run()
    sim.check_answers(requests)
    assert 0 < sim.loop.stats.preemptions <= 3
    assert sim.got(requests[0]).ended_at == min(sim.got(r).ended_at for r in requests)


def test_a_small_request_passes_a_large_one_but_not_for_ever() -> None:
    sim = Simulation(num_blocks=41, block_size=4, max_model_len=160, max_rows=16)
    holder = sim.submit(prompt(116), max_tokens=40)  # most of the pool
    for _ in range(6):
        sim.turn()
    large = sim.submit(prompt(80, 2), max_tokens=4)
    small = []
    for i in range(150):
        small.append(sim.submit(prompt(3, i), max_tokens=2))
        for _ in range(3):
            sim.turn()
    before = sum(sim.got(s).ends for s in small)
    sim.run()
    sim.check_answers([holder, large, *small])
    assert before > 10, "small requests waited behind a large one that did not fit"
    assert sim.got(large).ended_at < sim.got(small[-1]).ended_at, "the large request was starved"


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_one_served() -> None:
    sim = Simulation(num_blocks=11, block_size=4, max_model_len=128)
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 40 tokens"):
        sim.submit(prompt(60))
    request = sim.submit(prompt(3))
    sim.run()
    sim.check_answers([request])


@pytest.mark.parametrize(("length", "tokens"), [(31, 1), (30, 2)])
def test_a_prompt_that_fills_the_context(length: int, tokens: int) -> None:
    sim = Simulation(num_blocks=9, block_size=4, max_model_len=128)  # context 32
    request = sim.submit(prompt(length), max_tokens=10)
    sim.run()
    assert len(sim.got(request).tokens) == tokens and sim.got(request).end is End.LENGTH
    with pytest.raises(ContextLengthExceeded):
        sim.submit(prompt(32))


def test_a_lone_request_that_uses_up_the_pool_ends_with_length() -> None:
    sim = Simulation(num_blocks=9, block_size=4, max_model_len=128)
    request = sim.submit(prompt(24), max_tokens=1000)
    sim.run()
    assert sim.got(request).end is End.LENGTH and len(sim.got(request).tokens) == 8


def test_decode_is_not_starved_by_prefill_and_prefill_has_a_floor() -> None:
    sim = Simulation(num_blocks=2000, max_rows=64, max_model_len=1000, a=4, b=8, max_batched_tokens=32)
    running = [sim.submit(prompt(4, i), max_tokens=400) for i in range(4)]
    for _ in range(20):
        sim.turn()
    arrivals = []
    for i in range(150):
        arrivals.append(sim.submit(prompt(128, i), max_tokens=1))
        sim.turn()
    sim.run()
    sim.check_answers([*running, *arrivals])
    # a point takes one full prefill step, then a window of decode steps is owed
    step = 0.010
    assert max(sim.got(r).largest_gap for r in running) <= 3 * step + 4 * step
    kinds = [h.kind for h in sim.headers]
    assert kinds.count(Kind.PREFILL) > 100


@given(a=st.sampled_from([1, 2, 4, 8]), dp=st.integers(1, 4), phase=st.integers(0, 40), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_lone_request_is_prefilled_within_the_bound(a: int, dp: int, phase: int, seed: int) -> None:
    """B + A + L steps, whatever the other ranks do."""
    b = 2 * a
    sim = Simulation(dp=dp, num_blocks=500, max_model_len=400, a=a, b=b, max_window=a, seed=seed)
    others = [sim.submit(prompt(3, i), max_tokens=200) for i in range(dp)]
    for _ in range(phase):
        sim.turn()
    at = sim.loop.step
    request = sim.submit(prompt(5, 50), max_tokens=3)
    while not sim.got(request).tokens and sim.turn():
        pass
    planned = next(
        h for h, bodies in zip(sim.headers, sim.bodies, strict=True) if any(add.request_id == request.request_id for body in bodies for add in body.adds)
    )  # fmt: skip
    assert planned.first_step - at <= b + a + sim.loop.pace.lead_steps
    sim.run()
    sim.check_answers([*others, request])


def test_prefill_plans_fill_up_on_all_ranks_under_full_queues() -> None:
    """From any start, the share of prefill plans with a placeholder falls below 5 % within 4 B steps and stays there."""
    sim = Simulation(
        dp=4, num_blocks=4000, max_rows=32, max_model_len=200, a=4, b=8, max_batched_tokens=64, max_waiting=10_000
    )
    for i in range(600):
        sim.submit(prompt(20, i), max_tokens=8 + i % 17, advance=False)
    sim.loop.advance()
    sim.run()
    later = [
        (header, bodies)
        for header, bodies in zip(sim.headers, sim.bodies, strict=True)
        if header.kind is Kind.PREFILL and 4 * 8 <= header.first_step <= sim.headers[-1].first_step - 40
    ]
    partial = sum(any(not body.passes for body in bodies) for _, bodies in later)
    assert len(later) > 20 and partial / len(later) < 0.05, f"{partial} of {len(later)}"


def test_an_idle_group_parks_and_wakes() -> None:
    sim = Simulation(dp=2)
    first = sim.submit(prompt(5), max_tokens=3)
    sim.run()
    plans = len(sim.headers)
    sim.loop.tick()
    assert len(sim.headers) == plans, "a parked group plans nothing"
    second = sim.submit(prompt(6), max_tokens=3)
    sim.run()
    sim.check_answers([first, second])
    assert [h.seq for h in sim.headers] == list(range(1, len(sim.headers) + 1))


def test_every_rank_runs_every_plan() -> None:
    sim = Simulation(dp=3)
    request = sim.submit(prompt(5), max_tokens=6)
    sim.run()
    sim.check_answers([request])
    assert all(len(bodies) == 3 for bodies in sim.bodies)
    assert sim.loop.stats.placeholder_steps > 0


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 33, 64])
def test_a_prefix_hit_changes_nothing_but_the_count(length: int) -> None:
    sim = Simulation(num_blocks=100)
    requests = []
    for _ in range(4):
        requests.append(sim.submit(prompt(length), max_tokens=6))
        sim.run()
    sim.check_answers(requests)
    assert [sim.got(r).cached for r in requests] == [0] + 3 * [(length - 1) // 4 * 4]


def test_an_answer_is_cached_for_the_next_turn_of_a_chat() -> None:
    sim = Simulation(num_blocks=100)
    first = sim.submit(prompt(10), max_tokens=14)
    sim.run()
    second = sim.submit([*first.prompt.tolist(), *sim.got(first).tokens, 5, 6, 7], max_tokens=4)
    sim.run()
    sim.check_answers([first, second])
    assert sim.got(second).cached == 20  # the last token's KV was never written: 23 of 24 positions


def test_generated_tokens_that_a_prompt_computes_otherwise_are_not_shared() -> None:
    """The next turn finds the first one's prompt, and the turn after it the answer as that prompt has computed it."""
    sim = Simulation(num_blocks=100, generated_reusable=False)
    turns = [sim.submit(prompt(10), max_tokens=14)]
    sim.run()
    chat = [*turns[0].prompt.tolist(), *sim.got(turns[0]).tokens, 5, 6, 7]
    for _ in range(2):
        turns.append(sim.submit(chat, max_tokens=4))
        sim.run()
    sim.check_answers(turns)
    assert [sim.got(turn).cached for turn in turns] == [0, 8, 24]


def test_a_row_added_again_takes_no_block_of_a_prompt_for_its_generated_tokens() -> None:
    """While it was away, another prompt began with all of its tokens."""
    sim = Simulation(num_blocks=12, max_window=1, generated_reusable=False)
    request = sim.submit(prompt(10), priority=1, max_tokens=30)
    while len(sim.got(request).tokens) < 12:
        sim.turn()
    urgent = sim.submit([*request.prompt.tolist(), *sim.got(request).tokens[:12]], max_tokens=10)
    sim.run()
    sim.check_answers([request, urgent])
    assert sim.loop.stats.preemptions == 1 and sim.got(urgent).ended_at < sim.got(request).ended_at


def test_without_a_prefix_cache_requests_share_nothing_and_choices_still_share_their_prompt() -> None:
    sim = Simulation(num_blocks=100, prefix_caching=False)
    requests = []
    for _ in range(2):
        requests.append(sim.submit(prompt(22), n=2, temperature=1.0, seed=7, max_tokens=8))
        sim.run()
    sim.check_answers(requests)
    assert [sim.got(r).cached for r in requests] == [0, 0]
    computed = sum(int(p.counts.sum()) for bodies in sim.bodies for body in bodies for p in body.passes)
    assert computed == 2 * (22 + 1)


def test_tenants_never_share_and_salts_are_not_adapters() -> None:
    sim = Simulation(num_blocks=100)
    requests = []
    for salt in ("", "x", "y", "x"):
        requests.append(sim.submit(prompt(20), salt=salt))
        sim.run()
    sim.check_answers(requests)
    assert [sim.got(r).cached for r in requests] == [0, 0, 0, 16]


def test_choices_share_the_prompt_and_differ() -> None:
    sim = Simulation(num_blocks=100)
    first = sim.submit(prompt(22), n=3, temperature=1.0, seed=7, max_tokens=8)
    sim.run()
    again = sim.submit(prompt(22), n=3, temperature=1.0, seed=7, max_tokens=8)
    sim.run()
    sim.check_answers([first, again])
    texts = [tuple(sim.got(first, c).tokens) for c in range(3)]
    assert len(set(texts)) == 3 and texts == [tuple(sim.got(again, c).tokens) for c in range(3)]
    computed = sum(int(p.counts.sum()) for bodies in sim.bodies for body in bodies for p in body.passes)
    assert computed == (22 + 2) + (2 + 2)
    assert sim.got(first).cached == 0 and sim.got(again).cached == 20


def test_the_router_ends_a_choice_and_the_device_wins_ties() -> None:
    sim = Simulation()
    request = sim.submit(prompt(4), max_tokens=40)
    other = sim.submit(prompt(4, 9), max_tokens=40)
    while len(sim.got(request).tokens) < 6:
        sim.turn()
    sim.loop.finish(request, 0, 5)
    assert sim.got(request).end is End.STOP and sim.got(request).tokens == sim.expected(request)[:5]
    sim.run()
    sim.check_answers([other])
    sim.loop.finish(other, 0, 3)  # it has ended by itself
    assert sim.got(other).ends == 1 and sim.got(other).end is End.LENGTH


def test_cancel_leaves_the_workers_within_the_plan_in_flight_and_the_lead() -> None:
    sim = Simulation(a=4, b=8, max_window=4)
    request, other = sim.submit(prompt(4), max_tokens=100), sim.submit(prompt(4, 9), max_tokens=100)
    for _ in range(9):
        sim.turn()
    sent = len(sim.headers)
    sim.loop.cancel(request)
    for _ in range(30):
        sim.turn()
    row = next(
        add.row for bodies in sim.bodies for body in bodies for add in body.adds if add.request_id == request.request_id
    )
    removed = next(i for i, bodies in enumerate(sim.bodies) if row in bodies[0].removes)
    assert removed == sent, "the next plan removes it"
    sim.run()
    sim.check_answers([other])


def test_a_fault_ends_its_request_only_and_is_not_cached() -> None:
    bad = prompt(12, 5)
    sim = Simulation(num_blocks=100, scripts=[Script(tuple(bad), tokens=(1, 2, 3), end="fault")])
    good, faulty = sim.submit(prompt(12, 1)), sim.submit(bad)
    sim.run()
    sim.check_answers([good])
    got = sim.got(faulty)
    assert got.end is End.ERROR and got.tokens == [1, 2, 3] and "scripted fault" in got.error
    again = sim.submit(bad)
    sim.run()
    assert sim.got(again).cached == 0


def test_deadline() -> None:
    sim = Simulation()
    request = sim.submit(prompt(4), max_tokens=100)
    request.deadline = sim.clock.now() + 0.05
    for _ in range(10):
        sim.turn()
        sim.loop.tick()
    sim.run()
    assert sim.got(request).end is End.ERROR and "deadline" in sim.got(request).error


def test_silent_workers_are_named() -> None:
    sim = Simulation(dp=2, worker_timeout=5.0)
    sim.submit(prompt(4))
    sim.turn()
    sim.clock.advance(6)
    error = sim.loop.tick()
    assert error is not None and "dp rank" in error.message and "plan 1" in error.message


def test_a_lost_group_costs_no_request() -> None:
    sim = Simulation(max_rows=1, reform_timeout=5.0)
    running, queued = sim.submit(prompt(4), max_tokens=50), sim.submit(prompt(5), max_tokens=5)
    for _ in range(6):
        sim.turn()
    had = list(sim.got(running).tokens)
    assert had
    sim.lose(LockstepError("worker 0 is gone"))
    assert sim.loop.ready and sim.loop.reforming and sim.loop.running == 0
    later = sim.submit(prompt(6), max_tokens=5)
    sim.clock.advance(4.9)
    assert sim.loop.tick() is None
    sim.form(2)
    assert not sim.loop.reforming
    sim.run()
    sim.check_answers([running, queued, later])
    assert sim.got(running).tokens[: len(had)] == had
    assert sim.loop.stats.preemptions == 0


def test_a_group_that_does_not_form_again_ends_its_requests_with_the_reason() -> None:
    sim = Simulation(max_rows=1, reform_timeout=5.0)
    requests = [sim.submit(prompt(4), max_tokens=50), sim.submit(prompt(5), max_tokens=5)]
    for _ in range(6):
        sim.turn()
    sim.lose(LockstepError("worker 0 is gone"))
    sim.clock.advance(5.0)
    assert sim.loop.tick() is None
    for request in requests:
        assert sim.got(request).ends == 1 and sim.got(request).end is End.ERROR
        assert sim.got(request).error == "worker 0 is gone; the group has not formed again within 5 s"
    assert not sim.loop.ready and not sim.loop.reforming
    with pytest.raises(Unavailable):
        sim.submit(prompt(4))
    sim.form(2)
    last = sim.submit(prompt(4))
    sim.run()
    sim.check_answers([last])


def test_a_request_that_loses_one_group_after_the_other_is_given_up() -> None:
    sim = Simulation(max_rows=1)
    fatal, next_one = sim.submit(prompt(4), max_tokens=50), sim.submit(prompt(5), max_tokens=5)
    for epoch in (2, 3, 4):
        sim.turn()
        assert sim.got(fatal).ends == 0
        sim.lose(LockstepError("worker 0 is gone"))
        sim.form(epoch)
    assert sim.got(fatal).end is End.ERROR and "worker 0 is gone; the request has now run in 3" in sim.got(fatal).error
    sim.run()
    sim.check_answers([next_one])


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("reusable", [True, False])
@given(seed=st.integers(0, 10_000), turns=st.integers(1, 60), dp=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_ranks_that_are_left_compute_next_to_nothing_again(
    caching: bool, reusable: bool, seed: int, turns: int, dp: int
) -> None:
    """Of each choice on a rank whose caches are left: less than a block, and what was not booked; and its generated tokens, if
    their KV is another one than a prompt's. What is read is right: the workers check every block. Prompts are long where there
    are several ranks, so that they are worth more than even ranks."""
    size, length = 4, 9 if dp == 1 else 300
    sim = Simulation(
        dp=dp, seed=seed, num_blocks=900, block_size=size, max_rows=16, max_model_len=450, max_batched_tokens=1024,
        prefix_caching=caching, generated_reusable=reusable,
    )  # fmt: skip
    requests = [sim.submit(prompt(length + 7 * i, i), n=1 + i % 2, max_tokens=30, advance=False) for i in range(6)]
    sim.loop.advance()
    for _ in range(turns):
        sim.turn()
    unbooked = sum(sum(f.header.micro_chunks) for f in sim.loop._inflight) * dp
    gone = set(range(1, dp))
    choices = [c for r in requests for c in r.choices if c.phase in (Phase.PREFILL, Phase.DECODE)]
    left = [c for c in choices if c.rank not in gone]
    generated = sum(sim.loop.requests.generated(c) for c in left)
    lost = sum(c.prompt_len + 30 for c in choices if c.rank in gone)
    sim.lose(LockstepError("a worker is gone"), gone)
    sim.form(2)
    sim.run()
    sim.check_answers(requests)
    assert all(sim.got(r).cached == 0 for r in requests), "what a request finds of itself is no hit of the prefix cache"
    most = len(left) * size + unbooked + (0 if reusable else generated) + lost
    assert sim.loop.stats.recomputed_tokens <= most


@pytest.mark.parametrize("cancelled", [False, True])
def test_blocks_of_a_plan_that_has_not_run_are_found_by_nobody(cancelled: bool) -> None:
    """Nor those of a request that ended meanwhile, which nobody owns any more."""
    sim = Simulation(num_blocks=100)
    requests = [sim.submit(prompt(20))]
    sim.run()
    requests.append(sim.submit(prompt(20, 5)))
    if cancelled:
        sim.loop.cancel(requests.pop())
    sim.lose(LockstepError("worker 0 is gone"))
    sim.form(2)
    requests += [sim.submit(prompt(20, 5)), sim.submit(prompt(20))]
    sim.run()
    sim.check_answers(requests)
    assert [sim.got(r).cached for r in requests[-2:]] == [0 if cancelled else 16, 16]
    sim.loop.ranks[0].pool.check()


def test_scores_of_a_prompt_are_told_once_though_the_group_is_lost_in_its_middle() -> None:
    alone = Simulation(num_blocks=100)
    reference = alone.submit(prompt(60), max_tokens=3, prompt_logprobs=1)
    alone.run()
    sim = Simulation(num_blocks=100)
    request = sim.submit(prompt(60), max_tokens=3, prompt_logprobs=1)
    sim.turn()
    assert 0 < request.scored < 59
    sim.lose(LockstepError("worker 0 is gone"))
    sim.form(2)
    sim.run()
    sim.check_answers([request])
    got, want = sim.scores[request.handle], alone.scores[reference.handle]
    assert got.logprobs.tolist() == want.logprobs.tolist() and len(got.logprobs) == 59


def test_what_a_group_has_no_room_for_when_it_forms_again_ends() -> None:
    sim = Simulation(num_blocks=64)
    large, small = sim.submit(prompt(4), max_tokens=100), sim.submit(prompt(4, 2), max_tokens=10)
    for _ in range(6):
        sim.turn()
    sim.lose(LockstepError("worker 0 is gone"))
    sim._context = 64
    sim.form(2)
    assert sim.got(large).end is End.ERROR and "room for 64 tokens, and 104 were asked for" in sim.got(large).error
    sim.run()
    sim.check_answers([small])


def test_a_broken_session_is_resumed_from_its_offset() -> None:
    sim = Simulation()
    request = sim.submit(prompt(4), max_tokens=30)
    for _ in range(10):
        sim.turn()
    had = len(sim.got(request).tokens)
    assert had > 3
    sim.loop.orphan(1)
    for _ in range(8):
        sim.turn()
    assert len(sim.got(request).tokens) == had, "events of an orphan go nowhere"
    sim.got(request).tokens = sim.got(request).tokens[:3]
    sim.loop.resume(request.request_id, 1, request.handle, {0: 3})
    sim.run()
    sim.check_answers([request])
    sim.loop.resume(request.request_id, 2, 99, {0: 0})  # ended, and still held
    assert sim.received[99, 0].tokens == sim.expected(request) and sim.received[99, 0].ends == 1


def test_an_orphan_is_cancelled_after_the_grace() -> None:
    sim = Simulation(grace=5.0, num_blocks=200, max_model_len=600)
    request = sim.submit(prompt(4), max_tokens=500)
    for _ in range(10):
        sim.turn()
    sim.loop.orphan(1)
    sim.clock.advance(5.1)
    sim.loop.tick()
    assert request.done
    sim.run()


def test_refusals_are_typed_and_change_nothing() -> None:
    sim = Simulation(max_waiting=2, max_rows=1)
    with pytest.raises(InvalidRequest, match="no tokens"):
        sim.submit([])
    with pytest.raises(InvalidRequest, match="out of vocabulary"):
        sim.submit([5, 1000])
    with pytest.raises(InvalidRequest, match="n must be"):
        sim.submit([5], n=2)
    requests = [sim.submit(prompt(4, i)) for i in range(3)]
    with pytest.raises(Overloaded) as refused:
        sim.submit(prompt(4))
    assert refused.value.retry_after_ms > 0
    sim.run()
    sim.check_answers(requests)


def test_priorities_run_first() -> None:
    sim = Simulation(max_rows=1)
    sim.submit(prompt(4), max_tokens=10)
    low, high = sim.submit(prompt(4, 2), priority=5), sim.submit(prompt(4, 3), priority=-1)
    sim.run()
    assert sim.got(high).ended_at < sim.got(low).ended_at


def test_chunked_prompts_take_several_prefill_plans() -> None:
    sim = Simulation(max_batched_tokens=16, num_blocks=100)
    request = sim.submit(prompt(100), max_tokens=3)
    sim.run()
    sim.check_answers([request])
    assert len(prefills(sim)) == 7


def test_plans_are_numbered_and_counted() -> None:
    sim = Simulation(num_blocks=100)
    requests = [sim.submit(prompt(30, i), max_tokens=20) for i in range(5)]
    sim.run()
    sim.check_answers(requests)
    step = 0
    for number, header in enumerate(sim.headers, 1):
        assert header.seq == number and header.first_step == step
        step += header.k if header.kind is Kind.DECODE else 0
    assert np.all([len(b) == 1 for b in sim.bodies])


def test_a_plan_is_held_back_only_while_something_could_still_go_into_it() -> None:
    sim = Simulation(max_batched_tokens=32, max_prefill_tokens_per_point=1 << 20, num_blocks=100)
    held: list[int] = []
    sim.loop._defer = lambda seconds: held.append(len(sim.loop.waiting))
    requests = [sim.submit(prompt(32, i), max_tokens=2, advance=False) for i in range(6)]
    sim.loop.advance()
    sim.run()
    sim.check_answers(requests)
    assert [h.kind for h in sim.headers[:6]] == [Kind.PREFILL] * 6
    assert held and set(held) == {0}, "a full prefill step went out late"


def test_a_timer_that_comes_early_is_set_again() -> None:
    sim = Simulation(a=1, b=4, max_window=1, num_blocks=100)
    asked: list[float] = []
    sim.loop._defer = asked.append
    sim.submit(prompt(4), max_tokens=30)
    while not asked:
        assert sim.turn()
    sent = len(sim.headers)
    sim.clock.advance(asked[-1] - 0.003)
    sim.loop.wake()
    assert len(asked) == 2 and len(sim.headers) == sent
    sim.loop.advance()
    assert len(asked) == 2, "one timer at a time is enough"
    sim.clock.advance(asked[-1])
    sim.loop.wake()
    assert len(sim.headers) == sent + 1, "the device would have run out of work"
