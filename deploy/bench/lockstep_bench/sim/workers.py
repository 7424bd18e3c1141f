"""The workers of a group without a model: rows that grow a token a step, and what they report, when.

All ranks run each step together, so one object stands for all of them: a plan starts when every rank has it and the plan
before has ended, and its steps have the times of the cost model. The messages are the real worker's (`Coalescer`): at the
notice, at the end, when a row begins or ends, and before a step is 4 ms old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from lockstep_bench.sim.costs import TERMS, CostModel, Work
from lockstep_common.steps import (
    NO_U64,
    U64,
    AddRow,
    Body,
    Flag,
    Header,
    Kind,
    PlanOutcome,
    pack_words,
)
from lockstep_worker.protocol import Coalescer, StepResult

VOCAB_SIZE = 1 << 31  # of ids that nobody reads
_NS = 1_000_000_000


class PlanError(AssertionError):
    """A plan that a worker would refuse."""


@dataclass(slots=True)
class Totals:
    """What the ranks did, summed over steps; `terms` in seconds by `costs.TERMS`."""

    steps: dict[Kind, int] = field(default_factory=lambda: {Kind.PREFILL: 0, Kind.DECODE: 0})
    seconds: dict[Kind, float] = field(default_factory=lambda: {Kind.PREFILL: 0.0, Kind.DECODE: 0.0})
    prefilled: int = 0  # prompt tokens computed
    empty_rank_passes: int = 0  # prefill passes of ranks that had nothing in them
    empty_rank_steps: int = 0  # decode steps of ranks without a row
    terms: dict[Kind, dict[str, float]] = field(
        default_factory=lambda: {kind: dict.fromkeys(TERMS, 0.0) for kind in (Kind.PREFILL, Kind.DECODE)}
    )


@dataclass(slots=True)
class _Queued:
    header: Header
    bodies: Sequence[Body]
    arrived: npt.NDArray[np.int64]  # ns, a rank


class Workers:
    """`dp` ranks of `max_rows` rows. `generates` says how many tokens a request generates before it ends by itself."""

    def __init__(
        self,
        dp: int,
        max_rows: int,
        costs: CostModel,
        generates: Mapping[str, int],
        at: Callable[[int, Callable[[], None]], None],
        deliver: Callable[[int, Sequence[PlanOutcome]], None],
        record: Callable[[Work], None] | None = None,
    ) -> None:
        """`at(ns, call)` calls at a time; `deliver(ns, outcomes)` takes what the ranks send at that time."""
        self.totals = Totals()
        self._dp = dp
        self._costs = costs
        self._generates = generates
        self._at, self._deliver, self._record = at, deliver, record
        self._length = np.zeros((dp, max_rows), np.int64)  # tokens of the row's sequence
        self._computed = np.zeros((dp, max_rows), np.int64)
        self._end = np.zeros((dp, max_rows), np.int64)  # length at which it ends
        self._limit = np.zeros((dp, max_rows), np.int64)
        self._occupied = np.zeros((dp, max_rows), bool)
        self._alive = np.zeros((dp, max_rows), bool)
        self._fresh = np.zeros((dp, max_rows), bool)  # no token yet since the row was added
        self._queue: deque[_Queued] = deque()
        self._running: _Queued | None = None
        self._coalescers: list[Coalescer] = []
        self._free_ns = np.zeros(dp, np.int64)
        self._seq = 0
        self._last: list[PlanOutcome] = []

    # -- plans come ---------------------------------------------------------------------------------------------------

    def arrive(self, header: Header, bodies: Sequence[Body], arrived: npt.NDArray[np.int64]) -> None:
        """Every rank has got the plan, at the times `arrived` (ns); the last of them is now."""
        if header.seq != self._seq + 1:
            raise PlanError(f"plan {header.seq} after {self._seq}")
        self._seq = header.seq
        self._queue.append(_Queued(header, bodies, arrived))
        if self._running is None:
            self._start(int(arrived.max()))

    def _start(self, now: int) -> None:
        """Begins the oldest plan and decides all of its steps; what they report leaves at the time of each."""
        self._running = plan = self._queue.popleft()
        header = plan.header
        for rank, body in enumerate(plan.bodies):
            self._apply(rank, body)
        prefill = header.kind is Kind.PREFILL
        steps = [self._prefill(plan.bodies)] if prefill else self._decode(header, plan.bodies)
        self._coalescers = coalescers = self._opened(plan)
        at = now + int(self._costs.rates.plan * _NS)
        for work, words in steps:
            cost = self._costs.step(work)
            self._count(work, cost.seconds, cost.terms)
            at += max(1, int(cost.seconds * _NS))
            due = [c for c, mine in zip(coalescers, words, strict=True) if c.add(StepResult(words=mine), at)]
            outcomes = [c.flush(0) for c in due]
            if due and not due[0].complete:
                self._at(at, lambda at=at, outcomes=outcomes: self._deliver(at, outcomes))  # type: ignore[misc]
        assert len(outcomes) == self._dp and all(o.last for o in outcomes)
        self._last = outcomes
        self._at(at, lambda: self._finish(at))

    def _opened(self, plan: _Queued) -> list[Coalescer]:
        """A rank opens a plan when it has it and has ended the one before; what it waits for the others is in its first step."""
        starts = np.maximum(plan.arrived, self._free_ns)
        idle = starts - self._free_ns if plan.header.seq > 1 else np.zeros_like(starts)
        return [
            Coalescer(
                plan.header, dp_rank=rank, notice=body.notice, start_ns=int(starts[rank]), idle_ns=int(idle[rank])
            )
            for rank, body in enumerate(plan.bodies)
        ]

    def _finish(self, now: int) -> None:
        """The last step has ended: its outcomes say how long the next plan took to come, if it was still on its way."""
        assert self._running is not None
        following = self._queue[0] if self._queue else None
        outcomes = []
        for rank, outcome in enumerate(self._last):
            notice = self._coalescers[rank].notice_ns
            took = max(0, int(following.arrived[rank]) - notice) if following is not None and notice else 0
            outcomes.append(replace(outcome, turnaround_ns=took) if took else outcome)
        self._running = None
        self._free_ns[:] = now
        self._deliver(now, outcomes)
        if following is not None:
            self._start(now)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _apply(self, rank: int, body: Body) -> None:
        removes = body.removes.astype(np.int64)
        if not self._occupied[rank, removes].all():
            raise PlanError(f"rank {rank}: a row is removed that nobody has")
        self._occupied[rank, removes] = self._alive[rank, removes] = False
        for add in body.adds:
            self._add(rank, add)

    def _add(self, rank: int, add: AddRow) -> None:
        if self._occupied[rank, add.row]:
            raise PlanError(f"rank {rank}: row {add.row} is added twice")
        where = rank, add.row
        self._occupied[where] = self._alive[where] = self._fresh[where] = True
        self._length[where] = len(add.tokens)
        self._computed[where] = add.computed
        self._limit[where] = add.limit
        self._end[where] = min(add.limit, add.prompt_len + self._generates[add.request_id])

    def _prefill(self, bodies: Sequence[Body]) -> tuple[Work, list[U64]]:
        starts: list[npt.ArrayLike] = []
        counts: list[npt.ArrayLike] = []
        words, sampled = [], np.zeros(self._dp)
        for rank, body in enumerate(bodies):
            chunks = body.passes[0] if body.passes else None
            rows = chunks.rows.astype(np.int64) if chunks else np.zeros(0, np.int64)
            begin, count = (chunks.starts.astype(np.int64), chunks.counts.astype(np.int64)) if chunks else (rows, rows)
            if (self._computed[rank, rows] != begin).any() or not self._occupied[rank, rows].all():
                raise PlanError(f"rank {rank}: a chunk does not begin where the row's KV ends")
            self._computed[rank, rows] = begin + count
            done = rows[self._computed[rank, rows] == self._length[rank, rows]]
            sampled[rank] = len(done)
            starts.append(begin)
            counts.append(count)
            words.append(self._sample(rank, done[self._alive[rank, done]]))
            self.totals.prefilled += int(count.sum())
            self.totals.empty_rank_passes += not len(rows)
        return Work.prefill(starts, counts, sampled), words

    def _decode(self, header: Header, bodies: Sequence[Body]) -> list[tuple[Work, list[U64]]]:
        listed = [body.rows.astype(np.int64) for body in bodies]
        for rank, rows in enumerate(listed):
            if (
                not self._occupied[rank, rows].all()
                or (self._computed[rank, rows] < self._length[rank, rows] - 1).any()
            ):
                raise PlanError(f"rank {rank}: a row decodes that has no KV of its prompt")
        count = np.array([len(rows) for rows in listed], float)
        self.totals.empty_rank_steps += header.k * int((count == 0).sum())
        steps = []
        for _ in range(header.k):
            context = np.array([self._length[rank, rows].sum() for rank, rows in enumerate(listed)], float)
            words = [self._sample(rank, rows[self._alive[rank, rows]]) for rank, rows in enumerate(listed)]
            steps.append((Work.decode(context, count, header.row_bucket), words))
        return steps

    def _sample(self, rank: int, rows: npt.NDArray[np.int64]) -> U64:
        """A token for each of these rows; a row that has its last one is not alive any more."""
        if not len(rows):
            return NO_U64
        self._length[rank, rows] += 1
        self._computed[rank, rows] = self._length[rank, rows] - 1
        length = self._length[rank, rows]
        ended = length >= self._end[rank, rows]
        by_length = length >= self._limit[rank, rows]
        flags = np.where(ended, np.where(by_length, int(Flag.LENGTH), int(Flag.STOP)), 0)
        flags |= np.where(self._fresh[rank, rows], int(Flag.FIRST), 0)
        self._fresh[rank, rows] = False
        self._alive[rank, rows[ended]] = False
        return pack_words(length % VOCAB_SIZE, rows, flags)

    def _count(self, work: Work, seconds: float, terms: Mapping[str, float]) -> None:
        self.totals.steps[work.kind] += 1
        self.totals.seconds[work.kind] += seconds
        mine = self.totals.terms[work.kind]
        for name, value in terms.items():
            mine[name] += value
        if self._record is not None:
            self._record(work)
