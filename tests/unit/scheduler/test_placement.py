"""What prompts cost, which rank they go to, and where a pass is cut."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.steps import Sampling
from lockstep_scheduler.blocks import chain
from lockstep_scheduler.draft import Draft, RankDraft, draft_prefill
from lockstep_scheduler.placement import KV_COST, PASS_COST, ROW_COST, affordable, choose, level, work
from lockstep_scheduler.ranks import Limits, RankState, Waiting, new_rank
from lockstep_scheduler.request import Choice, Phase, Request
from tests.unit.scheduler.simulation import Simulation

spans = st.sampled_from([1, 7, 512, 4096, 100_000])
lengths = st.integers(0, 200_000)


@given(lengths, lengths, lengths, spans)
def test_work_adds_up_and_grows_with_the_prefix(start: int, first: int, second: int, span: int) -> None:
    whole = work(start, first + second, span)
    assert work(start, first, span) + work(start + first, second, span) == pytest.approx(whole)
    assert work(start + 1, first, span) >= work(start, first, span) >= first
    assert work(span, 1, span) == pytest.approx(2 + 1 / span)


@given(lengths, st.floats(0, 1e7), spans)
def test_affordable_is_the_inverse_of_work(start: int, budget: float, span: int) -> None:
    count = affordable(start, budget, span)
    assert work(start, count, span) <= budget < work(start, count + 1, span)


def test_a_cached_prefix_attracts_as_much_as_it_saves() -> None:
    fits = np.array([True, True])
    assert choose(fits, np.array([5.0, 4.0])) == 1
    assert choose(fits, np.array([5.0, 5.0])) == 0
    assert choose(np.array([False, True]), np.array([0.0, 9.0])) == 1
    assert choose(np.array([False, False]), np.zeros(2)) is None


def use(planned: np.ndarray, cut: float) -> float:
    """Work done in a pass cut at `cut`, over what the ranks' time in it would allow."""
    done = np.minimum(planned, cut)
    return float(done.sum() / (len(planned) * (done.max() + PASS_COST)))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.integers(1, 20_000), st.floats(0, 1e6))
def test_no_other_level_makes_better_use_of_the_ranks(planned: list[float], full: int, other: float) -> None:
    mine = np.array(planned)
    found = level(mine, float(full))
    assert found >= full
    assert use(mine, found) >= use(mine, max(other, float(full))) - 1e-9


def test_who_is_alone_is_not_cut_and_who_lets_others_wait_is() -> None:
    assert level(np.array([50_000.0]), 8192.0) >= 50_000
    assert level(np.array([50_000.0, 0.0, 0.0, 0.0]), 8192.0) >= 50_000
    assert level(np.array([50_000.0, 8192.0, 8192.0, 8192.0]), 8192.0) == 8192
    assert 8800 <= level(np.array([9000.0, 8900.0, 8800.0, 60_000.0]), 8192.0) <= 9000


# -- drafts ------------------------------------------------------------------------------------------------------------


def request(number: int, length: int, prefix: int = 0) -> Request:
    """`prefix` tokens are those of all others that have one."""
    tokens = np.full(length, 10 + number, np.uint32)
    tokens[:prefix] = 1
    made = Request(f"r{number}", 1, number, tokens, Sampling(max_tokens=8), 1, 0, number, 0.0, length + 8)
    made.choices = [Choice(made, 0, tokens=tokens, keys=chain(b"", tokens, 16))]
    return made


def waiting_of(requests: list[Request]) -> Waiting:
    queue = Waiting()
    for one in requests:
        queue.push(list(one.choices))
    return queue


def rank_with(index: int, begun: list[tuple[int, int]], rows: int = 8, blocks: int = 20_000) -> RankState:
    """A rank with prompts of which a part is computed."""
    rank = new_rank(index, blocks, 16, rows)
    for length, computed in begun:
        one = request(1000 + 10 * index + len(rank.prefilling), length).choices[0]
        one.row, one.rank, one.phase, one.computed = rank.free_rows.pop(0), index, Phase.PREFILL, computed
        one.blocks = rank.pool.take(-(-length // 16))
        rank.prefilling.append(one)
    return rank


def limits(tokens: int, span: int = 4096) -> Limits:
    return Limits(max_rows=8, max_batched_tokens=tokens, max_model_len=1 << 20, max_window=8, attention_span=span)


begun = st.lists(st.tuples(st.integers(100, 30_000), st.floats(0, 0.9)), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(begun, min_size=1, max_size=5),
    st.lists(st.integers(1, 20_000), max_size=12),
    st.sampled_from([1, 64, 2048, 8192]),
    spans,
)
def test_a_draft_keeps_the_level_and_everybody_goes_on(
    ranks: list[list[tuple[int, float]]], queue: list[int], tokens: int, span: int
) -> None:
    mine = [rank_with(i, [(n, int(n * share)) for n, share in some]) for i, some in enumerate(ranks)]
    bounds = limits(tokens, span)
    draft = draft_prefill(mine, waiting_of([request(i, n) for i, n in enumerate(queue)]), bounds, 0.0)
    for rank, one in zip(mine, draft.ranks, strict=True):
        again = RankDraft(level=one.level)
        parts = [(c.computed, n) for c, n in one.chunks] + [(0, len(group[0].tokens)) for group in one.admits]
        for start, count in parts:
            assert again.take(start, count, bounds) > 0, "something is listed without a token"
        assert again.tokens == one.tokens <= tokens and again.work == pytest.approx(one.work)
        assert one.tokens == 1 or one.work <= one.level + 1e-6, "a rank lets the others wait"
        assert not rank.prefilling or one.chunks[0][0] is rank.prefilling[0], "the oldest prompt stands still"
    if queue and any(not rank.prefilling for rank in mine):
        assert any(one.admits for one in draft.ranks), "a rank is empty and somebody waits"


def skew(draft: Draft) -> float:
    planned = np.array([one.work for one in draft.ranks])
    return float(planned.max() / planned.mean())


def test_a_long_prompt_does_not_let_the_others_wait() -> None:
    """Three ranks fill their pass with short prompts, one goes on behind 60,000 tokens: by tokens alone it would take 12 times as
    long as the others."""
    ranks = [rank_with(0, [(80_000, 60_000)]), *[rank_with(i, []) for i in (1, 2, 3)]]
    queue = waiting_of([request(i, 1024) for i in range(40)])
    draft = draft_prefill(ranks, queue, limits(8192), 0.0)
    assert skew(draft) < 1.1
    assert 0 < draft.ranks[0].tokens < 1000 and all(one.tokens > 6000 for one in draft.ranks[1:])
    alone = draft_prefill(ranks, Waiting(), limits(8192), 0.0)
    assert alone.ranks[0].tokens == 8192, "nobody waits for it"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(16, 4000), min_size=8, max_size=40), st.integers(2, 4))
def test_prompts_are_spread_by_work(queue: list[int], dp: int) -> None:
    """As each goes to the rank with the least, no rank has more than the least one and its own last prompt together."""
    ranks = [rank_with(i, [], rows=64, blocks=40_000) for i in range(dp)]
    draft = draft_prefill(ranks, waiting_of([request(i, n) for i, n in enumerate(queue)]), limits(1 << 20), 0.0)
    costs = [sum(whole(group[0]) for group in one.admits) for one in draft.ranks]
    last = [whole(one.admits[-1][0]) if one.admits else 0.0 for one in draft.ranks]
    assert all(mine - own <= min(costs) + 1e-6 for mine, own in zip(costs, last, strict=True))


def whole(choice: Choice) -> float:
    """What a prompt adds to a rank's cost."""
    length = len(choice.tokens)
    return work(0, length, 4096) + ROW_COST + KV_COST * 16 * -(-(length + 8) // 16)


def test_a_cached_beginning_is_worth_its_recomputation_and_no_more() -> None:
    ranks = [rank_with(i, []) for i in (0, 1)]
    shared = request(0, 1600, prefix=1600).choices[0]
    blocks = ranks[1].pool.take(100)
    for block, key in zip(blocks, shared.keys, strict=True):
        ranks[1].pool.publish(block, key)
    ranks[1].pool.release(blocks)
    draft = draft_prefill(ranks, waiting_of([request(1, 2000, prefix=1600)]), limits(8192), 0.0)
    assert draft.ranks[1].admits and draft.ranks[1].tokens == 400
    busy = [rank_with(0, []), rank_with(1, [(6000, 0)])]
    busy[1].pool = ranks[1].pool
    draft = draft_prefill(busy, waiting_of([request(1, 2000, prefix=1600)]), limits(8192), 0.0)
    assert draft.ranks[0].admits and not draft.ranks[1].admits


# -- in the loop -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from([1, 5, 40, 4096]), st.integers(1, 2))
def test_wherever_passes_are_cut_each_request_gets_its_tokens(seed: int, dp: int, span: int, shards: int) -> None:
    """Spans so short that nearly every pass is cut, long prompts beside short ones, arrivals while they run."""
    choose = random.Random(seed)
    shards = min(shards, dp)
    sim = Simulation(dp=dp, shards=shards, num_blocks=80, max_rows=4, attention_span=span, seed=seed)
    kept = []
    for _ in range(choose.randint(4, 20)):
        for _ in range(choose.randint(0, 8)):
            sim.turn()
        length = choose.choice([3, 10, 100])
        prompt = [choose.randrange(900) for _ in range(length)]
        kept.append(sim.submit(prompt, n=choose.choice([1, 1, 2]), max_tokens=choose.randint(1, 20), shard=choose.randrange(shards)))  # fmt: skip
    sim.run()
    sim.check_answers(kept)


def test_a_long_prompt_ends_while_short_ones_keep_coming_and_pass_it() -> None:
    sim = Simulation(
        dp=2, num_blocks=2000, block_size=16, max_model_len=9000, max_rows=8, max_batched_tokens=1024, attention_span=256
    )  # fmt: skip
    long = sim.submit([1 + i % 900 for i in range(8000)], max_tokens=4)
    short = []
    while not sim.got(long).tokens:
        if len(short) < 400:
            short.append(sim.submit([len(short) % 900] * 300, max_tokens=1))
        sim.turn()
    passed = sum(sim.got(one).ends for one in short)
    sim.run()
    sim.check_answers([long, *short])
    chunks = [int(p.counts[0]) for bodies in sim.bodies for p in bodies[0].passes if p.rows[0] == 0 and p.starts[0] > 0]
    assert min(chunks[:-1]) < 300, "no pass was cut"
    assert passed > 20
