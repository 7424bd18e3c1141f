"""Books what workers report: a batch of outcome words becomes array updates over slots and one batch of events a session.

Only choices that ended are touched one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lockstep_common.errors import LockstepError
from lockstep_common.steps import (
    F32,
    NO_F32,
    NO_U32,
    NO_U64,
    U32,
    U64,
    Flag,
    PlanOutcome,
    PromptScores,
    TopLogprobs,
    unpack_words,
)
from lockstep_scheduler.request import Choice, End, Request, Slots

_END = np.uint32(int(Flag.END))
_FAULT = np.uint32(int(Flag.FAULT))


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What a router is told about one booked batch. Entry i got counts[i] of `tokens`, or ended, or both."""

    session: int
    handles: U64
    choices: U32
    offsets: U32
    counts: U32
    ends: npt.NDArray[np.uint8]
    tokens: U32 = field(default_factory=lambda: NO_U32)
    logprobs: F32 = field(default_factory=lambda: NO_F32)
    top: TopLogprobs | None = None
    cached: U32 = field(default_factory=lambda: NO_U32)
    errors: tuple[tuple[int, LockstepError], ...] = ()
    prompts: tuple[tuple[int, PromptScores], ...] = ()  # (handle, scores of its prompt)


@dataclass(frozen=True, slots=True)
class Booked:
    """Entry i: slots[i] got tokens[starts[i] : starts[i] + counts[i]], at offset offsets[i] of its generated tokens."""

    slots: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.uint8]
    tokens: U32
    logprobs: F32
    top: TopLogprobs | None
    faulty: tuple[int, ...]  # entries that ended with a fault


def book(outcome: PlanOutcome, slot_of_row: npt.NDArray[np.int64], slots: Slots) -> Booked:
    """Appends the outcome's tokens to their slots. `slot_of_row` is the row table of the outcome's plan (P5). Words of
    choices that ended in the scheduler's record meanwhile are dropped (P7)."""
    tokens, rows, flags = unpack_words(outcome.words)
    at = slot_of_row[rows]
    kept = slots.alive[at]
    assert (at >= 0).all(), f"plan {outcome.seq} lists no such row: {rows[at < 0]}"
    order = np.argsort(at, kind="stable")  # by slot, steps in order
    order = order[kept[order]]
    at, flags = at[order], flags[order]
    entries, starts, lengths = _runs(at)
    last = starts + lengths - 1
    final = flags[last] if len(last) else flags
    faulty = (final & _FAULT) != 0
    void = np.zeros(len(order), bool)
    void[last[faulty]] = True  # the word of a fault has no token
    order, at = order[~void], at[~void]
    counts = lengths - faulty
    starts = np.cumsum(counts) - counts
    booked = tokens[order]
    offsets = slots.generated[entries].copy()
    within = np.arange(len(order)) - np.repeat(starts, counts)
    slots.tokens[at, np.repeat(offsets, counts) + within] = booked
    slots.generated[entries] += counts
    ends = np.zeros(len(entries), np.uint8)
    ends[(final & np.uint32(int(Flag.STOP))) != 0] = End.STOP
    ends[(final & np.uint32(int(Flag.LENGTH))) != 0] = End.LENGTH
    ends[faulty] = End.ERROR
    slots.alive[entries[ends != 0]] = False
    return Booked(
        slots=entries,
        offsets=offsets,
        starts=starts,
        counts=counts,
        ends=ends,
        tokens=booked,
        logprobs=outcome.logprobs[order] if len(outcome.logprobs) else NO_F32,
        top=_reordered(outcome.top, order, len(outcome.words)) if outcome.top is not None else None,
        faulty=tuple(np.nonzero(faulty)[0].tolist()),
    )


def _runs(values: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Each value of a sorted array once, where its run begins, and how long that is."""
    begins = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=begins[1:])
    starts = np.flatnonzero(begins)
    lengths = np.full(len(starts), len(values))
    lengths[:-1] = starts[1:]
    return values[starts], starts, lengths - starts


def events(booked: Booked, slots: Slots, errors: dict[int, LockstepError]) -> list[EventBatch]:
    """One batch for each session that has entries. `errors` is by entry, for entries that ended with END.ERROR."""
    owners = slots.session[booked.slots]
    sessions = owners[:1].tolist() if (owners == owners[:1]).all() else np.unique(owners).tolist()
    return [
        _batch(session, booked, np.nonzero(owners == session)[0], slots, errors) for session in sessions if session >= 0
    ]


def end_event(session: int, choice: Choice, offset: int) -> EventBatch:
    """The terminal event of a choice that no outcome ended: cancelled, deadline, error, the router's stop string."""
    assert choice.end is not End.NONE
    return EventBatch(
        session=session,
        handles=np.array([choice.request.handle], np.uint64),
        choices=np.array([choice.index], np.uint32),
        offsets=np.array([offset], np.uint32),
        counts=np.zeros(1, np.uint32),
        ends=np.array([choice.end], np.uint8),
        cached=np.array([choice.request.cached], np.uint32),
        errors=((0, choice.error),) if choice.error is not None else (),
    )


def scores_event(request: Request) -> EventBatch:
    """The scores of a request's prompt, which are complete."""
    return EventBatch(
        session=request.session,
        handles=NO_U64,
        choices=NO_U32,
        offsets=NO_U32,
        counts=NO_U32,
        ends=np.zeros(0, np.uint8),
        prompts=((request.handle, PromptScores.joined(request.scores)),),
    )


def replay_event(session: int, choice: Choice, generated: U32, offset: int) -> EventBatch:
    """Tokens from `offset` on, and the end if the choice has ended: what a resumed session missed."""
    return EventBatch(
        session=session,
        handles=np.array([choice.request.handle], np.uint64),
        choices=np.array([choice.index], np.uint32),
        offsets=np.array([offset], np.uint32),
        counts=np.array([len(generated) - offset], np.uint32),
        ends=np.array([choice.end], np.uint8),
        tokens=generated[offset:],
        cached=np.array([choice.request.cached], np.uint32),
        errors=((0, choice.error),) if choice.error is not None else (),
    )


def _batch(
    session: int, booked: Booked, mine: npt.NDArray[np.int64], slots: Slots, errors: dict[int, LockstepError]
) -> EventBatch:
    everything = len(mine) == len(booked.slots)
    tokens, logprobs, top = booked.tokens, booked.logprobs, booked.top
    if not everything:
        counts = booked.counts[mine]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        picked = np.repeat(booked.starts[mine], counts) + within
        total = len(booked.tokens)
        tokens = tokens[picked]
        logprobs = logprobs[picked] if len(logprobs) else logprobs
        top = _reordered(top, picked, total) if top is not None else None
    at = booked.slots[mine]
    offsets = booked.offsets[mine]
    return EventBatch(
        session=session,
        handles=slots.handle[at],
        choices=slots.index[at],
        offsets=offsets.astype(np.uint32),
        counts=booked.counts[mine].astype(np.uint32),
        ends=booked.ends[mine],
        tokens=tokens,
        logprobs=logprobs,
        top=top,
        cached=slots.cached[at],
        errors=tuple((i, errors[entry]) for i, entry in enumerate(mine.tolist()) if entry in errors),
    )


def _reordered(top: TopLogprobs, order: npt.NDArray[np.int64], total: int) -> TopLogprobs:
    """The same ragged table after its words were picked and put in another order."""
    where = np.full(total, -1, np.int64)
    where[order] = np.arange(len(order))
    index = where[top.index]
    kept = index >= 0
    spread = np.repeat(kept, top.counts)
    return TopLogprobs(
        index=index[kept].astype(np.uint32), counts=top.counts[kept], ids=top.ids[spread], values=top.values[spread]
    )
