"""What the next plan holds: admission, chunked prefill, block growth, preemption. Pure: no clock, no I/O, no logging.

A plan is made in two moves. `draft.draft_prefill` says, without changing anything, what each rank would prefill; from it and from
the running rows come the votes. When the header is agreed, `commit_prefill` or `commit_decode` changes the rank's state and
returns its body.

What holds, and is tested after every plan:
- each listed row owns the blocks of every position it can write until the plan's end (P3);
- rows and blocks given back since the last plan may be given away in this one, because its removes come first (P4);
- the oldest running choice is never preempted while a younger one exists;
- a waiting request is passed over a bounded number of times and for a bounded time, then nobody behind it is admitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lockstep_common.steps import (
    NO_U32,
    U32,
    AddRow,
    Body,
    PrefillPass,
    TableWrite,
)
from lockstep_scheduler.blocks import chain
from lockstep_scheduler.draft import Draft, RankDraft, Standing
from lockstep_scheduler.ranks import Limits, RankState, Waiting
from lockstep_scheduler.request import Choice, Phase, Slots
from lockstep_scheduler.vote import Vote

Slot = npt.NDArray[np.int64]


def votes(
    ranks: Sequence[RankState],
    draft: Draft | None,
    slots: Slots,
    want_k: int,
    draining: bool = False,
    first_rank: int = 0,
) -> list[Vote]:
    """One vote a rank; without a draft nobody wants to prefill. `first_rank`: the DP rank of ranks[0] in the group."""
    result = []
    for position, rank in enumerate(ranks):
        mine = draft.ranks[position] if draft is not None else RankDraft()
        listed = decodable(rank, slots)
        running = len(listed)
        result.append(
            Vote(
                rank=first_rank + rank.index,
                want=mine.wanted,
                running=running,
                rows_after=running + len(mine.chunks) + len(mine.admits),
                chunk_tokens=mine.tokens,
                max_k=_max_k(rank, slots, listed, want_k) if running else 0,
                draining=draining,
            )
        )
    return result


def decodable(rank: RankState, slots: Slots) -> Slot:
    """Slots of the rows that can still produce a token, as far as is booked; those that reach their limit in plans
    already sent are left out, because they will have ended."""
    mine = np.array(rank.decoding, np.int64)
    return mine[slots.planned[mine] < slots.limit[mine]] if len(mine) else mine


def commit_prefill(
    rank: RankState,
    draft: RankDraft,
    slots: Slots,
    waiting: Waiting,
    limits: Limits,
    budget: int,
    *,
    seq: int,
    term: int,
    ack: int,
) -> tuple[Body, Slot]:
    """The rank's body of a prefill plan of at most `budget` tokens (the header's), and the slots of the rows it lists. The groups
    that the draft admits have been taken from the queue; what does not fit any more goes back."""
    adds: list[AddRow] = []
    zeroes: list[int] = []
    copies: list[tuple[int, int]] = []
    chunks = list(draft.chunks)
    planned = RankDraft(level=draft.level)
    for choice, count in chunks:
        planned.take(choice.computed, count, limits)
    for group in draft.admits:
        standing = Standing([rank], limits)
        if not standing.fits(group, standing.needed(group, {0: rank.hits(group[0])}))[0]:
            waiting.push(group)  # an admission before it took what it would have shared
            continue
        zeroes += _admit(rank, group)
        count = min(len(group[0].tokens) - group[0].computed, budget - planned.tokens)
        if got := planned.take(group[0].computed, count, limits):
            chunks.append((group[0], got))
    listed = []
    for choice, _ in chunks:
        if choice.slot < 0:
            adds.append(_add_row(rank, choice, slots, copies))
        listed.append(choice.slot)
    body = Body(
        term=term,
        ack=ack,
        removes=_take_departed(rank),
        adds=tuple(adds),
        zeroes=(_u32(zeroes),),
        copies=((_u32(s for s, _ in copies), _u32(d for _, d in copies)),),
        passes=(
            PrefillPass(
                rows=_u32(c.row for c, _ in chunks),
                starts=_u32(c.computed for c, _ in chunks),
                counts=_u32(n for _, n in chunks),
            ),
        )
        if chunks
        else (),
    )
    for choice, count in chunks:
        _advance(rank, choice, count, slots)
    mine = np.array(listed, np.int64)
    slots.last_seq[mine] = seq
    return body, mine


def make_room(rank: RankState, slots: Slots) -> list[Choice]:
    """Preempts until every row that decodes can get its block for one more step; returns the victims. Call it before the
    votes: what a rank then says of itself (`max_k` at least 1) is true."""
    victims: list[Choice] = []
    while not _surely_fits(rank, len(rank.decoding), 1) and (
        int(_growth(rank, slots, decodable(rank, slots), 1)[1].sum()) > rank.pool.available
    ):
        victims += preempt(rank, _victim(rank, slots), slots)
    return victims


def commit_decode(
    rank: RankState, slots: Slots, k: int, *, seq: int, term: int, ack: int, notice: int
) -> tuple[Body, Slot]:
    """The rank's body of a decode window of k steps, k at most its `max_k`, and the slots of its rows."""
    mine = decodable(rank, slots)
    target, need = _growth(rank, slots, mine, k)
    total = int(need.sum())
    writes: tuple[TableWrite, ...] = ()
    new = NO_U32
    if total:
        growing = need > 0
        grown, counts, starts = mine[growing], need[growing], slots.owned[mine[growing]].copy()
        taken = rank.pool.take(total)
        new = _u32(taken)
        at = 0
        for slot, count in zip(grown.tolist(), counts.tolist(), strict=True):
            choice = slots.choice[slot]
            assert choice is not None
            choice.blocks += taken[at : at + count]
            at += count
        slots.owned[grown] += counts
        writes = (
            TableWrite(
                group=0,
                rows=slots.row[grown].astype(np.uint32),
                starts=starts.astype(np.uint32),
                counts=counts.astype(np.uint32),
                blocks=new,
            ),
        )
    slots.planned[mine] = target
    slots.last_seq[mine] = seq
    body = Body(
        term=term,
        ack=ack,
        notice=notice,
        removes=_take_departed(rank),
        table_writes=writes,
        zeroes=(new,),
        rows=slots.row[mine].astype(np.uint32),
    )
    return body, mine


def release(rank: RankState, choice: Choice) -> None:
    """Gives a choice's row and blocks back; the next plan's removes will list the row. The slot stays until it is closed."""
    if choice.borrowed:
        rank.pool.release([choice.borrowed])
        choice.borrowed = 0
    rank.pool.release(choice.blocks)
    choice.blocks = []
    heapq.heappush(rank.free_rows, choice.row)
    if choice.slot >= 0:
        rank.departed.append(choice.row)
        rank.closing.append(choice)
        if choice.slot in rank.decoding:
            rank.decoding.remove(choice.slot)
    if choice in rank.prefilling:
        rank.prefilling.remove(choice)
    choice.row = -1
    choice.joins = None
    choice.had = choice.computed if choice.phase is Phase.PREFILL else choice.request.limit


def preempt(rank: RankState, victim: Choice, slots: Slots) -> list[Choice]:
    """Removes a running choice, and those that wait to join it, from the rank. What is returned waits again: at once if it
    has no slot (phase WAITING), else when its last plan is booked (phase CLOSING)."""
    rank.held = True
    group = [victim]
    if victim.phase is Phase.PREFILL:
        group += [c for c in rank.prefilling if c.joins is victim]
    for choice in group:
        had_slot = choice.slot >= 0
        release(rank, choice)
        choice.phase = Phase.CLOSING if had_slot else Phase.WAITING
        choice.computed = 0
    return group


def preempt_all(rank: RankState, slots: Slots) -> list[Choice]:
    """`preempt` for all that run on the rank."""
    running = [slots.choice[slot] for slot in rank.decoding] + list(rank.prefilling)
    victims: list[Choice] = []
    for choice in running:
        if choice is not None and choice.phase in (Phase.PREFILL, Phase.DECODE):
            victims += preempt(rank, choice, slots)
    return victims


def publish(rank: RankState, choice: Choice, slots: Slots, upto: int) -> None:
    """Offers the keys of the blocks that the choice's tokens fill, up to position `upto`, to the pool."""
    size = rank.pool.block_size
    full, done = rank.shareable(choice, upto), int(slots.published[choice.slot])
    if full <= done:
        return
    if len(choice.keys) < full:
        start = len(choice.keys)
        before = choice.keys[-1] if choice.keys else choice.request.root
        choice.keys += chain(before, slots.span(choice, start * size, full * size), size)
    for i in range(done, full):
        rank.pool.publish(choice.blocks[i], choice.keys[i])
    slots.published[choice.slot] = full


def check(ranks: Sequence[RankState], slots: Slots, limits: Limits) -> None:
    """The invariants of the whole state; for tests and idle moments."""
    for rank in ranks:
        rank.pool.check()
        choices = [slots.choice[s] for s in rank.decoding] + list(rank.prefilling)
        rows = [c.row for c in choices if c is not None]
        assert len(rows) == len(choices), "a decoding slot has no choice"
        assert len(set(rows)) == len(rows) and not set(rows) & set(rank.free_rows), "a row has two owners"
        assert len(rows) + len(rank.free_rows) == limits.max_rows, "a row is lost"
        refs = np.zeros(rank.pool.total + 1, np.int64)
        for choice in choices:
            assert choice is not None
            for block in [*choice.blocks, *([choice.borrowed] if choice.borrowed else [])]:
                refs[block] += 1
            if choice.slot >= 0:
                written = int(slots.planned[choice.slot]) - (1 if choice.phase is Phase.DECODE else 0)
                assert len(choice.blocks) * rank.pool.block_size >= written, "a row lacks a block that it may write"
                assert len(choice.blocks) == int(slots.owned[choice.slot])
        assert refs.tolist() == rank.pool.references, "reference counts differ from the tables"


# -- helpers ----------------------------------------------------------------------------------------------------------


def _admit(rank: RankState, group: list[Choice]) -> list[int]:
    """Reserves rows for all choices and blocks for the whole prompt; returns the new blocks that must be zeroed."""
    size, first = rank.pool.block_size, group[0]
    length = len(first.tokens)
    hits = rank.hits(first)
    rank.pool.share(hits)
    new = rank.pool.take(-(-length // size) - len(hits))
    first.blocks = hits + new
    first.computed = len(hits) * size
    first.found = first.computed
    if first.index == 0 and first.had < 0:
        first.request.cached = first.found
    for choice in group:
        choice.rank = rank.index
        choice.row = heapq.heappop(rank.free_rows)
        choice.phase = Phase.PREFILL
        rank.prefilling.append(choice)
        if choice is not first:
            shared = first.blocks[: (length - 1) // size]
            rank.pool.share(shared)
            choice.borrowed = first.blocks[(length - 1) // size]
            rank.pool.share([choice.borrowed])
            choice.blocks = shared + rank.pool.take(1)
            choice.computed = length - 1
            choice.joins = first
    return new


def _add_row(rank: RankState, choice: Choice, slots: Slots, copies: list[tuple[int, int]]) -> AddRow:
    """The message that gives a choice its row. A joining choice copies the block that holds the last prompt token: it is
    going to write there, and so is the choice it joins."""
    choice.slot = slots.open(choice)
    if choice.borrowed:
        copies.append((choice.borrowed, choice.blocks[-1]))
        rank.pool.release([choice.borrowed])
        choice.borrowed = 0
        choice.joins = None
        slots.published[choice.slot] = len(choice.blocks) - 1
    request = choice.request
    return AddRow(
        row=choice.row,
        request_id=request.request_id,
        choice=choice.index,
        prompt_len=choice.prompt_len,
        tokens=choice.tokens,
        computed=choice.computed,
        blocks=(_u32(choice.blocks),),
        sampling=request.sampling if request.scores_due else replace(request.sampling, prompt_logprobs=-1),
        limit=request.limit,
    )


def _advance(rank: RankState, choice: Choice, count: int, slots: Slots) -> None:
    """A chunk is planned: its blocks can be shared from the next plan on, and the last chunk makes the choice decode."""
    choice.computed += count
    publish(rank, choice, slots, choice.computed)
    if choice.computed == len(choice.tokens):
        choice.phase = Phase.DECODE
        rank.prefilling.remove(choice)
        rank.decoding.append(choice.slot)
        slots.planned[choice.slot] = len(choice.tokens) + 1


def _max_k(rank: RankState, slots: Slots, mine: Slot, want_k: int) -> int:
    """The most steps, up to want_k, for which each of the rows `mine` gets its blocks without a preemption; at least 1.

    Not more than the longest row has left: beyond, every step would be run for rows that have ended.
    """
    left = int((slots.limit[mine] - slots.planned[mine]).max(initial=1))
    for k in range(min(want_k, left), 1, -1):
        if _surely_fits(rank, len(mine), k) or int(_growth(rank, slots, mine, k)[1].sum()) <= rank.pool.available:
            return k
    return 1


def _victim(rank: RankState, slots: Slots) -> Choice:
    """Lowest priority, then youngest: the last in the order of the queue."""
    running = [slots.choice[s] for s in rank.decoding] + [c for c in rank.prefilling if c.joins is None]
    return max((c for c in running if c is not None), key=lambda c: c.order)


def _surely_fits(rank: RankState, rows: int, k: int) -> bool:
    """Whether so many rows get their blocks for k more steps wherever they stand in their last ones: mostly, and at once."""
    return rows * (k // rank.pool.block_size + 1) <= rank.pool.available


def _growth(rank: RankState, slots: Slots, mine: Slot, k: int) -> tuple[Slot, Slot]:
    """For k more steps: the length of each row afterwards, and the blocks that it lacks. The last token's KV comes later."""
    target = np.minimum(slots.planned[mine] + k, slots.limit[mine])
    need = -(-(target - 1) // rank.pool.block_size) - slots.owned[mine]
    return target, np.maximum(need, 0)


def _take_departed(rank: RankState) -> U32:
    rows, rank.departed = _u32(sorted(rank.departed)), []
    return rows


def _u32(values: Iterable[int]) -> U32:
    return np.fromiter(values, np.uint32)
