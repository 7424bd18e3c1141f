"""What each rank would prefill in the next plan: unfinished chunks, then the queue, each group on the rank where it costs least.

Pure, and it changes nothing: from a draft come the votes, and when the header is agreed, `plan.commit_prefill` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lockstep_scheduler import placement
from lockstep_scheduler.placement import Bools, affordable, work
from lockstep_scheduler.ranks import Limits, RankState, Waiting
from lockstep_scheduler.request import Choice, Phase

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class RankDraft:
    """What a rank would prefill in the next plan."""

    chunks: list[tuple[Choice, int]] = field(default_factory=list)  # (choice in prefill, tokens)
    admits: list[list[Choice]] = field(default_factory=list)  # groups from the queue
    tokens: int = 0
    work: float = 0.0  # of these tokens
    level: float = math.inf  # the most work that the others wait for

    @property
    def wanted(self) -> bool:
        return bool(self.chunks or self.admits)

    def take(self, start: int, count: int, limits: Limits) -> int:
        """How many of `count` tokens behind `start` others still go into the pass, at least one into an empty one; counts them."""
        count = min(count, limits.max_batched_tokens - self.tokens)
        if self.level < math.inf:
            least = 0 if self.tokens else 1
            count = min(count, max(least, affordable(start, self.level - self.work, limits.attention_span)))
        self.tokens += count
        self.work += work(start, count, limits.attention_span)
        return count


@dataclass(slots=True)
class Draft:
    ranks: list[RankDraft]
    passed: list[Choice]  # heads of groups that others are admitted before


class Standing:
    """What ranks can give to admissions, an array element a rank: as they are, less what `admit` has promised."""

    def __init__(self, ranks: Sequence[RankState], limits: Limits) -> None:
        self._ranks, self._limits = ranks, limits
        self.rows = np.array([len(rank.free_rows) for rank in ranks])
        self.used = np.array([rank.rows_in_use for rank in ranks])
        self.available = np.array([rank.pool.available for rank in ranks])
        self._total = np.array([rank.pool.total for rank in ranks])
        self._held = np.array([rank.held for rank in ranks])

    @property
    def owned(self) -> Ints:
        owned: Ints = self._total - self.available
        return owned

    def fits(self, group: list[Choice], needed: Ints) -> Bools:
        """Rows for all choices, `needed` blocks, and the watermark, which does not hold an empty rank back; one that has
        preempted admits nobody beside its rows."""
        free = ~self._held & (self.owned <= self._limits.watermark * self._total)
        fits: Bools = (self.rows >= len(group)) & ((self.used == 0) | free) & (needed <= self.available)
        return fits

    def needed(self, group: list[Choice], hits: Mapping[int, list[int]]) -> Ints:
        """Blocks that admission takes from what is available, with `hits` of the prompt in the caches of some ranks: for the whole
        prompt and a window's lookahead new ones, and cached ones that come back into use."""
        first, size = group[0], self._ranks[0].pool.block_size
        most = min(len(first.tokens) + self._limits.max_window, first.request.limit)
        needed = np.full(len(self._ranks), -(-most // size) + len(group) - 1)
        for at, mine in hits.items():
            needed[at] += self._ranks[at].pool.revived(mine) - len(mine)
        return needed

    def admit(self, at: int, group: list[Choice], needed: int) -> None:
        self.rows[at] -= len(group)
        self.used[at] += len(group)
        self.available[at] -= needed


def draft_prefill(ranks: Sequence[RankState], waiting: Waiting, limits: Limits, now: float) -> Draft:
    """Unfinished chunks first, oldest first; then the queue in order. At the end no rank has more work than the others would
    gladly wait for (`placement.level`).

    A group that fits nowhere is passed over within the bounds of `limits`.
    """
    draft = Draft([RankDraft() for _ in ranks], [])
    for rank, mine in zip(ranks, draft.ranks, strict=True):
        _continue(rank, mine, limits)
    if waiting:
        _admissions(ranks, draft, waiting, limits, now)
    _cut(ranks, draft, limits, now)
    return draft


def remainder(draft: RankDraft) -> RankDraft:
    """What is left of a draft whose vote took time: requests may have ended since. Nothing is added, so that the rank keeps
    within what it voted for; what came meanwhile is for the next plan."""
    return RankDraft(
        chunks=[(choice, count) for choice, count in draft.chunks if choice.phase is Phase.PREFILL],
        admits=[group for group in draft.admits if group],
        level=draft.level,
    )


def _continue(rank: RankState, mine: RankDraft, limits: Limits) -> None:
    """Chunks of the prompts that the rank has begun, as many tokens as a pass may have."""
    for choice in rank.prefilling:
        if choice.joins is not None and choice.joins.phase is Phase.PREFILL:
            continue
        if count := mine.take(choice.computed, len(choice.tokens) - choice.computed, limits):
            mine.chunks.append((choice, count))


def _admissions(ranks: Sequence[RankState], draft: Draft, waiting: Waiting, limits: Limits, now: float) -> None:
    standing, span = Standing(ranks, limits), limits.attention_span
    size = ranks[0].pool.block_size
    tokens = np.array([mine.tokens for mine in draft.ranks])
    waits = np.array([_unfinished(rank, span) for rank in ranks])
    caches = [rank.pool.known for rank in ranks]
    passed: list[Choice] = []
    for group in waiting.ordered():
        room = (tokens < limits.max_batched_tokens) & (standing.rows > 0)
        if not room.any():
            break
        first = group[0]
        length = len(first.tokens)
        opened = np.nonzero(room)[0].tolist() if first.keys else []
        hits = {at: ranks[at].hits(first) for at in opened if first.keys[0] in caches[at]}
        needed = standing.needed(group, hits)
        here = np.full(len(ranks), work(0, length, span))
        for at, mine in hits.items():
            here[at] = work(len(mine) * size, length - len(mine) * size, span)
        cost = here + waits + placement.ROW_COST * standing.used + placement.KV_COST * size * standing.owned
        chosen = placement.choose(room & standing.fits(group, needed), cost)
        if chosen is None:
            if _barrier(first, limits, now) or len(passed) >= limits.max_passed_over:
                break
            passed.append(first)
            continue
        start, goes_on = len(hits.get(chosen, ())) * size, draft.ranks[chosen]
        goes_on.admits.append(group)
        goes_on.take(start, length - start, limits)
        standing.admit(chosen, group, int(needed[chosen]))
        tokens[chosen] = goes_on.tokens
        waits[chosen] += here[chosen]
        draft.passed = list(passed)


def _unfinished(rank: RankState, span: float) -> float:
    """Work of the prompts that the rank has begun."""
    return sum(work(c.computed, len(c.tokens) - c.computed, span) for c in rank.prefilling)


def _cut(ranks: Sequence[RankState], draft: Draft, limits: Limits, now: float) -> None:
    """Cuts each rank's work to the level of all, oldest first. A group that would get no token goes back to the queue, where
    another rank may take it; it is passed over by those behind it."""
    full = float(limits.max_batched_tokens)
    planned = np.array([mine.work for mine in draft.ranks])
    level = placement.level(planned, full)
    for at in np.nonzero(planned > level)[0].tolist():
        rank, before, mine = ranks[at], draft.ranks[at], RankDraft(level=level)
        for choice, count in before.chunks:
            if got := mine.take(choice.computed, count, limits):
                mine.chunks.append((choice, got))
        for group in before.admits:
            start = len(rank.hits(group[0])) * rank.pool.block_size
            if mine.take(start, len(group[0].tokens) - start, limits) or _barrier(group[0], limits, now):
                mine.admits.append(group)
            else:
                draft.passed.append(group[0])
        draft.ranks[at] = mine


def _barrier(choice: Choice, limits: Limits, now: float) -> bool:
    request = choice.request
    return request.passed_over >= limits.max_passed_over or now - request.passed_since > limits.max_passed_seconds
