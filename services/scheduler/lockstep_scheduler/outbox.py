"""The way of events to sessions: in order, and behind the plan that goes out in the same turn, as a device waits for that."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from lockstep_scheduler.booking import EventBatch


class Outbox:
    def __init__(self, emit: Callable[[EventBatch], None]) -> None:
        self._emit = emit
        self._kept: deque[EventBatch] = deque()
        self._held = False

    def __call__(self, batch: EventBatch) -> None:
        if self._held:
            self._kept.append(batch)
        else:
            self._emit(batch)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What is told meanwhile is told at the end, also if that is an exception. Not within itself."""
        assert not self._held
        self._held = True
        try:
            yield
        finally:
            self._held = False
            while self._kept:
                self._emit(self._kept.popleft())
