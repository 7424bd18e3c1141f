"""The worker's half of the plan protocol, as plain state without torch, sockets or threads of its own.

    PlanLog     which plans were accepted, started and finished (P1), outcomes kept until acked (P5), fencing, attach (P6)
    RowTable    what the rows are, for the scheduler that attaches
    Coalescer   when the steps of a plan are worth a message
    Engine      what runs the plans: the real runner or a scripted one

Times are nanoseconds of one clock that never goes back; they come in as arguments.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from lockstep_common.errors import Conflict, InvalidRequest, Unavailable, Unsupported
from lockstep_common.steps import (
    FLAG_SHIFT,
    NO_F32,
    NO_U64,
    U32,
    U64,
    AddRow,
    Attachment,
    Body,
    ExpertLoads,
    Flag,
    GroupConfig,
    Header,
    Kind,
    Plan,
    PlanOutcome,
    PromptChunk,
    RowState,
    TopLogprobs,
    WorkerFacts,
    unpack_words,
)

MAX_AGE_NS: Final = 4_000_000  # an outcome leaves before its oldest step is older than this
END_BITS: Final = np.uint64(int(Flag.END) << FLAG_SHIFT)
URGENT_BITS: Final = np.uint64(int(Flag.END | Flag.FIRST) << FLAG_SHIFT)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of a plan. `top.index` counts within `words`; `logprobs` is one a word (NaN: not asked) or None."""

    words: U64 = field(default_factory=lambda: NO_U64)
    logprobs: npt.NDArray[np.float32] | None = None
    top: TopLogprobs | None = None
    faults: tuple[tuple[int, str], ...] = ()
    prompts: tuple[PromptChunk, ...] = ()
    expert_loads: ExpertLoads | None = None


class GroupLost(Unavailable):
    """The engine's group broke; the engine itself is well and waits to be configured again."""


class Engine(Protocol):
    """Runs plans. All methods are called by one thread, in this order: load, (configure, (run | poll)*)*, close.

    An engine over an asynchronous device may be behind with results: `run` then returns while its last steps are in flight, so
    that the next plan can be queued before the device is free.
    """

    def load(self, progress: Callable[[float, str], None]) -> WorkerFacts:
        """Makes the model ready; `progress` takes the loaded share 0..1 and what is being done."""
        ...

    def configure(self, group: GroupConfig) -> WorkerFacts:
        """Joins a group: forgets all rows, agrees with the others, warms up. Conflict if the configs differ.

        If the place is the one that it had, and the blocks are no more, the KV cache stays as the plans of `kept_epoch` have left it.
        """
        ...

    def run(self, plan: Plan) -> Iterator[StepResult]:
        """Applies the body and runs the plan's steps. Yields results in the order of steps, also those of plans before.

        GroupLost: the plan was cut because another worker is gone. Any other exception is the engine's end.
        """
        ...

    def poll(self, *, wait: bool) -> Iterator[StepResult]:
        """Results of steps in flight: those that are there, or with `wait` all."""
        ...

    @property
    def in_flight(self) -> int:
        """Steps whose results have not been yielded."""
        ...

    def forward_plan(self, data: bytes) -> None:
        """Gives the bytes of a plan to the workers that follow this one, before it runs here; none: a sign of life."""
        ...

    def next_plan(self) -> bytes:
        """What the worker that this one follows forwarded; waits for it. GroupLost if nothing comes."""
        ...

    def interrupt(self) -> None:
        """Gives the group up: what waits for other workers raises GroupLost. The only method that any thread may call."""
        ...

    def leave(self) -> None:
        """Leaves the group, if it is in one; the model stays."""
        ...

    def close(self) -> None: ...


def steps_of(header: Header) -> int:
    """Steps that a plan reports: its decode steps, or its prefill passes."""
    return len(header.micro_chunks) if header.kind == Kind.PREFILL else header.k


def spans(starts: npt.ArrayLike, counts: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(i, values): for each i the values starts[i] .. starts[i] + counts[i] - 1, one after the other."""
    starts = np.asarray(starts, np.int64)
    counts = np.asarray(counts, np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) + (starts - before)[owner]


class RowTable:
    """The rows as the plans made them, on the host: who owns each, how far it is, and its blocks."""

    def __init__(self, max_rows: int = 0, widths: tuple[int, ...] = ()) -> None:
        """`widths`: table entries of a row, one number a KV group."""
        self._owners: dict[int, AddRow] = {}
        self._offsets = np.zeros(max_rows, np.int64)  # tokens generated
        self._tables = [np.zeros((max_rows, width), np.uint32) for width in widths]
        self._used = [np.zeros(max_rows, np.int64) for _ in widths]

    def apply(self, body: Body) -> None:
        for row in body.removes.tolist():
            self._owners.pop(row, None)
        for add in body.adds:
            self._owners[add.row] = add
            self._offsets[add.row] = len(add.tokens) - add.prompt_len
            for table, used, blocks in zip(self._tables, self._used, add.blocks, strict=True):
                table[add.row, : len(blocks)] = blocks
                used[add.row] = len(blocks)
        for write in body.table_writes:
            owner, columns = spans(write.starts, write.counts)
            self._tables[write.group][write.rows[owner], columns] = write.blocks
            self._used[write.group][write.rows] = write.starts.astype(np.int64) + write.counts

    def book(self, words: U64) -> None:
        """Counts the tokens of an outcome."""
        if len(words):
            _, rows, flags = unpack_words(words)
            tokens = np.bincount(rows[flags & int(Flag.FAULT) == 0], minlength=len(self._offsets))
            self._offsets += tokens[: len(self._offsets)]

    def states(self) -> tuple[RowState, ...]:
        return tuple(
            RowState(
                row=row,
                request_id=add.request_id,
                choice=add.choice,
                offset=int(self._offsets[row]),
                blocks=tuple(t[row, : u[row]].copy() for t, u in zip(self._tables, self._used, strict=True)),
            )
            for row, add in sorted(self._owners.items())
        )


class PlanLog:
    """What was accepted, started, finished and kept. Thread-safe: plans arrive on one thread and run on another.

    A worker keeps the highest epoch and the highest term it has accepted and refuses anything below either of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.epoch = 0
        self.term = 0
        self.accepted = 0
        self.started = 0
        self.finished = 0
        self.acked = 0
        self._dp_rank = 0
        self._headers: dict[int, bytes] = {}
        self._kept: deque[PlanOutcome] = deque()
        self._unsent: deque[PlanOutcome] = deque()
        self._rows = RowTable()
        self._next_body: Body | None = None  # of a plan that started before all outcomes of the one before were there
        self._arrival = (0, 0)  # seq and time of the newest plan
        self._open = False  # in a group
        self._expert_layers = self._expert_slots = 0  # whose experts a header may move

    def check_configure(self, epoch: int, term: int) -> None:
        """Conflict unless (epoch, term) may form a new group: the term must not be lower, the epoch must be higher."""
        with self._lock:
            self._fence(epoch, term)
            if epoch <= self.epoch:
                raise Conflict(f"epoch {epoch} is in use; configure with epoch {self.epoch + 1} or higher")

    def check(self, epoch: int, term: int) -> None:
        """Conflict if either is stale."""
        with self._lock:
            self._fence(epoch, term)

    def close(self) -> None:
        """Leaves the group: no plan is accepted until `configure`."""
        with self._lock:
            self._open = False

    def configure(self, group: GroupConfig, facts: WorkerFacts) -> None:
        """Begins an epoch: no rows, no plans, seq 1 is next."""
        widths = tuple(-(-group.max_model_len // kv.block_size) for kv in facts.groups)
        with self._lock:
            self._fence(group.epoch, group.term)
            self.epoch, self.term, self._dp_rank = group.epoch, group.term, group.dp_rank
            self.accepted = self.started = self.finished = self.acked = 0
            self._headers.clear()
            self._kept.clear()
            self._unsent.clear()
            self._rows = RowTable(group.max_rows, widths)
            self._expert_layers, self._expert_slots = facts.moe_layers, facts.expert_slots
            self._next_body = None
            self._open = True

    def accept(self, plan: Plan, now_ns: int) -> bool:
        """True if the plan is the next one to run, False if it is a repeat; Conflict if it is stale or leaves a gap."""
        header, body = plan.header, plan.body
        with self._lock:
            self._fence(header.epoch, body.term)
            if header.epoch != self.epoch or not self._open:
                raise Conflict(f"plan of epoch {header.epoch}, but this worker {self._membership()}")
            if steps_of(header) < 1:
                raise InvalidRequest(f"plan {header.seq} has no step")
            self._check_able(header)
            self.term = body.term
            self._ack(body.ack)
            if header.seq <= self.accepted:
                if self._headers.get(header.seq, plan.header_bytes) != plan.header_bytes:
                    raise Conflict(f"plan {header.seq} came again with another header")
                return False
            if header.seq != self.accepted + 1:
                raise Conflict(f"expected plan {self.accepted + 1}, got plan {header.seq}")
            self.accepted = header.seq
            self._headers[header.seq] = plan.header_bytes
            self._arrival = (header.seq, now_ns)
            return True

    def _check_able(self, header: Header) -> None:
        layers, slots = self._expert_layers, self._expert_slots
        if header.capture_bucket or ((header.placement_version or header.moved_layer >= 0) and not layers):
            raise Unsupported(f"plan {header.seq} moves experts or captures a graph, which this worker cannot")
        if header.dual_batch and not layers:
            raise Unsupported(
                f"plan {header.seq} is to be computed as two halves, but this worker shares out no experts"
            )
        if header.moved_layer >= 0 and not (header.moved_layer < layers and len(header.moved_experts) == slots):
            raise InvalidRequest(
                f"plan {header.seq} moves experts of layer {header.moved_layer} to {len(header.moved_experts)} slots, this worker "
                f"has {layers} such layers of {slots} slots"
            )

    def start(self, plan: Plan) -> bool:
        """Marks the plan as running; False if its epoch is over. The row table follows once the plans before are finished."""
        with self._lock:
            if plan.header.epoch != self.epoch:
                return False
            self.started = plan.header.seq
            if self.finished == plan.header.seq - 1:
                self._rows.apply(plan.body)
            else:
                self._next_body = plan.body
            return True

    def record(self, outcome: PlanOutcome) -> None:
        """Keeps an outcome until it is acked; the outcomes of an epoch that is over are dropped."""
        with self._lock:
            if outcome.epoch != self.epoch:
                return
            self._rows.book(outcome.words)
            self._kept.append(outcome)
            self._unsent.append(outcome)
            if outcome.last:
                self.finished = outcome.seq
                if self._next_body is not None:
                    self._rows.apply(self._next_body)
                    self._next_body = None

    def take(self) -> list[PlanOutcome]:
        """The outcomes that no stream and no attachment has carried yet."""
        with self._lock:
            taken = list(self._unsent)
            self._unsent.clear()
            return taken

    def attach(self, epoch: int, term: int) -> Attachment:
        """Everything not acked. Streams opened later carry on after the outcomes returned here."""
        with self._lock:
            self._fence(epoch, term)
            if epoch != self.epoch or not self._open:
                raise Conflict(f"attach to epoch {epoch}, but this worker {self._membership()}")
            self.term = term
            self._unsent.clear()
            return Attachment(
                accepted=self.accepted,
                started=self.started,
                finished=self.finished,
                headers=tuple(self._headers.values()),
                rows=self._rows.states(),
                outcomes=tuple(self._kept),
            )

    def turnaround(self, seq: int, notice_ns: int) -> int:
        """Time from the notice of plan `seq` to the arrival of the next one; 0 unknown or it was there before."""
        arrived_seq, arrived_ns = self._arrival
        return max(0, arrived_ns - notice_ns) if notice_ns and arrived_seq == seq + 1 else 0

    def _fence(self, epoch: int, term: int) -> None:
        if epoch < self.epoch or term < self.term:
            raise Conflict(
                f"epoch {epoch} term {term} is stale: this worker has accepted epoch {self.epoch} term {self.term}"
            )

    def _membership(self) -> str:
        return f"is configured for epoch {self.epoch}" if self._open else "is in no group: configure it first"

    def _ack(self, seq: int) -> None:
        if seq > self.finished:
            raise Conflict(f"ack of plan {seq}, but only plans up to {self.finished} are finished")
        if seq <= self.acked:
            return
        for old in range(self.acked + 1, seq + 1):
            self._headers.pop(old, None)
        while self._kept and self._kept[0].seq <= seq:
            self._kept.popleft()
        self.acked = seq


class Coalescer:
    """Gathers the steps of one plan into outcomes (P5): one message for a window, sooner for what somebody waits for."""

    def __init__(self, header: Header, *, dp_rank: int, notice: int, start_ns: int, idle_ns: int) -> None:
        self._header = header
        self._dp_rank = dp_rank
        self._steps = steps_of(header)
        self._notice = notice
        self._idle_ns = idle_ns
        self._sent = 0
        self._sent_ns = start_ns
        self._last_ns = start_ns
        self._oldest_ns = start_ns
        self._pending: list[StepResult] = []
        self.seq = header.seq
        self.notice_ns = 0  # when the notice was due; 0 not yet

    def begin(self, now_ns: int) -> None:
        """The plan before has ended now, after this one was queued."""
        self._sent_ns = self._last_ns = now_ns

    @property
    def done(self) -> int:
        """Steps whose results were added."""
        return self._sent + len(self._pending)

    @property
    def complete(self) -> bool:
        """All steps were flushed."""
        return self._sent == self._steps

    def add(self, result: StepResult, now_ns: int) -> bool:
        """Takes the next step's result, which ended now; True if `flush` is due."""
        if not self._pending:
            self._oldest_ns = now_ns
        self._pending.append(result)
        step_ns, self._last_ns = now_ns - self._last_ns, now_ns
        if self.done == self._notice:
            self.notice_ns = now_ns
            return True
        return (
            self.done == self._steps
            or now_ns - self._oldest_ns + step_ns > MAX_AGE_NS
            or bool(np.bitwise_or.reduce(result.words) & URGENT_BITS)
        )

    def flush(self, turnaround_ns: int) -> PlanOutcome:
        """The outcome of all steps since the last flush."""
        pending, self._pending = self._pending, []
        first, self._sent = self._sent, self._sent + len(pending)
        last = self._sent == self._steps
        step_ns, self._sent_ns = (self._last_ns - self._sent_ns) // len(pending), self._last_ns
        idle_ns, self._idle_ns = self._idle_ns, 0
        counts = np.array([len(result.words) for result in pending], np.uint32)
        return PlanOutcome(
            epoch=self._header.epoch,
            seq=self._header.seq,
            dp_rank=self._dp_rank,
            first=first,
            steps=len(pending),
            last=last,
            counts=counts,
            words=np.concatenate([result.words for result in pending]),
            logprobs=_join_logprobs(pending),
            top=_join_top(pending, counts),
            faults=tuple(fault for result in pending for fault in result.faults),
            prompts=tuple(chunk for result in pending for chunk in result.prompts),
            step_ns=step_ns,
            turnaround_ns=turnaround_ns if last else 0,
            idle_ns=idle_ns,
            expert_loads=next((result.expert_loads for result in pending if result.expert_loads is not None), None),
        )


def _join_logprobs(results: list[StepResult]) -> npt.NDArray[np.float32]:
    if all(result.logprobs is None for result in results):
        return NO_F32
    return np.concatenate(
        [np.full(len(r.words), np.nan, np.float32) if r.logprobs is None else r.logprobs for r in results]
    )


def _join_top(results: list[StepResult], counts: U32) -> TopLogprobs | None:
    found = [
        (result.top, before)
        for result, before in zip(results, (np.cumsum(counts) - counts).tolist(), strict=True)
        if result.top is not None
    ]
    if not found:
        return None
    return TopLogprobs(
        index=np.concatenate([top.index + np.uint32(before) for top, before in found]),
        counts=np.concatenate([top.counts for top, _ in found]),
        ids=np.concatenate([top.ids for top, _ in found]),
        values=np.concatenate([top.values for top, _ in found]),
    )
