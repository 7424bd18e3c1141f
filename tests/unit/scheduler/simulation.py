"""A whole engine group in one thread and simulated time: the real step loops over scripted workers that check every plan.

With several shards their ballots and headers are on their way for a random while.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep_common.clock import ManualClock
from lockstep_common.errors import LockstepError
from lockstep_common.steps import (
    NO_F32,
    Body,
    GroupConfig,
    Header,
    Kind,
    Plan,
    PlanOutcome,
    PromptScores,
    Sampling,
    TopLogprobs,
)
from lockstep_scheduler import plan
from lockstep_scheduler.booking import EventBatch
from lockstep_scheduler.ledger import NoLedger
from lockstep_scheduler.loop import Group, Settings, StepLoop
from lockstep_scheduler.polls import Ballot, Coordinator, Tally, divide
from lockstep_scheduler.request import End, Request
from lockstep_scheduler.vote import Position, Rules
from lockstep_worker.protocol import StepResult, steps_of
from tests.scripted_worker import Script, ScriptedEngine, toy_output


@dataclass
class Received:
    """What a session was told about one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: End = End.NONE
    ends: int = 0
    error: str = ""
    cached: int = 0
    first_at: float = 0.0
    ended_at: float = 0.0
    last_at: float = 0.0
    largest_gap: float = 0.0


@dataclass
class ShardWorkers:
    """The workers of one shard, as its loop sees them."""

    simulation: Simulation
    shard: int

    def send(self, header: Header, bodies: Sequence[Body]) -> None:
        self.simulation.accept(self.shard, header, bodies)


@dataclass
class FarPolls:
    """The polls of a shard that is not the coordinator: its ballots take their time."""

    simulation: Simulation
    shard: int
    turnaround = 0.0

    def cast(self, ballot: Ballot, position: Position, rules: Rules | None, now: float) -> None:
        assert rules is None
        sim, shard = self.simulation, self.shard
        sim.up[shard].append(lambda: sim.coordinator.receive(shard, ballot, sim.clock.now()))

    def overdue(self, now: float) -> None:
        return None


class Simulation:
    """`dp` scripted workers in lockstep. One `turn` runs one step of one worker, or delivers a message between shards, chosen by
    the random source, and may deliver an outcome; invariants are asserted after every plan."""

    def __init__(
        self,
        *,
        dp: int = 1,
        shards: int = 1,
        prompt_delivery: float = 0.5,
        num_blocks: int = 64,
        block_size: int = 4,
        max_rows: int = 8,
        max_model_len: int = 128,
        step_seconds: float = 0.010,
        seed: int = 0,
        scripts: Sequence[Script] = (),
        vocab_size: int = 1000,
        generated_reusable: bool = True,
        **settings: object,
    ) -> None:
        defaults: dict[str, object] = {"max_batched_tokens": 32, "a": 4, "b": 8, "max_window": 8}
        self.clock = ManualClock()
        self.random = random.Random(seed)
        self.received: dict[tuple[int, int], Received] = defaultdict(Received)
        self.scores: dict[int, PromptScores] = {}  # of prompts, by handle
        self.vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._max_model_len = max_model_len
        self.failures: list[LockstepError] = []
        self._handles = 0
        self.own_header_waits = True  # the coordinator's own header is under way for a while, as the others' are
        self._new_engine = lambda: ScriptedEngine(
            scripts,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=max_rows,
            generated_reusable=generated_reusable,
            wait=lambda seconds: None,
        )
        self.engines = [self._new_engine() for _ in range(dp)]
        self.ranks = divide(dp, shards)
        self.loops = [
            StepLoop(Settings(**(defaults | settings)), self.clock, NoLedger(), self._emit) for _ in self.ranks
        ]  # type: ignore[arg-type]
        self.loop = self.loops[0]
        self._max_rows, self._context = max_rows, min(max_model_len, (num_blocks - 1) * block_size)
        self._prompt_delivery = prompt_delivery
        self.form(1)

    def form(self, epoch: int, num_blocks: int = 0) -> None:
        """Starts all shards under a new epoch, with so many blocks or as many as there are; nothing of the one before is left."""
        dp, places = len(self.engines), len(self.loops)
        self.headers: list[Header] = []
        self.bodies: list[list[Body]] = []
        self._queues: list[deque[Plan]] = [deque() for _ in range(dp)]
        self._accepted = [0] * dp
        self._running: list[tuple[Plan, Iterator[StepResult], int] | None] = [None] * dp
        self._unsent: list[list[StepResult]] = [[] for _ in range(dp)]
        self.up: list[deque[Callable[[], None]]] = [deque() for _ in range(places)]
        self.down: list[deque[Callable[[], None]]] = [deque() for _ in range(places)]
        facts = [
            engine.configure(
                GroupConfig(epoch, 1, i, i, 0, dp, 1, "", 0, self._max_rows, self._max_model_len, 32, 8, num_blocks)
            )
            for i, engine in enumerate(self.engines)
        ]
        self.coordinator = Coordinator(
            Tally(self.ranks, [f"shard {i}" for i in range(places)], 60.0), self._tell, self.failures.append
        )
        for shard, (loop, ranks) in enumerate(zip(self.loops, self.ranks, strict=True)):
            kept = tuple(f.kept_epoch for f in facts)
            group = Group(epoch, 1, dp, facts[0], self._max_rows, self._context, ranks=ranks, kept=kept)
            polls = None if places == 1 else FarPolls(self, shard) if shard else self.coordinator
            loop.start(group, ShardWorkers(self, shard), polls)

    def lose(self, error: LockstepError, gone: Collection[int] = ()) -> None:
        """The group is gone, with what it has not reported; of the workers those of the ranks `gone`, with their caches."""
        for loop in self.loops:
            loop.stop(error)
        for rank in gone:
            self.engines[rank] = self._new_engine()
        for box in (*self._queues, *self._unsent, *self.up, *self.down):
            box.clear()
        self._running = [None] * len(self.engines)

    # -- the shards to each other

    def _tell(self, shard: int, number: int, header: Header | None, waited: float) -> None:
        loop = self.loops[shard]
        message = (lambda: loop.call(number)) if header is None else (lambda: loop.on_header(number, header, waited))
        if shard or self.own_header_waits:
            self.down[shard].append(message)
        else:
            message()

    # -- the workers, as the loops see them

    def accept(self, shard: int, header: Header, bodies: Sequence[Body]) -> None:
        loop = self.loops[shard]
        plan.check(loop.ranks, loop.slots, loop.limits)
        if header.seq > len(self.headers):
            assert header.seq == len(self.headers) + 1
            self.headers.append(header)
            self.bodies.append([Body(0, 0)] * len(self.engines))
        assert self.headers[header.seq - 1] == header, "the shards send different headers"
        for rank, body in zip(self.ranks[shard], bodies, strict=True):
            self.bodies[header.seq - 1][rank] = body
            self._queues[rank].append(Plan(header, body))
            self._accepted[rank] += 1
            assert self._accepted[rank] == header.seq
            assert len(self._queues[rank]) <= 2, "more than one plan waits behind the running one"
            assert sum(int(p.counts.sum()) for p in body.passes) <= sum(header.micro_chunks), (
                "more than the header says"
            )
            assert max(len(body.rows), *(len(p.rows) for p in body.passes), 0) <= header.row_bucket

    def turn(self) -> bool:
        """One step of one worker, or one message; False if nothing runs anywhere and nothing is under way."""
        mail = [box for box in (*self.up, *self.down) if box]
        behind = self._behind()
        if mail and (not behind or self.random.random() < self._prompt_delivery):
            self.random.choice(mail).popleft()()
            return True
        if not behind:
            return False
        rank = self.random.choice(behind)
        if self._running[rank] is None:
            started = self._queues[rank].popleft()
            self._running[rank] = (started, self.engines[rank].run(started), 0)
        running, results, done = self._running[rank]  # type: ignore[misc]
        self._unsent[rank].append(next(results))
        done += 1
        self._running[rank] = (running, results, done)
        if rank == behind[0]:
            self.clock.advance(self._step_seconds)
        last = done == steps_of(running.header)
        if last:
            assert next(results, None) is None
            self._running[rank] = None
        if last or done == running.body.notice or self.random.random() < 0.3:
            self._deliver(rank, running, done, last)
        return True

    def _behind(self) -> list[int]:
        """In lockstep: the ranks that are behind go first, and nobody goes where somebody has no plan yet."""
        busy = [i for i in range(len(self.engines)) if self._running[i] or self._queues[i]]
        if not busy:
            return []
        progress = {i: self._at(i) for i in busy}
        first = min(progress.values())
        return [i for i in busy if progress[i] == first] if first[0] <= min(self._accepted) else []

    def run(self, turns: int = 100_000) -> None:
        """Until nothing runs and nothing waits; AssertionError if that does not happen within so many turns."""
        for _ in range(turns):
            if not self.turn():
                for loop in self.loops:
                    loop.tick()
                if not self.turn():
                    break
        else:
            running, waiting = sum(x.running for x in self.loops), sum(len(x.waiting) for x in self.loops)
            raise AssertionError(f"not idle after {turns} turns: {running} running, {waiting} waiting")
        assert all(loop.unfinished == 0 for loop in self.loops), "idle with unfinished requests"
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing runs: every row and block is given back, and nothing is remembered by a slot."""
        for loop in self.loops:
            plan.check(loop.ranks, loop.slots, loop.limits)
            for rank in loop.ranks:
                assert rank.pool.owned == 0 and rank.rows_in_use == 0 and not rank.closing
            assert loop.slots.used == 0
        assert not self.failures, self.failures[0].message
        assert set(self._accepted) == {len(self.headers)}, "a rank missed a plan"

    # -- requests

    def submit(self, prompt: Sequence[int], *, n: int = 1, priority: int = 0, salt: str = "", advance: bool = True, shard: int = 0, **sampling: object) -> Request:  # fmt: skip
        self._handles += 1
        request = self.loops[shard].submit(
            request_id=f"r{self._handles}",
            session=1,
            handle=self._handles,
            prompt=np.array(prompt, np.uint32),
            sampling=Sampling(**({"max_tokens": 16} | sampling)),  # type: ignore[arg-type]
            n=n,
            priority=priority,
            salt=salt,
        )
        if advance:
            self.loops[shard].advance()
        return request

    def expected(self, request: Request, choice: int = 0) -> list[int]:
        """The toy model's answer, as if the request were alone."""
        return toy_output(
            request.prompt.tolist(),
            sampling=request.sampling,
            choice=choice,
            vocab_size=self.vocab_size,
            limit=min(len(request.prompt) + request.sampling.max_tokens, self.loop.group.max_model_len),  # type: ignore[union-attr]
        )

    def got(self, request: Request, choice: int = 0) -> Received:
        return self.received[request.handle, choice]

    def check_answers(self, requests: Sequence[Request]) -> None:
        """Each choice ended once, as the device ended it, with exactly the toy model's tokens."""
        for request in requests:
            for choice in range(request.n):
                got = self.got(request, choice)
                assert got.ends == 1, f"{request.request_id}.{choice} has {got.ends} ends"
                assert got.tokens == self.expected(request, choice), f"{request.request_id}.{choice}"

    # -- internals

    def _at(self, rank: int) -> tuple[int, int]:
        running = self._running[rank]
        if running is None:
            return self._queues[rank][0].header.seq, 0
        return running[0].header.seq, running[2]

    def _deliver(self, rank: int, running: Plan, done: int, last: bool) -> None:
        results, self._unsent[rank] = self._unsent[rank], []
        words = [r.words for r in results]
        asked = any(r.logprobs is not None for r in results)
        logprobs = [
            r.logprobs if r.logprobs is not None else np.full(len(r.words), np.nan, np.float32) for r in results
        ]
        shard = next(i for i, ranks in enumerate(self.ranks) if rank in ranks)
        self.loops[shard].on_outcome(
            PlanOutcome(
                epoch=running.header.epoch,
                seq=running.header.seq,
                dp_rank=rank,
                first=done - len(results),
                steps=len(results),
                last=last,
                counts=np.array([len(w) for w in words], np.uint32),
                words=np.concatenate(words),
                logprobs=np.concatenate(logprobs) if asked else NO_F32,
                top=_joined(results),
                faults=tuple(f for r in results for f in r.faults),
                prompts=tuple(p for r in results for p in r.prompts),
                step_ns=int(self._step_seconds * 1e9),
            )
        )

    def _emit(self, batch: EventBatch) -> None:
        now, at = self.clock.now(), 0
        errors = dict(batch.errors)
        for handle, scores in batch.prompts:
            assert handle not in self.scores, f"request {handle}: its prompt is scored twice"
            assert not any(got.tokens for (h, _), got in self.received.items() if h == handle), "scores behind a token"
            self.scores[handle] = scores
        for i, (handle, choice, offset, count, end) in enumerate(
            zip(batch.handles.tolist(), batch.choices.tolist(), batch.offsets.tolist(), batch.counts.tolist(), batch.ends.tolist(), strict=True)
        ):  # fmt: skip
            got = self.received[handle, choice]
            assert not got.ends, f"request {handle} choice {choice}: an event after its end"
            if count:
                assert offset == len(got.tokens), (
                    f"request {handle} choice {choice}: offset {offset} of {len(got.tokens)}"
                )
                if got.tokens:
                    got.largest_gap = max(got.largest_gap, now - got.last_at)
                else:
                    got.first_at = now
                got.last_at = now
            got.tokens += batch.tokens[at : at + count].tolist()
            if len(batch.logprobs):
                got.logprobs += batch.logprobs[at : at + count].tolist()
            got.cached = int(batch.cached[i])
            at += count
            if end:
                got.end, got.ends, got.ended_at = End(end), got.ends + 1, now
                got.error = errors[i].message if i in errors else ""
                got.tokens = got.tokens[:offset] if not count else got.tokens
        assert at == len(batch.tokens)


def _joined(results: Sequence[StepResult]) -> TopLogprobs | None:
    parts, before = [], 0
    for result in results:
        if result.top is not None:
            parts.append((result.top, before))
        before += len(result.words)
    if not parts:
        return None
    return TopLogprobs(
        index=np.concatenate([top.index + np.uint32(shift) for top, shift in parts]),
        counts=np.concatenate([top.counts for top, _ in parts]),
        ids=np.concatenate([top.ids for top, _ in parts]),
        values=np.concatenate([top.values for top, _ in parts]),
    )


def prefills(simulation: Simulation) -> list[Header]:
    return [h for h in simulation.headers if h.kind is Kind.PREFILL]
