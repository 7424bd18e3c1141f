"""Every collective has an id and is recorded, so that a group that stands still can say where."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

KEPT: Final = 1024
PROLOGUE: Final = -1  # the step of what comes before a plan's first one
DEVICE: Final = "device"  # the scope of results that a device owes, whichever collectives it is in


@dataclass(frozen=True, slots=True)
class CollectiveId:
    """The same on all ranks that take part: plan, step within it, communicator, and number of the collective in that step there."""

    seq: int
    step: int
    scope: str
    index: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (plan {self.seq}, step {self.step}, {self.scope} {self.index})"

    @property
    def key(self) -> str:
        return f"{self.seq}.{self.step}.{self.scope}.{self.index}.{self.name}"


def scope_of(key: str) -> str:
    """The communicator that a key is of."""
    return key.split(".", 3)[2]


@dataclass(frozen=True, slots=True)
class Record:
    id: CollectiveId
    start_s: float
    seconds: float


class Recorder:
    """The collective that is open now and the last ones before it. Written by the step thread, read by the watchdog."""

    def __init__(self) -> None:
        self._seq = self._step = 0
        self._counts: Counter[str] = Counter()
        self._open: tuple[CollectiveId, float] | None = None
        self._done: deque[Record] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def at(self, seq: int, step: int) -> None:
        """The collectives from here on belong to this step of this plan, and are counted from 0."""
        self._seq, self._step = seq, step
        self._counts.clear()

    @contextmanager
    def during(self, name: str, scope: str) -> Iterator[CollectiveId]:
        """The next collective of the step in this communicator, while it is open."""
        collective = CollectiveId(self._seq, self._step, scope, self._counts[scope], name)
        self._counts[scope] += 1
        start_s = time.monotonic()
        self._open = (collective, start_s)
        try:
            yield collective
        finally:
            self._open = None
            with self._lock:
                self._done.append(Record(collective, start_s, time.monotonic() - start_s))

    def stalled(self, name: str, since_s: float) -> None:
        """What collectives on a device were queued for does not come: counts as an open collective until `flows`."""
        self._open = (CollectiveId(self._seq, self._step, DEVICE, 0, name), since_s)

    def flows(self) -> None:
        """What was waited for has come."""
        self._open = None

    def waiting(self) -> tuple[CollectiveId, float] | None:
        """The open collective and when it began, on time.monotonic; None if there is none."""
        return self._open

    def keys(self) -> list[str]:
        """The keys of the present plan's collectives, the open one at the end."""
        opened = self._open
        return [*self.of_plan(self._seq), *([opened[0].key] if opened else [])]

    def of_plan(self, seq: int) -> list[str]:
        """The keys of all collectives of a plan, if it was one of the last."""
        with self._lock:
            return [record.id.key for record in self._done if record.id.seq == seq]

    def history(self) -> list[Record]:
        with self._lock:
            return list(self._done)
