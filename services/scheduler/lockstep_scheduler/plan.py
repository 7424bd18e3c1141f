"""What the next plan holds: admission, chunked prefill, block growth, preemption. Pure: no clock, no I/O, no logging.

A plan is made in two moves. `draft_prefill` says, without changing anything, what each rank would prefill; from it and from
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
from dataclasses import dataclass, field, replace

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
from lockstep_scheduler import placement
from lockstep_scheduler.blocks import BlockPool, chain
from lockstep_scheduler.request import Choice, Phase, Slots
from lockstep_scheduler.vote import Vote

Slot = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a plan. Tokens per rank and plan, rows per rank, the share of blocks above which nobody is admitted."""

    max_rows: int
    max_batched_tokens: int
    max_model_len: int
    max_window: int
    watermark: float = 0.95
    max_passed_over: int = 64
    max_passed_seconds: float = 2.0


class Waiting:
    """The one queue of a shard: groups of choices that are admitted together, by priority and age.

    A fresh request waits as all its choices (the others join after the first one's prompt); a preempted choice alone.
    """

    def __init__(self) -> None:
        self.pushed = 0  # groups that have ever been queued
        self._items: list[tuple[tuple[int, int, int], list[Choice]]] = []
        self._choices = 0

    def push(self, choices: list[Choice]) -> None:
        assert all(c.phase is Phase.WAITING for c in choices)
        heapq.heappush(self._items, (choices[0].order, choices))
        self.pushed += 1
        self._choices += len(choices)

    def discard(self, choice: Choice) -> None:
        """Takes a choice out (it ended); the rest of its group goes on waiting."""
        for position, (_, group) in enumerate(self._items):
            if choice in group:
                self._choices -= len(group)
                group.remove(choice)
                del self._items[position]
                heapq.heapify(self._items)
                if group:
                    self.push(group)
                return

    def remove(self, groups: Iterable[list[Choice]]) -> None:
        gone = {id(group) for group in groups}
        if gone:
            self._items = [item for item in self._items if id(item[1]) not in gone]
            heapq.heapify(self._items)
            self._choices = sum(len(group) for _, group in self._items)

    def ordered(self) -> Iterable[list[Choice]]:
        """Groups from the first to the last, lazily: the head of a long queue costs little."""
        heap = list(self._items)
        while heap:
            yield heapq.heappop(heap)[1]

    def __len__(self) -> int:
        return self._choices

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def groups(self) -> int:
        return len(self._items)


@dataclass(slots=True, eq=False)
class RankState:
    """One DP rank as the scheduler knows it."""

    index: int
    pool: BlockPool
    free_rows: list[int]  # a heap: the lowest number first, the same on every replay
    prefix_caching: bool = True  # else blocks have no keys, so that none is shared between requests
    generated_reusable: bool = (
        True  # else only blocks of prompt tokens alone are shared: generated ones have other bits
    )
    prefilling: list[Choice] = field(default_factory=list)  # unfinished chunks and joining choices, oldest first
    decoding: list[int] = field(default_factory=list)  # slots
    departed: list[int] = field(default_factory=list)  # rows given back since the last plan: its removes
    closing: list[Choice] = field(default_factory=list)
    held: bool = False  # after a preemption nobody is admitted until a row ends: no going round in circles

    @property
    def rows_in_use(self) -> int:
        return len(self.prefilling) + len(self.decoding)


def new_rank(
    index: int,
    num_blocks: int,
    block_size: int,
    max_rows: int,
    prefix_caching: bool = True,
    generated_reusable: bool = True,
) -> RankState:
    pool = BlockPool(num_blocks, block_size)
    return RankState(index, pool, list(range(max_rows)), prefix_caching, generated_reusable)


@dataclass(slots=True)
class RankDraft:
    """What a rank would prefill in the next plan."""

    chunks: list[tuple[Choice, int]] = field(default_factory=list)  # (choice in prefill, tokens)
    admits: list[list[Choice]] = field(default_factory=list)  # groups from the queue
    tokens: int = 0
    rows: int = 0  # rows that the admissions take
    blocks: int = 0  # blocks that the admissions take from what is available

    @property
    def wanted(self) -> bool:
        return bool(self.chunks or self.admits)


@dataclass(slots=True)
class Draft:
    ranks: list[RankDraft]
    passed: list[Choice]  # heads of groups that others are admitted before


def draft_prefill(ranks: Sequence[RankState], waiting: Waiting, limits: Limits, now: float) -> Draft:
    """Unfinished chunks first, oldest first; then the queue in order, each group on the rank where it costs least.

    Changes nothing. A group that fits nowhere is passed over within the bounds of `limits`.
    """
    draft = Draft([RankDraft() for _ in ranks], [])
    for rank, mine in zip(ranks, draft.ranks, strict=True):
        for choice in rank.prefilling:
            if choice.joins is not None and choice.joins.phase is Phase.PREFILL:
                continue
            count = min(len(choice.tokens) - choice.computed, limits.max_batched_tokens - mine.tokens)
            if count > 0:
                mine.chunks.append((choice, count))
                mine.tokens += count
    passed: list[Choice] = []
    for group in waiting.ordered():
        if all(
            d.tokens >= limits.max_batched_tokens or not _row_left(r, d)
            for r, d in zip(ranks, draft.ranks, strict=True)
        ):
            break
        chosen = placement.choose([_candidate(r, d, group, limits) for r, d in zip(ranks, draft.ranks, strict=True)])
        if chosen is None:
            if _barrier(group[0], limits, now) or len(passed) >= limits.max_passed_over:
                break
            passed.append(group[0])
            continue
        _add_to_draft(ranks[chosen], draft.ranks[chosen], group, limits)
        draft.passed = list(passed)
    return draft


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
        running = len(decodable(rank, slots))
        result.append(
            Vote(
                rank=first_rank + rank.index,
                want=mine.wanted,
                running=running,
                rows_after=running + len(mine.chunks) + len(mine.admits),
                chunk_tokens=mine.tokens,
                max_k=_max_k(rank, slots, want_k) if running else 0,
                draining=draining,
            )
        )
    return result


def decodable(rank: RankState, slots: Slots) -> Slot:
    """Slots of the rows that can still produce a token, as far as is booked; those that reach their limit in plans
    already sent are left out, because they will have ended."""
    mine = np.array(rank.decoding, np.int64)
    return mine[slots.planned[mine] < slots.limit[mine]] if len(mine) else mine


def remainder(draft: RankDraft) -> RankDraft:
    """What is left of a draft whose vote took time: requests may have ended since. Nothing is added, so that the rank keeps
    within what it voted for; what came meanwhile is for the next plan."""
    return RankDraft(
        chunks=[(choice, count) for choice, count in draft.chunks if choice.phase is Phase.PREFILL],
        admits=[group for group in draft.admits if group],
    )


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
    """The rank's body of a prefill plan of at most `budget` tokens (the header's), and the slots of the rows it lists."""
    adds: list[AddRow] = []
    zeroes: list[int] = []
    copies: list[tuple[int, int]] = []
    chunks = list(draft.chunks)
    tokens = sum(count for _, count in chunks)
    waiting.remove(draft.admits)
    for group in draft.admits:
        if not _fits(rank, group, limits, RankDraft(), _hits(rank, group[0])):
            waiting.push(group)  # an admission before it took what it would have shared
            continue
        zeroes += _admit(rank, group)
        count = min(len(group[0].tokens) - group[0].computed, budget - tokens)
        if count > 0:
            chunks.append((group[0], count))
            tokens += count
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
    while int(_growth(rank, slots, decodable(rank, slots), 1)[1].sum()) > rank.pool.available:
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


def publish(rank: RankState, choice: Choice, slots: Slots, upto: int) -> None:
    """Offers the keys of the blocks that the choice's tokens fill, up to position `upto`, to the pool."""
    if not rank.prefix_caching:
        return
    size = rank.pool.block_size
    full, done = shareable(rank, choice, upto), int(slots.published[choice.slot])
    if full <= done:
        return
    if len(choice.keys) < full:
        start = len(choice.keys)
        before = choice.keys[-1] if choice.keys else choice.request.root
        choice.keys += chain(before, slots.span(choice, start * size, full * size), size)
    for i in range(done, full):
        rank.pool.publish(choice.blocks[i], choice.keys[i])
    slots.published[choice.slot] = full


def shareable(rank: RankState, choice: Choice, upto: int) -> int:
    """How many leading blocks of the choice's tokens before position `upto` other choices may have too."""
    return (upto if rank.generated_reusable else min(upto, choice.prompt_len)) // rank.pool.block_size


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


def _row_left(rank: RankState, draft: RankDraft) -> bool:
    return len(rank.free_rows) > draft.rows


def _candidate(rank: RankState, draft: RankDraft, group: list[Choice], limits: Limits) -> placement.Candidate:
    first = group[0]
    room = draft.tokens < limits.max_batched_tokens and _row_left(rank, draft)
    hits = _hits(rank, first) if room else []
    return placement.Candidate(
        rank=rank.index,
        fits=room and _fits(rank, group, limits, draft, hits),
        uncached_tokens=len(first.tokens) - len(hits) * rank.pool.block_size,
        rows=rank.rows_in_use + draft.rows,
        planned_tokens=draft.tokens,
    )


def _fits(rank: RankState, group: list[Choice], limits: Limits, draft: RankDraft, hits: list[int]) -> bool:
    """Rows for all choices, blocks for the whole prompt and a window's lookahead, and the watermark (which does not hold
    an empty rank back). `hits`: what the rank's cache has of the group's prompt."""
    if len(rank.free_rows) - draft.rows < len(group):
        return False
    busy = rank.rows_in_use + draft.rows > 0
    if busy and rank.held:
        return False
    if busy and rank.pool.owned + draft.blocks > limits.watermark * rank.pool.total:
        return False
    return _blocks_needed(rank, group, limits, hits) + draft.blocks <= rank.pool.available


def _blocks_needed(rank: RankState, group: list[Choice], limits: Limits, hits: list[int]) -> int:
    """Blocks that admission takes from what is available: new ones, and cached ones that come back into use."""
    size, first = rank.pool.block_size, group[0]
    length = len(first.tokens)
    most = min(length + limits.max_window, first.request.limit)
    return -(-most // size) - len(hits) + rank.pool.revived(hits) + (len(group) - 1)


def _first_chunk(rank: RankState, group: list[Choice], budget: int) -> tuple[int, int]:
    """(blocks found in the cache, tokens of the first chunk) of an admission with so many tokens left."""
    first, size = group[0], rank.pool.block_size
    hits = len(_hits(rank, first))
    return hits, min(len(first.tokens) - hits * size, budget)


def _hits(rank: RankState, choice: Choice) -> list[int]:
    """Known blocks of the longest beginning of the choice's tokens; the last token is always computed, and all that are
    to be scored."""
    if choice.request.scores_due:
        return []
    return rank.pool.lookup(choice.keys, shareable(rank, choice, len(choice.tokens) - 1))


def _barrier(choice: Choice, limits: Limits, now: float) -> bool:
    request = choice.request
    return request.passed_over >= limits.max_passed_over or now - request.passed_since > limits.max_passed_seconds


def _add_to_draft(rank: RankState, draft: RankDraft, group: list[Choice], limits: Limits) -> None:
    _, count = _first_chunk(rank, group, limits.max_batched_tokens - draft.tokens)
    draft.blocks += _blocks_needed(rank, group, limits, _hits(rank, group[0]))
    draft.tokens += count
    draft.rows += len(group)
    draft.admits.append(group)


def _admit(rank: RankState, group: list[Choice]) -> list[int]:
    """Reserves rows for all choices and blocks for the whole prompt; returns the new blocks that must be zeroed."""
    size, first = rank.pool.block_size, group[0]
    length = len(first.tokens)
    hits = _hits(rank, first)
    rank.pool.share(hits)
    new = rank.pool.take(-(-length // size) - len(hits))
    first.blocks = hits + new
    first.computed = len(hits) * size
    if len(first.tokens) == first.prompt_len and first.index == 0:
        first.request.cached = first.computed
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


def _max_k(rank: RankState, slots: Slots, want_k: int) -> int:
    """The most steps, up to want_k, for which every row gets its blocks without a preemption; at least 1.

    Not more than the longest row has left: beyond, every step would be run for rows that have ended.
    """
    mine = decodable(rank, slots)
    left = int((slots.limit[mine] - slots.planned[mine]).max(initial=1))
    for k in range(min(want_k, left), 1, -1):
        if int(_growth(rank, slots, mine, k)[1].sum()) <= rank.pool.available:
            return k
    return 1


def _victim(rank: RankState, slots: Slots) -> Choice:
    """Lowest priority, then youngest: the last in the order of the queue."""
    running = [slots.choice[s] for s in rank.decoding] + [c for c in rank.prefilling if c.joins is None]
    return max((c for c in running if c is not None), key=lambda c: c.order)


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
