"""Watches the open collective: a missed deadline is a report that names the collective and the ranks that have not arrived."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from lockstep_worker.collectives.record import CollectiveId, Recorder

log = logging.getLogger(__name__)


class Board(Protocol):
    """Where ranks write what they wait in; shared by the group."""

    def post(self, rank: int, waiting_in: str) -> None: ...

    def read(self, rank: int) -> str: ...


class Watchdog:
    """Reports once for each collective that stays open longer than the deadline.

    Every rank that waits posts the collective's key on the board; after a grace period the ranks without it are missing.
    """

    def __init__(
        self,
        recorder: Recorder,
        board: Board,
        *,
        rank: int,
        peers: tuple[str, ...],
        deadline_s: float,
        report: Callable[[str], None],
    ) -> None:
        self._recorder = recorder
        self._board = board
        self._rank = rank
        self._peers = peers
        self._deadline_s = deadline_s
        self._report = report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        reported: CollectiveId | None = None
        while not self._stop.wait(self._deadline_s / 4):
            waiting = self._recorder.waiting()
            if waiting is None or waiting[0] == reported or time.monotonic() - waiting[1] < self._deadline_s:
                continue
            reported = waiting[0]
            self._report(self._describe(*waiting))

    def _describe(self, collective: CollectiveId, start_s: float) -> str:
        try:
            self._board.post(self._rank, collective.key)
            self._stop.wait(self._deadline_s / 2)  # the others notice at about the same time
            missing = [peer for rank, peer in enumerate(self._peers) if self._board.read(rank) != collective.key]
        except RuntimeError as error:  # the store went with its host, rank 0
            return f"{collective} has waited {time.monotonic() - start_s:.1f} s; the group's store does not answer: {error}"
        who = ", ".join(missing) if missing else "nobody: all have arrived"
        return f"{collective} has waited {time.monotonic() - start_s:.1f} s; missing: {who}"
