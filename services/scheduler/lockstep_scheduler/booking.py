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

NO_ENTRIES = np.zeros(0, np.int64)


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
    assert at.min(initial=0) >= 0, f"plan {outcome.seq} lists no such row: {rows[at < 0]}"
    order = np.argsort(at, kind="stable")  # by slot, steps in order
    if not kept.all():
        order = order[kept[order]]
    at = at[order]
    entries, starts, counts = _runs(at)
    ends = np.zeros(len(entries), np.uint8)
    faulty = NO_ENTRIES
    if flags.any():  # of few outcomes
        last = starts + counts - 1
        ends, void = _ends(flags[order[last]]), np.zeros(len(order), bool)
        faulty = np.flatnonzero(ends == End.ERROR)
        void[last[faulty]] = True  # the word of a fault has no token
        order, at = order[~void], at[~void]
        counts[faulty] -= 1
        starts = np.cumsum(counts) - counts
        slots.alive[entries[ends != 0]] = False
    booked = tokens[order]
    offsets = slots.generated[entries]
    slots.tokens[at, np.arange(len(order)) + np.repeat(offsets - starts, counts)] = booked
    slots.generated[entries] = offsets + counts
    return Booked(
        slots=entries,
        offsets=offsets,
        starts=starts,
        counts=counts,
        ends=ends,
        tokens=booked,
        logprobs=outcome.logprobs[order] if len(outcome.logprobs) else NO_F32,
        top=_reordered(outcome.top, order, len(outcome.words)) if outcome.top is not None else None,
        faulty=tuple(faulty.tolist()),
    )


def _ends(flags: U32) -> npt.NDArray[np.uint8]:
    """How entries end by the flags of their last words: `End`, 0 for those that go on."""
    ends = np.zeros(len(flags), np.uint8)
    ends[(flags & np.uint32(int(Flag.STOP))) != 0] = End.STOP
    ends[(flags & np.uint32(int(Flag.LENGTH))) != 0] = End.LENGTH
    ends[(flags & np.uint32(int(Flag.FAULT))) != 0] = End.ERROR
    return ends


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
    if (owners == owners[:1]).all():  # mostly; then there is nothing to pick
        return [_batch(session, booked, None, slots, errors) for session in owners[:1].tolist() if session >= 0]
    sessions = [session for session in np.unique(owners).tolist() if session >= 0]
    return [_batch(session, booked, np.flatnonzero(owners == session), slots, errors) for session in sessions]


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
    session: int, booked: Booked, mine: npt.NDArray[np.int64] | None, slots: Slots, errors: dict[int, LockstepError]
) -> EventBatch:
    """Of the entries `mine`; None: of all."""
    tokens, logprobs, top = booked.tokens, booked.logprobs, booked.top
    at, offsets, counts, ends = booked.slots, booked.offsets, booked.counts, booked.ends
    if mine is not None:
        at, offsets, counts, ends = at[mine], offsets[mine], counts[mine], ends[mine]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        picked = np.repeat(booked.starts[mine], counts) + within
        total = len(booked.tokens)
        tokens = tokens[picked]
        logprobs = logprobs[picked] if len(logprobs) else logprobs
        top = _reordered(top, picked, total) if top is not None else None
    places = {entry: i for i, entry in enumerate(mine.tolist())} if errors and mine is not None else None
    return EventBatch(
        session=session,
        handles=slots.handle[at],
        choices=slots.index[at],
        offsets=offsets.astype(np.uint32),
        counts=counts.astype(np.uint32),
        ends=ends,
        tokens=tokens,
        logprobs=logprobs,
        top=top,
        cached=slots.cached[at],
        errors=tuple(
            (entry if places is None else places[entry], error)
            for entry, error in sorted(errors.items())
            if places is None or entry in places
        ),
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
