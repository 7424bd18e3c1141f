"""End, cancel, stop string, preemption and re-adding, at every moment of two plans in flight."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_scheduler import plan
from lockstep_scheduler.request import Choice, Phase, Request
from tests.unit.scheduler.simulation import Simulation

OPERATIONS = ("cancel", "finish", "preempt")


def apply(sim: Simulation, operation: str, request: Request) -> None:
    choice = request.choices[0]
    if choice.phase is Phase.ENDED:
        return
    if operation == "cancel":
        sim.loop.cancel(request)
    elif operation == "finish":
        sim.loop.finish(request, 0, sim.loop._generated(choice))
    elif choice.phase in (Phase.PREFILL, Phase.DECODE):
        force_preemption(sim, choice)


def force_preemption(sim: Simulation, choice: Choice) -> None:
    sim.loop._books.requeue(plan.preempt(sim.loop.ranks[choice.rank], choice, sim.loop.slots))
    sim.loop.advance()


def run(window: int, seed: int, script: list[tuple[int, str, int]]) -> None:
    """`script`: (turn, operation, which request)."""
    sim = Simulation(a=window, b=2 * window, max_window=window, max_rows=2, seed=seed, max_batched_tokens=8)
    lengths = (6, 14, 5)
    requests = [sim.submit([i + 1] * n, max_tokens=7 + 5 * i) for i, n in enumerate(lengths)]
    for turn in range(1000):
        for _, operation, which in (entry for entry in script if entry[0] == turn):
            apply(sim, operation, requests[which])
        if not sim.turn():
            break
    sim.run()
    ended = {which for _, operation, which in script if operation != "preempt"}
    sim.check_answers([r for i, r in enumerate(requests) if i not in ended])
    for i in ended:
        got = sim.got(requests[i])
        assert got.ends == 1
        assert got.tokens == sim.expected(requests[i])[: len(got.tokens)]


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_operation_at_every_turn(operation: str, window: int) -> None:
    for turn, which in itertools.product(range(1, 30), range(3)):
        run(window, 0, [(turn, operation, which)])


@given(
    window=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
    script=st.lists(
        st.tuples(st.integers(1, 25), st.sampled_from(OPERATIONS), st.integers(0, 2)), min_size=2, max_size=5
    ),
)
@settings(max_examples=60, deadline=None)
def test_several_operations(window: int, seed: int, script: list[tuple[int, str, int]]) -> None:
    run(window, seed, script)
