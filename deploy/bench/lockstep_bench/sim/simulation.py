"""A whole engine group in one thread and simulated time: the real step loop, workers without a model, messages that take time.

Time is whole nanoseconds. Events happen in order; what the scheduler's process does takes the time of `Host` on one core a
shard, so that a scheduler that is too slow is seen in the figures. The loop's own time is measured beside that
(`HostTime`, CPU seconds of its thread) and changes nothing: a run is the same for the same seed on any machine.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep_bench.sim.costs import CostModel, Work
from lockstep_bench.sim.traces import Asked
from lockstep_bench.sim.workers import VOCAB_SIZE, Totals, Workers
from lockstep_common.errors import ConfigError, LockstepError, Overloaded
from lockstep_common.steps import Body, Header, Kind, KvGroup, PlanOutcome, Sampling, WorkerFacts
from lockstep_scheduler.booking import EventBatch
from lockstep_scheduler.ledger import NoLedger
from lockstep_scheduler.loop import StepLoop
from lockstep_scheduler.polls import Polls
from lockstep_scheduler.settings import Group, Settings
from lockstep_scheduler.vote import Point, Rules, point

_NS = 1_000_000_000
_TICK_NS = _NS // 4
PROGRESS_S = 5.0  # seconds of this machine between two lines about a long run
_FIRST_PREFIX = VOCAB_SIZE // 2  # ids of shared beginnings; below it those of requests


@dataclass(frozen=True, slots=True)
class Host:
    """What a scheduler's core takes, microseconds; several shards drive `shard_ranks` ranks each, side by side, and then the
    vote is one more round trip. Defaults: about what `lockstep sim scale` finds for 32 ranks, and 50 to
    100 us for a message over gRPC."""

    submit_us: float = 100.0
    outcome_us: float = 250.0
    body_us: float = 200.0
    shard_ranks: int = 32


@dataclass(frozen=True, slots=True)
class Engine:
    """The sizes of a group."""

    dp: int = 1
    max_rows: int = 64
    kv_tokens: int = 200_000  # of a DP rank
    block_size: int = 64
    max_model_len: int = 32_768

    def group(self) -> Group:
        blocks = self.kv_tokens // self.block_size + 1
        if blocks < 2:
            raise ConfigError(f"kv_tokens {self.kv_tokens} is less than a block of {self.block_size}")
        facts = WorkerFacts(
            model="simulated",
            config_hash="",
            device="cuda:0",
            dtype="",
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            max_rows=self.max_rows,
            weights_epoch=0,
            groups=(KvGroup("full", self.block_size, blocks),),
            deterministic=True,
            routed_experts=True,
        )
        return Group(1, 1, self.dp, facts, self.max_rows, min(self.max_model_len, (blocks - 1) * self.block_size))


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `concurrency` > 0: a closed loop, the next request comes when one has ended, whatever its arrival says. It ends
    when all requests have, or after `seconds` (0: not before); what happens before `warm_up` is not counted."""

    engine: Engine
    settings: Settings
    costs: CostModel
    host: Host = field(default_factory=Host)
    rtt_s: float = 0.0005
    jitter_s: float = 0.0  # mean of an exponential delay of each message
    concurrency: int = 0
    seconds: float = 0.0
    warm_up: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class HostTime:
    """CPU seconds of the real loop's own code."""

    compose: float = 0.0  # in `advance`: votes, plans
    book: float = 0.0  # the rest of `on_outcome`
    submit: float = 0.0
    plans: int = 0
    outcomes: int = 0
    tokens: int = 0


class TimedLoop(StepLoop):
    """The step loop, and how long it takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.host = HostTime()
        super().__init__(*args, **kwargs)

    def advance(self) -> None:
        before = time.thread_time()
        super().advance()
        self.host.compose += time.thread_time() - before


@dataclass(slots=True)
class Votes:
    """Plans by what was agreed. `idle`: prefill while nothing ran, an ANY point by law 1."""

    prefill_any: int = 0
    prefill_all: int = 0
    prefill_idle: int = 0
    with_placeholders: int = 0  # prefill plans in which a rank had nothing to do
    decode: int = 0
    decode_at_point: int = 0  # decode plans at a point where prefill could have begun, while something waited
    window_steps: int = 0


class Seen:
    """What the sessions and the wire saw, an element a request."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        count = len(asked)
        self.prompt = np.array([a.prompt for a in asked])
        self.expected = np.array([a.generates for a in asked])
        self.submitted = np.full(count, np.nan)
        self.admitted = np.full(count, np.nan)
        self.first = np.full(count, np.nan)
        self.last = np.full(count, np.nan)
        self.got = np.zeros(count, np.int64)
        self.ends = np.zeros(count, np.int64)
        self.errors = 0
        self.refused = 0
        self.gaps: list[npt.NDArray[np.float32]] = []
        self.emitted: list[tuple[float, int]] = []  # (time, tokens)
        self.usage: list[tuple[float, float, float, float]] = []  # (time, mean and largest KV usage, mean rows)

    def take(self, batch: EventBatch, now: float) -> int:
        """Books a batch of events; returns how many requests ended."""
        at = batch.handles.astype(np.int64)
        counts = batch.counts.astype(np.int64)
        if (batch.offsets[counts > 0] != self.got[at[counts > 0]]).any() or (self.ends[at] > 0).any():
            raise LockstepError("a session got a token twice, out of order, or after the end")
        some = at[counts > 0]
        begun = ~np.isnan(self.first[some])
        self.gaps.append((now - self.last[some[begun]]).astype(np.float32))
        self.first[some[~begun]] = now
        self.last[some] = now
        self.got[at] += counts
        self.emitted.append((now, int(counts.sum())))
        self.errors += len(batch.errors)
        ended = at[batch.ends != 0]
        self.ends[ended] += 1
        return len(ended)


class Simulation:
    """Runs a case over requests: `run`, then read `seen`, `votes`, `workers.totals`, `loop`."""

    def __init__(
        self,
        case: Case,
        asked: Sequence[Asked],
        record: Callable[[Work], None] | None = None,
        polls: Polls | None = None,
    ) -> None:
        """`record` is shown each step's work when its plan begins, `polls` each ballot (by default they are only counted)."""
        self.case = case
        self._polls = polls
        self.asked = asked
        self.seen = Seen(asked)
        self.votes = Votes()
        self.end = 0.0
        self.progress: Callable[[str], None] | None = None  # gets a line every PROGRESS_S
        self._generates = {str(handle): a.generates for handle, a in enumerate(asked)}
        self._random = random.Random(case.seed)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._now = 0  # of the event
        self._clock_ns = 0  # of the scheduler, which may be behind with its work
        self._outbox: list[tuple[Header, Sequence[Body]]] = []
        self._emitting = 0.0
        self._next = 0
        self._to_submit = 0
        self._half_ns = int(case.rtt_s / 2 * _NS)
        self._arrivals = np.zeros(
            (2, case.engine.dp), np.int64
        )  # last message to and from each rank: streams keep order
        self.workers = Workers(
            case.engine.dp, case.engine.max_rows, case.costs, self._generates, self._at, self._leave, record
        )
        self.loop = TimedLoop(case.settings, self, NoLedger(), self._emit, self._defer)
        self.before = replace(self.loop.stats)  # counters at the end of the warm-up

    # -- a clock ------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock_ns / _NS

    wall = now

    @property
    def rules(self) -> Rules:
        """The intervals of the vote, as they are now."""
        assert self.loop.rules is not None, "a shard that leads its group knows its rules"
        return self.loop.rules

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """LockstepError if the scheduler stands still with unfinished requests, or is silent for too long."""
        told = time.monotonic()
        self._schedule(0, lambda: self.loop.start(self.case.engine.group(), self, self._polls))
        if self.case.concurrency:
            self._to_submit = min(self.case.concurrency, len(self.asked))
            self._at(0, self._submit_more)
        else:
            self._at_next_arrival()
        self._at(_TICK_NS, self._tick)
        if self.case.warm_up:
            self.call_at(self.case.warm_up, self._forget)
        limit = int(self.case.seconds * _NS) if self.case.seconds else None
        while self._events:
            at, _, call = heapq.heappop(self._events)
            if limit is not None and at > limit:
                self.end = self.case.seconds
                return
            self._now = at
            call()
            if self.progress is not None and (now := time.monotonic()) - told > PROGRESS_S:
                told = now
                self.progress(self._so_far())

    def _so_far(self) -> str:
        of = f" of {self.case.seconds:g}" if self.case.seconds else ""
        ended = int((self.seen.ends != 0).sum())
        return f"{self._now / _NS:.1f}{of} s simulated, {ended:,} of {len(self.asked):,} requests have ended"

    def call_at(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls something at a simulated time; before `run`."""
        self._at(int(seconds * _NS), call)

    def send(self, header: Header, bodies: Sequence[Body]) -> None:
        """`Workers.send` of the step loop."""
        self._outbox.append((header, bodies))
        self._note(header, bodies)

    def _forget(self) -> None:
        """The warm-up is over: what was counted so far does not count. Requests are told apart by their times."""
        self.workers.totals, self.votes, self.before = Totals(), Votes(), replace(self.loop.stats)

    # -- the scheduler's process ---------------------------------------------------------------------------------------

    def _schedule(self, work_ns: int, call: Callable[[], object]) -> None:
        """The scheduler does something that takes so long, beside the plans that come of it; they leave when it is done."""
        self._clock_ns = max(self._now, self._clock_ns)
        self._emitting = (self._clock_ns + work_ns) / _NS
        call()
        self._clock_ns += work_ns
        host, dp = self.case.host, self.case.engine.dp
        vote = 2 * self._half_ns if dp > host.shard_ranks else 0
        for header, bodies in self._outbox:
            self._clock_ns += int(min(dp, host.shard_ranks) * host.body_us * 1000)
            arrived = self._messages(0, self._clock_ns + vote)
            self._at(int(arrived.max()), lambda h=header, b=bodies, a=arrived: self.workers.arrive(h, b, a))  # type: ignore[misc]
        self._outbox.clear()
        if self._to_submit and self.case.concurrency:
            self._at(self._clock_ns, self._submit_more)

    def _defer(self, seconds: float) -> None:
        self._at(self._clock_ns + int(seconds * _NS) + 1, lambda: self._schedule(0, self.loop.wake))

    def _tick(self) -> None:
        def tick() -> None:
            error = self.loop.tick()
            if error is not None:
                raise error

        self._schedule(0, tick)
        if self._next < len(self.asked) or self.loop.unfinished:
            if not self._events:
                raise LockstepError(f"the scheduler stands still with {self.loop.unfinished} unfinished requests")
            self._at(self._now + _TICK_NS, self._tick)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _at_next_arrival(self) -> None:
        if self._next < len(self.asked):
            self._at(int(self.asked[self._next].arrival * _NS), self._arrive)

    def _arrive(self) -> None:
        first = self._next
        while self._next < len(self.asked) and int(self.asked[self._next].arrival * _NS) <= self._now:
            self._next += 1
        self._submit(range(first, self._next))
        self._at_next_arrival()

    def _submit_more(self) -> None:
        first = self._next
        self._next = min(len(self.asked), first + self._to_submit)
        self._to_submit = 0
        if self._next > first:
            self._submit(range(first, self._next))

    def _submit(self, handles: range) -> None:
        def submit() -> None:
            for handle in handles:
                self._submit_one(handle)
            self.loop.advance()

        self._schedule(int(len(handles) * self.case.host.submit_us * 1000), submit)

    def _submit_one(self, handle: int) -> None:
        asked = self.asked[handle]
        self.seen.submitted[handle] = self._now / _NS
        before = time.thread_time()
        try:
            self.loop.submit(
                request_id=str(handle),
                session=1,
                handle=handle,
                prompt=_prompt(handle, asked),
                sampling=Sampling(max_tokens=asked.limit),
            )
        except Overloaded:
            self.seen.refused += 1
            self.seen.ends[handle] = -1
        self.loop.host.submit += time.thread_time() - before

    def _emit(self, batch: EventBatch) -> None:
        self._to_submit += self.seen.take(batch, self._emitting)
        self.end = self._emitting

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _leave(self, at: int, outcomes: Sequence[PlanOutcome]) -> None:
        """Ranks send outcomes; those that arrive together are booked together."""
        arrived = self._messages(1, at)
        if not self.case.jitter_s:
            self._at(at + self._half_ns, lambda: self._book(outcomes))
            return
        for outcome in outcomes:
            self._at(int(arrived[outcome.dp_rank]), lambda o=outcome: self._book([o]))  # type: ignore[misc]

    def _book(self, outcomes: Sequence[PlanOutcome]) -> None:
        host = self.case.host
        shards = np.bincount([o.dp_rank // host.shard_ranks for o in outcomes])

        def book() -> None:
            timed = self.loop.host
            for outcome in outcomes:
                composed, before = timed.compose, time.thread_time()
                self.loop.on_outcome(outcome)
                timed.book += time.thread_time() - before - (timed.compose - composed)
                timed.outcomes += 1
                timed.tokens += len(outcome.words)

        self._schedule(int(shards.max() * host.outcome_us * 1000), book)

    def _messages(self, direction: int, at: int) -> npt.NDArray[np.int64]:
        """When a message that leaves now is there, for each rank; never before the one before it."""
        mean = self.case.jitter_s * _NS
        delays = [int(self._random.expovariate(1 / mean)) if mean else 0 for _ in range(self.case.engine.dp)]
        arrived: npt.NDArray[np.int64] = np.maximum(
            self._arrivals[direction], at + self._half_ns + np.array(delays, np.int64)
        )
        self._arrivals[direction] = arrived
        return arrived

    def _at(self, ns: int, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (max(ns, self._now), self._count, call))

    # -- figures -------------------------------------------------------------------------------------------------------

    def _note(self, header: Header, bodies: Sequence[Body]) -> None:
        votes, loop, now = self.votes, self.loop, self._clock_ns / _NS
        loop.host.plans += 1
        usage = [rank.pool.usage for rank in loop.ranks]
        self.seen.usage.append((now, sum(usage) / len(usage), max(usage), loop.running / len(usage)))
        for body in bodies:
            for add in body.adds:
                handle = int(add.request_id)
                if np.isnan(self.seen.admitted[handle]):
                    self.seen.admitted[handle] = now
        at = point(header.first_step, self.rules)
        if header.kind is Kind.DECODE:
            votes.decode += 1
            votes.window_steps += header.k
            votes.decode_at_point += at is not Point.NONE and bool(loop.waiting)
            return
        empty = sum(1 for body in bodies if not body.passes)
        votes.with_placeholders += empty > 0
        if at is Point.NONE or (at is Point.ALL and empty):
            votes.prefill_idle += 1
        elif at is Point.ALL:
            votes.prefill_all += 1
        else:
            votes.prefill_any += 1


def _prompt(handle: int, asked: Asked) -> npt.NDArray[np.uint32]:
    """Tokens that are equal where requests share a beginning, and nowhere else."""
    prompt = np.full(asked.prompt, handle, np.uint32)
    if asked.prefix >= 0:
        prompt[: asked.prefix_tokens] = _FIRST_PREFIX + asked.prefix
    return prompt


def simulate(case: Case, asked: Sequence[Asked], progress: Callable[[str], None] | None = None) -> Simulation:
    """A case from start to end."""
    simulation = Simulation(case, asked)
    simulation.progress = progress
    simulation.run()
    return simulation


def settings(options: Mapping[str, Any]) -> Settings:
    """Of the step loop, with a queue that refuses nobody unless told otherwise."""
    return Settings(**({"max_waiting": 1 << 30, "grace": 1.0, "worker_timeout": 600.0} | dict(options)))
