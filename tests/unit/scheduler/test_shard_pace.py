"""Late commit over shards (P2), in simulated time: the next plan reaches every rank before the running one ends, and not long
before. Steps, the way to workers and the way between shards take their time; steps begin when all ranks have the plan."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from lockstep_common.clock import ManualClock
from lockstep_common.steps import Body, GroupConfig, Header, Kind, Plan, PlanOutcome, Sampling
from lockstep_scheduler.ledger import NoLedger
from lockstep_scheduler.loop import StepLoop
from lockstep_scheduler.pace import Pace
from lockstep_scheduler.polls import Ballot, Coordinator, Tally, divide
from lockstep_scheduler.settings import Group, Settings
from lockstep_scheduler.vote import Position, Rules
from lockstep_worker.protocol import StepResult
from tests.scripted_worker import ScriptedEngine

WINDOW = 8


class Timed:
    """Shards with one rank each. `leads` holds, for each plan, the seconds by which the last rank had it before the plan in front
    of it ended; a negative one is a device that stood idle."""

    def __init__(self, shards: int, *, step: float, way: float, between: float, jitter: float = 0.3) -> None:
        """`way`: from a scheduler to its worker, or back; `between`: from shard to shard; each up to `jitter` longer."""
        self.clock, self.random = ManualClock(0.0), random.Random(1)
        self.step, self.way, self.between, self.jitter = step, way, between, jitter
        self.leads: list[float] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._arrived: dict[int, dict[int, tuple[float, Plan]]] = {}
        self._ends: dict[int, float] = {0: 0.0}
        self._noticed: dict[int, dict[int, float]] = {}
        self._fifo: dict[object, float] = {}
        self.engines = [
            ScriptedEngine(max_model_len=2000, num_blocks=2000, max_rows=4, wait=lambda seconds: None)
            for _ in range(shards)
        ]
        settings = Settings(max_window=WINDOW, a=WINDOW, b=2 * WINDOW)
        self.loops = [
            StepLoop(settings, self.clock, NoLedger(), lambda batch: None, partial(self._later, shard))
            for shard in range(shards)
        ]
        self.coordinator = Coordinator(
            Tally(divide(shards, shards), [str(i) for i in range(shards)], 60.0), self._tell, self._fail
        )
        for rank, loop in enumerate(self.loops):
            facts = self.engines[rank].configure(
                GroupConfig(1, 1, rank, rank, 0, shards, 1, "", 0, 4, 2000, 64, WINDOW, 0)
            )
            group = Group(1, 1, shards, facts, 4, 2000, ranks=range(rank, rank + 1))
            loop.start(group, _Workers(self, rank), _Far(self, rank) if rank else self.coordinator)

    def run(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds:
            at, _, event = heapq.heappop(self._events)
            self.clock.advance(max(0.0, at - self.clock.now()))
            event()

    def after(self, seconds: float, event: Callable[[], None], line: object = None) -> None:
        """`line`: messages of one connection keep their order."""
        at = self.clock.now() + seconds * (1 + self.random.random() * self.jitter)
        if line is not None:
            at = self._fifo[line] = max(at, self._fifo.get(line, 0.0))
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def send(self, rank: int, header: Header, body: Body) -> None:
        self.after(self.way, partial(self._arrive, rank, Plan(header, body)), ("plan", rank))

    def _later(self, shard: int, seconds: float) -> None:
        event = self.loops[shard].advance
        heapq.heappush(self._events, (self.clock.now() + seconds, next(self._numbers), event))

    def _tell(self, shard: int, number: int, header: Header | None, waited: float) -> None:
        loop = self.loops[shard]
        message = partial(loop.call, number) if header is None else partial(loop.on_header, number, header, waited)
        if shard:
            self.after(self.between, message, ("down", shard))
        else:
            message()

    def _fail(self, error: Exception) -> None:
        raise error

    # -- the devices

    def _arrive(self, rank: int, plan: Plan) -> None:
        seq = plan.header.seq
        self._arrived.setdefault(seq, {})[rank] = (self.clock.now(), plan)
        if len(self._arrived[seq]) == len(self.loops) and seq - 1 in self._ends:
            self._begin(seq)

    def _begin(self, seq: int) -> None:
        plans, before = self._arrived[seq], self._ends[seq - 1]
        there = max(at for at, _ in plans.values())
        if seq > 1:
            self.leads.append(before - there)
        start = max(before, there)
        header = plans[0][1].header
        steps = header.k if header.kind is Kind.DECODE else 1
        self._ends[seq] = start + steps * self.step
        self._noticed[seq] = {rank: start + plan.body.notice * self.step for rank, (_, plan) in plans.items()}
        for rank, (at, plan) in plans.items():
            results = list(self.engines[rank].run(plan))
            idle = max(0.0, at - before)
            if plan.body.notice:
                self._report(rank, plan, results, 0, plan.body.notice, self._noticed[seq][rank], idle)
            self._report(rank, plan, results, plan.body.notice, steps, self._ends[seq], idle)

    def _report(
        self, rank: int, plan: Plan, results: Sequence[StepResult], first: int, until: int, when: float, idle: float
    ) -> None:
        def leave() -> None:
            seq, now = plan.header.seq, self.clock.now()
            following = self._arrived.get(seq + 1, {}).get(rank)
            last = until == len(results)
            turnaround = following[0] - self._noticed[seq][rank] if last and plan.body.notice and following else 0.0
            outcome = PlanOutcome(
                epoch=1, seq=seq, dp_rank=rank, first=first, steps=until - first, last=last,
                counts=np.array([len(r.words) for r in results[first:until]], np.uint32),
                words=np.concatenate([r.words for r in results[first:until]]), step_ns=int(self.step * 1e9),
                turnaround_ns=int(max(0.0, turnaround) * 1e9), idle_ns=int(idle * 1e9) if first == 0 else 0,
            )  # fmt: skip
            assert now >= when - 1e-9
            self.after(self.way, partial(self.loops[rank].on_outcome, outcome), ("outcome", rank))

        heapq.heappush(self._events, (when, next(self._numbers), leave))


class _Workers:
    def __init__(self, group: Timed, rank: int) -> None:
        self._group, self._rank = group, rank

    def send(self, header: Header, bodies: Sequence[Body]) -> None:
        self._group.send(self._rank, header, bodies[0])


class _Far:
    turnaround = 0.0

    def __init__(self, group: Timed, rank: int) -> None:
        self._group, self._rank = group, rank

    def cast(self, ballot: Ballot, position: Position, rules: Rules | None, now: float) -> None:
        group, rank = self._group, self._rank
        group.after(group.between, lambda: group.coordinator.receive(rank, ballot, group.clock.now()), ("up", rank))

    def report(self, seq: int, loads: object) -> None:
        raise AssertionError("there are no experts here")

    def overdue(self, now: float) -> None:
        return None


def steady(group: Timed, windows: int = 60) -> list[float]:
    """Leads of the plans of a full batch on every rank, once the pace is known."""
    for loop in group.loops:
        for i in range(4):
            sampling = Sampling(max_tokens=1900, temperature=0.0)
            loop.submit(
                request_id=f"r{i}", session=1, handle=i, prompt=np.array([i + 1, 2], np.uint32), sampling=sampling
            )
        loop.advance()
    group.run(windows * WINDOW * group.step)
    assert len(group.leads) > 0.9 * windows
    return group.leads[len(group.leads) // 3 :]


@pytest.mark.parametrize("step", [0.005, 0.015])
@pytest.mark.parametrize("between", [0.0002, 0.005])
@pytest.mark.parametrize("shards", [2, 3])
def test_every_plan_is_there_in_time_and_not_long_before(shards: int, between: float, step: float) -> None:
    way = 0.0005
    group = Timed(shards, step=step, way=way, between=between)
    leads = steady(group)
    late = [lead for lead in leads if lead < 0]
    assert len(late) <= 0.02 * len(leads) and -sum(late) <= 0.002 * len(leads) * WINDOW * step
    longest = (2 * way + 2 * between) * 1.3  # what a plan must be composed ahead for; half of it again is margin
    assert np.mean(leads) <= 0.002 + 1.5 * longest
    for rank, loop in enumerate(group.loops):  # what a shard waits for others is not its own turnaround
        assert loop.pace.turnaround <= 0.001 + (longest if rank else 2.6 * way)


def test_a_coordinator_that_holds_its_ballot_for_itself_alone_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rule above is for: without the others' turnaround in its pace, the header comes too late for them."""
    monkeypatch.setattr(Pace, "_needed", property(lambda self: self.turnaround))
    leads = steady(Timed(2, step=0.015, way=0.0005, between=0.005))
    assert np.mean([lead < 0 for lead in leads]) > 0.2
