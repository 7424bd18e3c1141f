"""Which engine group gets a request: a pure function of the groups' loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

TOKENS_PER_GRADE: Final = 256  # waiting work is compared in grades of so many prompt tokens
CROWDED_KV: Final = 0.85  # share of KV blocks in use beyond which a new request may have to wait, or push others out


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group as placement sees it: its last snapshot, and what was sent to it that the snapshot cannot know yet."""

    ready: bool
    reforming: bool = False  # it has lost a worker: a request would wait for a new one
    running: int = 0
    waiting: int = 0
    max_running: int = 1
    waiting_uncached_tokens: int = 0
    kv_usage: float = 0.0
    sent_choices: int = 0
    sent_tokens: int = 0

    @property
    def crowded(self) -> bool:
        """True if a new request would probably not run at once: no row is left, or hardly a KV block."""
        return self.rows >= 1 or self.kv_usage > CROWDED_KV

    @property
    def grade(self) -> int:
        """Prompt work that a new request would wait behind."""
        return (self.waiting_uncached_tokens + self.sent_tokens) // TOKENS_PER_GRADE

    @property
    def rows(self) -> float:
        """Share of the rows that is taken or spoken for; above 1 requests queue."""
        return (self.running + self.waiting + self.sent_choices) / max(self.max_running, 1)

    @property
    def cost(self) -> tuple[bool, bool, int, float]:
        return self.reforming, self.crowded, self.grade, max(self.rows, self.kv_usage)


def choose(groups: Sequence[GroupView], *, rotation: int) -> int | None:
    """Index of the group for the next request; None if no group is ready.

    Law: among the ready groups, one with the least cost, which is (forms again, crowded, grade of waiting work, share of rows
    or KV in use). Of several equal ones the first at or after index `rotation % len(groups)`, cyclically, so that a
    caller who counts `rotation` up spreads equal requests evenly even before the first snapshot shows them.
    """
    count = len(groups)
    best: int | None = None
    for step in range(count):
        index = (rotation + step) % count
        group = groups[index]
        if group.ready and (best is None or group.cost < groups[best].cost):
            best = index
    return best
