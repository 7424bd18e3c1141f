"""Votes over several shards: one header for all, whatever happens while ballots and headers are on their way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.errors import Conflict, LockstepError
from lockstep_common.steps import Header, Kind
from lockstep_scheduler.polls import KEPT_ROUNDS, Ballot, Coordinator, Tally, divide
from lockstep_scheduler.request import End, Request
from lockstep_scheduler.vote import Position, Rules, Vote, after, agree
from tests.unit.scheduler.simulation import Simulation, prefills

RULES = Rules(2, 4, 8)


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start * 7 + i * 13) % 997 for i in range(length)]


def ballot(number: int, ranks: Sequence[int], *, seq: int = 1, want: bool = False, running: int = 1) -> Ballot:
    votes = [Vote(rank, want, running, running + want, 5 if want else 0, 8 if running else 0) for rank in ranks]
    return Ballot(number, seq, votes, turnaround=0.001 * max(ranks))


def _fail(error: LockstepError) -> None:
    raise error


def tally(dp: int = 3, shards: int = 2) -> Tally:
    return Tally(divide(dp, shards), [f"shard {i}" for i in range(shards)], 10.0)


# -- who owns what, and where the group stands ---------------------------------------------------------------------------


@given(st.integers(1, 200), st.data())
def test_ranks_are_divided_evenly_and_in_order(dp: int, data: st.DataObject) -> None:
    parts = divide(dp, data.draw(st.integers(1, dp)))
    assert [rank for part in parts for rank in part] == list(range(dp))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shard_without_a_rank_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 DP rank"):
        divide(2, 3)


def test_headers_alone_say_where_the_group_stands() -> None:
    """Who starts from another count, but sees the same headers, stands at the same place after a decode plan."""
    true, lagging = Position(7, 1, 40), Position(7, 1, 36, owed=True, point_tokens=9)
    votes = [Vote(0, True, 3, 4, 20, 8), Vote(1, True, 0, 1, 5, 0)]
    header = agree(true, RULES, votes)
    assert header.kind is Kind.PREFILL
    assert after(true, header, 21) == Position(7, 2, 40, point_tokens=20)
    assert after(true, header, 20).owed and after(lagging, header, 40).step == 40
    window = agree(after(true, header, 20), RULES, votes)
    assert window.kind is Kind.DECODE
    assert (
        after(after(true, header, 20), window, 20)
        == after(after(lagging, header, 20), window, 20)
        == Position(7, 3, 42)
    )


# -- the tally -----------------------------------------------------------------------------------------------------------


def test_a_round_is_decided_once_all_shards_have_cast_and_repeats_get_the_same_answer() -> None:
    votes = tally()
    here, there = ballot(1, [0]), ballot(1, [1, 2], want=True)
    assert votes.cast(1, there, 1.0) is None and votes.cast(1, there, 1.5) is None
    assert votes.missing == [0]
    header = votes.cast(0, here, 2.0, Position(1, 1, 4), RULES)
    assert header == agree(Position(1, 1, 4), RULES, [*here.votes, *there.votes]) and header.kind is Kind.PREFILL
    assert votes.cast(1, there, 3.0) is header and votes.cast(1, ballot(1, [1, 2]), 3.0) is header
    assert votes.waited(1, 1) == 1.0 and votes.waited(1, 0) == 0.0
    assert votes.longest_turnaround == 0.002


def test_answers_are_kept_until_the_round_after_the_next() -> None:
    votes = tally()
    for number in range(1, KEPT_ROUNDS + 2):
        votes.cast(1, ballot(number, [1, 2]), 0.0)
        assert votes.cast(0, ballot(number, [0]), 0.0, Position(1, 1, 0), RULES) is not None
        assert votes.cast(1, ballot(number, [1, 2]), 0.0) is not None
    assert votes.cast(1, ballot(2, [1, 2]), 0.0) is not None
    with pytest.raises(Conflict, match="shard 1 votes in round 1; round 4 is open"):
        votes.cast(1, ballot(1, [1, 2]), 0.0)


def test_what_cannot_be_counted_is_refused_and_says_why() -> None:
    votes = tally()
    with pytest.raises(Conflict, match="before round 1 is over"):
        votes.cast(1, ballot(2, [1, 2]), 0.0)
    with pytest.raises(Conflict, match=r"votes for dp rank\(s\) \(0, 1\), but owns \(1, 2\)"):
        votes.cast(1, ballot(1, [0, 1]), 0.0)
    votes.cast(1, ballot(1, [1, 2], seq=5), 0.0)
    with pytest.raises(Conflict, match="shard 0 is at plan 1, shard 1 is at plan 5"):
        votes.cast(0, ballot(1, [0]), 0.0, Position(1, 1, 0), RULES)


def test_the_deadline_names_the_missing_shards_and_ranks() -> None:
    votes = tally(dp=5, shards=3)
    assert votes.overdue(1e9) is None, "a round that nobody has opened waits for nobody"
    votes.cast(0, ballot(1, [0], seq=9), 100.0, Position(1, 9, 0), RULES)
    assert votes.overdue(110.0) is None
    error = votes.overdue(110.1)
    assert error is not None
    assert error.message == "no vote on plan 9 for 10 s; missing: shard 1 (dp rank 1, 2); shard 2 (dp rank 3, 4)"


@given(st.integers(2, 4), st.randoms(use_true_random=False), st.lists(st.booleans(), min_size=4, max_size=4))
def test_the_header_does_not_depend_on_the_order_of_ballots(
    shards: int, random_: random.Random, wants: list[bool]
) -> None:
    parts = divide(shards + 1, shards)
    ballots = [
        ballot(1, part, want=want, running=shard) for shard, (part, want) in enumerate(zip(parts, wants, strict=False))
    ]
    told: list[tuple[int, Header | None]] = []
    polls = Coordinator(
        tally(shards + 1, shards), lambda shard, number, header, waited: told.append((shard, header)), _fail
    )
    order = list(range(shards))
    random_.shuffle(order)
    for shard in order:
        if shard:
            polls.receive(shard, ballots[shard], 0.0)
        else:
            assert polls.cast(ballots[0], Position(1, 1, 4), RULES, 0.0) is None
    expected = agree(Position(1, 1, 4), RULES, [vote for one in ballots for vote in one.votes])
    assert [(shard, header) for shard, header in told if header is not None] == [
        (shard, expected) for shard in reversed(range(shards))
    ], "each hears it once, this one's own loop last"
    assert sorted(shard for shard, header in told if header is None) == sorted(set(range(shards)) - {order[0]})


# -- whole groups --------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10_000),
    shards=st.integers(2, 3),
    more=st.integers(0, 2),
    num_blocks=st.sampled_from([34, 40, 64]),
    window=st.sampled_from([1, 2, 8]),
    a=st.sampled_from([1, 2, 4]),
    delivery=st.sampled_from([0.05, 0.3, 0.9]),
)
@settings(max_examples=40, deadline=None)
def test_random_arrivals(
    seed: int, shards: int, more: int, num_blocks: int, window: int, a: int, delivery: float
) -> None:
    """On every shard: arrivals, sizes, stops, cancels, stop strings, n, priorities at random; small pools force preemption."""
    choose = random.Random(seed)
    sim = Simulation(
        dp=shards + more, shards=shards, prompt_delivery=delivery, num_blocks=num_blocks, seed=seed, max_rows=4, a=a,
        b=2 * a, max_window=window,
    )  # fmt: skip
    kept: list[tuple[int, Request]] = []
    cut: list[Request] = []
    for _ in range(choose.randint(1, 16)):
        for _ in range(choose.randint(0, 25)):
            sim.turn()
        shard = choose.randrange(shards)
        request = sim.submit(
            prompt(choose.randint(1, 60), choose.randint(1, 3)),
            shard=shard,
            n=choose.choice([1, 1, 1, 2, 3]),
            priority=choose.choice([0, 0, 1]),
            max_tokens=choose.randint(1, 50),
            temperature=choose.choice([0.0, 1.0]),
            seed=choose.randint(0, 9),
            stop_ids=tuple(choose.sample(range(1000), 20)),
        )
        kept.append((shard, request))
        if choose.random() < 0.4:
            shard, victim = kept.pop(choose.randrange(len(kept)))
            cut.append(victim)
            loop = sim.loops[shard]
            if choose.random() < 0.5:
                loop.cancel(victim)
            else:
                for choice in victim.choices:
                    loop.finish(victim, choice.index, loop._generated(choice))
    sim.run()
    sim.check_answers([request for _, request in kept])
    for request in cut:
        for choice in range(request.n):
            got = sim.got(request, choice)
            assert got.ends == 1 and got.tokens == sim.expected(request, choice)[: len(got.tokens)]
    assert all(loop.stats.resyncs == 0 for loop in sim.loops)


@given(
    a=st.sampled_from([1, 2, 4, 8]), shards=st.integers(2, 3), phase=st.integers(0, 80), seed=st.integers(0, 99),
    shard=st.integers(0, 2), delivery=st.sampled_from([0.05, 0.5, 0.95]),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_a_lone_request_is_prefilled_within_the_bound(
    a: int, shards: int, phase: int, seed: int, shard: int, delivery: float
) -> None:
    """B + A + L steps on any shard, whatever the other ranks do and wherever ballots are."""
    b, shard = 2 * a, shard % shards
    sim = Simulation(
        dp=shards + 1, shards=shards, prompt_delivery=delivery, num_blocks=500, max_model_len=400, a=a, b=b, max_window=a,
        seed=seed,
    )  # fmt: skip
    others = [sim.submit(prompt(3, i), max_tokens=200, shard=i) for i in range(shards)]
    for _ in range(phase):
        sim.turn()
    loop = sim.loops[shard]
    at = loop.step
    request = sim.submit(prompt(5, 50), max_tokens=3, shard=shard)
    while not sim.got(request).tokens and sim.turn():
        pass
    planned = next(
        h for h, bodies in zip(sim.headers, sim.bodies, strict=True) if any(add.request_id == request.request_id for body in bodies for add in body.adds)
    )  # fmt: skip
    assert planned.first_step - at <= b + a + loop.pace.lead_steps
    sim.run()
    sim.check_answers([*others, request])


def test_full_queues_on_all_shards_fill_prefill_plans_on_all_ranks() -> None:
    sim = Simulation(
        dp=4,
        shards=2,
        num_blocks=4000,
        max_rows=32,
        max_model_len=200,
        a=4,
        b=8,
        max_batched_tokens=64,
        max_waiting=10_000,
    )
    for i in range(600):
        sim.submit(prompt(20, i), max_tokens=8 + i % 17, advance=False, shard=i % 2)
    for loop in sim.loops:
        loop.advance()
    sim.run()
    later = [
        bodies
        for header, bodies in zip(sim.headers, sim.bodies, strict=True)
        if header.kind is Kind.PREFILL and 4 * 8 <= header.first_step <= sim.headers[-1].first_step - 40
    ]
    partial = sum(any(not body.passes for body in bodies) for bodies in later)
    assert len(later) > 20 and partial / len(later) < 0.05, f"{partial} of {len(later)}"


def test_every_rank_of_every_shard_runs_every_plan() -> None:
    sim = Simulation(dp=3, shards=3)
    request = sim.submit(prompt(5), max_tokens=6, shard=2)
    sim.run()
    sim.check_answers([request])
    assert [h.seq for h in sim.headers] == list(range(1, len(sim.headers) + 1))
    assert all(loop.stats.placeholder_steps > 0 for loop in sim.loops[:2])


# -- between ballot and header -------------------------------------------------------------------------------------------


def held(sim: Simulation, request: Request, shard: int) -> None:
    """Turns until the shard has cast a ballot that would prefill the request."""
    while (cast := sim.loops[shard]._cast) is None or cast.draft is None:
        assert sim.turn()
    assert any(group[0].request is request for draft in cast.draft.ranks for group in draft.admits)


def test_a_request_that_is_cancelled_before_the_header_comes_leaves_a_placeholder() -> None:
    sim = Simulation(dp=2, shards=2)
    request = sim.submit(prompt(9), shard=1)
    held(sim, request, 1)
    sim.loops[1].cancel(request)
    late = sim.submit(prompt(30, 3), shard=1)
    sim.run()
    sim.check_answers([late])
    assert sim.got(request).end is End.CANCELLED
    assert prefills(sim)[0].micro_chunks == (9,) and not any(body.passes or body.adds for body in sim.bodies[0])
    assert sim.headers[1].kind is Kind.PREFILL, "what came meanwhile is in the next plan"


def test_one_choice_less_runs_fewer_rows() -> None:
    sim = Simulation(dp=2, shards=2, num_blocks=100)
    request = sim.submit(prompt(9), n=3, shard=1, temperature=1.0, max_tokens=4)
    held(sim, request, 1)
    sim.loops[1].finish(request, 0, 0)
    sim.run()
    assert [sim.got(request, i).end for i in range(3)] == [End.STOP, End.LENGTH, End.LENGTH]
    assert [sim.got(request, i).tokens for i in (1, 2)] == [sim.expected(request, i) for i in (1, 2)]


def test_windows_are_as_long_as_the_shard_with_the_fewest_blocks_promised() -> None:
    """One shard's rank has room for a step or two, the other's for many; answers come from both."""
    sim = Simulation(dp=2, shards=2, num_blocks=11, max_model_len=40, max_window=8, a=8, b=16, prompt_delivery=0.2)
    tight = [sim.submit(prompt(4, i), max_tokens=20, shard=1) for i in range(1, 4)]
    roomy = sim.submit(prompt(4, 9), max_tokens=30, shard=0)
    sim.run()
    sim.check_answers([*tight, roomy])
    assert {h.k for h in sim.headers if h.kind is Kind.DECODE} - {8}, "no window was shortened"
    assert sim.loops[1].stats.preemptions > 0 and sim.loops[0].stats.preemptions == 0


def test_a_shard_that_lags_takes_the_coordinators_step() -> None:
    sim = Simulation(dp=2, shards=2)
    request = sim.submit(prompt(5), shard=1, max_tokens=30)
    for _ in range(40):
        sim.turn()
    lagging = sim.loops[1]
    lagging._position = replace(lagging._position, step=lagging._position.step - 1)
    sim.run()
    sim.check_answers([request])
    assert lagging.stats.resyncs == 1 and lagging.step == sim.loop.step


def test_a_shard_that_missed_a_plan_does_not_go_on() -> None:
    sim = Simulation(dp=2, shards=2)
    sim.submit(prompt(5), shard=1)
    loop = sim.loops[1]
    with pytest.raises(Conflict, match="agreed on plan 4, but this shard has sent plans up to 0"):
        loop.on_header(1, Header(1, 4, Kind.DECODE, 6, 2), 0.0)


# -- sleep and new work --------------------------------------------------------------------------------------------------


class Explorer:
    """Runs a scenario once for every sequence of choices that it can make."""

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []  # (choice, of how many)
        self._at = 0

    def choose(self, count: int) -> int:
        if self._at == len(self._path):
            self._path.append((0, count))
        choice, of = self._path[self._at]
        assert of == count, "the scenario is not deterministic"
        self._at += 1
        return choice

    def all(self, scenario: Callable[[Explorer], None]) -> int:
        runs = 0
        while True:
            self._at = 0
            scenario(self)
            runs += 1
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return runs
            choice, of = self._path.pop()
            self._path.append((choice + 1, of))


def explore(shards: int, arrivals: Sequence[int], *, eager: bool, own_waits: bool) -> Callable[[Explorer], None]:
    """Each of `arrivals` (a shard) comes at any moment between any two deliveries, and steps of workers too unless they are
    `eager`: then these come at once. `own_waits`: the coordinator's own headers come at any moment too."""

    def scenario(explorer: Explorer) -> None:
        sim = Simulation(dp=shards, shards=shards, num_blocks=8, max_rows=2, max_model_len=16, prompt_delivery=0.0)
        sim.own_header_waits = own_waits
        pending, requests = list(arrivals), list[Request]()

        def arrive() -> None:
            requests.append(sim.submit(prompt(3, len(requests)), max_tokens=1, shard=pending.pop(0)))

        while True:
            while eager and sim._behind():
                sim.turn()
            actions: list[Callable[[], object]] = [
                lambda box=box: box.popleft()() for box in (*sim.up, *sim.down) if box
            ]
            actions += [arrive] if pending else []
            actions += [sim.turn] if sim._behind() else []
            if not actions:
                break
            actions[explorer.choose(len(actions)) if len(actions) > 1 else 0]()
        sim.check_answers(requests)  # nothing is under way, nothing runs, and without a tick all were served
        sim.run()
        assert all(loop._asleep for loop in sim.loops)

    return scenario


@pytest.mark.parametrize("arrivals", [(0,), (1,)])
def test_one_arrival_in_every_order(arrivals: tuple[int, ...]) -> None:
    assert Explorer().all(explore(2, arrivals, eager=False, own_waits=True)) > 50


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arrivals", [(0, 1), (1, 0), (1, 1), (0, 0)])
def test_sleep_and_new_work_cannot_cross_with_two_shards(arrivals: tuple[int, ...], eager: bool) -> None:
    assert Explorer().all(explore(2, arrivals, eager=eager, own_waits=eager)) > 100


@pytest.mark.parametrize(
    "arrivals", [(1, 2), pytest.param((0, 1), marks=pytest.mark.slow), pytest.param((2, 0), marks=pytest.mark.slow)]
)
def test_sleep_and_new_work_cannot_cross_with_three_shards(arrivals: tuple[int, ...]) -> None:
    assert Explorer().all(explore(3, arrivals, eager=True, own_waits=False)) > 1000
