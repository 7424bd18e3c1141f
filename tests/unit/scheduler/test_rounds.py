"""How often the ranks are asked: once a round, however many of them there are and however many outcomes a plan has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep_common.steps import Kind
from lockstep_scheduler import plan
from tests.unit.scheduler.simulation import Simulation


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each time that a shard asks its ranks."""
    calls: list[int] = []
    real = plan.votes

    def votes(ranks, *args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append(len(ranks))
        return real(ranks, *args, **kwargs)

    monkeypatch.setattr(plan, "votes", votes)
    yield calls


@given(
    dp=st.integers(1, 12),
    shards=st.integers(1, 2),
    each=st.integers(1, 9),
    length=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_plan_costs_one_question_and_so_does_what_is_queued(
    asked: list[int], dp: int, shards: int, each: int, length: int, seed: int
) -> None:
    """Answers of one length, so that all rows end together, `park` is agreed while the last plan still runs, and its outcomes
    (several a rank) come afterwards."""
    asked.clear()
    shards = min(shards, dp)
    sim = Simulation(dp=dp, shards=shards, max_rows=4, num_blocks=200, seed=seed)
    requests = [sim.submit([1 + i, 2, 3], max_tokens=length, shard=i % shards, advance=False) for i in range(each * dp)]
    for loop in sim.loops:
        loop.advance()
    sim.run()
    sim.check_answers(requests)
    waves = -(-each // 4)
    # each shard: a question a plan, one for each `park` (at most one a wave), and one before it is called
    assert len(asked) <= shards * (len(sim.headers) + 2 * waves + 2)


def test_rows_that_end_together_are_filled_together() -> None:
    """The first rank's outcome makes room there only; the prefill plan waits for those of the others."""
    sim = Simulation(dp=6, max_rows=2, num_blocks=200)
    requests = [sim.submit([1 + i, 2, 3], max_tokens=8, advance=False) for i in range(24)]
    sim.loop.advance()
    sim.run()
    sim.check_answers(requests)
    passes = [bodies for header, bodies in zip(sim.headers, sim.bodies, strict=True) if header.kind is Kind.PREFILL]
    assert len(passes) == 2 and all(body.passes for bodies in passes for body in bodies)
    assert sim.loop.stats.placeholder_steps == 0


def test_who_comes_while_the_last_plan_runs_is_asked_for_at_once() -> None:
    """The group agreed on `park`; a request still goes into a plan that waits behind the running one."""
    sim = Simulation(dp=2, max_rows=2, num_blocks=200)
    first = sim.submit([1, 2, 3], max_tokens=2)
    while not (sim.loop._asleep and sim.loop._inflight):
        assert sim.turn()
    sent = len(sim.headers)
    second = sim.submit([4, 5, 6], max_tokens=2)
    assert len(sim.headers) == sent + 1
    sim.run()
    sim.check_answers([first, second])
