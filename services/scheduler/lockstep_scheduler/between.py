"""Between two groups: what a shard still knows of the one that it has lost, and for how long requests wait for the next one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep_common.errors import LockstepError, Unavailable
from lockstep_scheduler.settings import Group


@dataclass(slots=True)
class Between:
    """Time comes in as an argument. A group that is lost may form again for `timeout` seconds; meanwhile `reforming`."""

    timeout: float
    lost: Group | None = None  # the last one that was
    why: LockstepError | None = None  # it was, while requests wait
    hindered: str = ""  # why it has not formed again at the last try
    until: float = 0.0
    written: int = 0  # epoch of the last plan that was sent

    @property
    def reforming(self) -> bool:
        return self.why is not None

    def lose(self, group: Group, why: LockstepError, now: float) -> None:
        self.lost, self.why, self.hindered, self.until = group, why, "", now + self.timeout

    def end(self) -> None:
        """Nobody waits any more: it has formed again, or is given up."""
        self.why = None

    def overdue(self, now: float) -> LockstepError | None:
        """What requests end with once the time is over: it names who was lost, and what has been in the way since."""
        if self.why is None or now < self.until:
            return None
        message = f"{self.why.message}; the group has not formed again within {self.timeout:.0f} s"
        return Unavailable(message + (f": {self.hindered}" if self.hindered else ""))

    def same_model(self, group: Group) -> bool:
        """Whether a request of the lost group may go on in this one."""
        return self.lost is None or _identity(self.lost) == _identity(group)

    @property
    def num_blocks(self) -> int:
        """KV blocks to ask for while requests wait: with more than before, caches would have to be made anew. 0: as many as fit."""
        return self.lost.facts.groups[0].num_blocks if self.reforming and self.lost else 0

    def kept(self, group: Group) -> list[int]:
        """Which ranks of the shard have caches that are as it knows them from the lost group, by their place in `group.ranks`. There
        may be fewer blocks: a worker that was started again does not find quite as much memory.

        What it knows is true: a key stands for what a booked plan has written (the loop retracts the others), and a driver reports
        a step that all workers of its rank have written, since its tokens come of what each of them attended to.
        """
        lost = self.lost
        if lost is None or not group.kept or not self.same_model(group):
            return []
        if (lost.ranks, lost.dp, lost.cp) != (group.ranks, group.dp, group.cp) or not _no_more(lost, group):
            return []
        return [i for i, rank in enumerate(group.ranks) if group.kept[rank] == self.written > 0]


def _identity(group: Group) -> tuple[str, int]:
    return group.facts.config_hash, group.facts.weights_epoch


def _no_more(lost: Group, group: Group) -> bool:
    """Whether the KV blocks are those of the lost group, or the first ones of them."""
    was, now = lost.facts.groups, group.facts.groups
    return len(was) == len(now) and all(
        new.num_blocks <= old.num_blocks and replace(new, num_blocks=old.num_blocks) == old
        for old, new in zip(was, now, strict=True)
    )
