"""What plans are made from: the queue of a shard, and its DP ranks as the scheduler knows them. Pure bookkeeping."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep_scheduler.blocks import BlockPool
from lockstep_scheduler.request import Choice, Phase


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a plan. Tokens per rank and plan, rows per rank, the share of blocks above which nobody is admitted.
    `attention_span`: pairs of a query and a key that cost as much as a prompt token does without them."""

    max_rows: int
    max_batched_tokens: int
    max_model_len: int
    max_window: int
    watermark: float = 0.95
    max_passed_over: int = 64
    max_passed_seconds: float = 2.0
    attention_span: int = 4096


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

    def shareable(self, choice: Choice, upto: int) -> int:
        """How many leading blocks of the choice's tokens before position `upto` other choices may have too."""
        return (upto if self.generated_reusable else min(upto, choice.prompt_len)) // self.pool.block_size

    def hits(self, choice: Choice) -> list[int]:
        """Known blocks of the longest beginning of the choice's tokens; the last token is always computed, and all that are to
        be scored."""
        if choice.request.scores_due:
            return []
        return self.pool.lookup(choice.keys, self.shareable(choice, len(choice.tokens) - 1))


def new_rank(
    index: int,
    num_blocks: int,
    block_size: int,
    max_rows: int,
    generated_reusable: bool = True,
) -> RankState:
    pool = BlockPool(num_blocks, block_size)
    return RankState(index, pool, list(range(max_rows)), generated_reusable)
