"""Watches the open collective: a missed deadline is a report that names the collective and the ranks that are not in it.

A report costs nobody anything: the collective goes on waiting. What becomes of the group is for others to decide.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from lockstep_worker.collectives.record import CollectiveId, Recorder, scope_of

log = logging.getLogger(__name__)


class Board(Protocol):
    """Where ranks write what they wait in; shared by the group. RuntimeError if it cannot be reached."""

    def post(self, rank: int, text: str) -> None: ...

    def read(self, rank: int) -> str:
        """Empty if the rank has posted nothing."""
        ...


class Watchdog:
    """Reports once for each collective that stays open longer than the deadline.

    Every rank that waits posts what its present plan has been through; after a grace period, whoever has posted nothing has not arrived, and
    whoever is in another collective is out of step.
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
        together: Callable[[int], Sequence[str]],
    ) -> None:
        """together(rank): the communicators that this rank and another one have in common."""
        self._together = together
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
        """Returns at once; the thread may wait for its board a little longer."""
        self._stop.set()

    def _watch(self) -> None:
        reported: CollectiveId | None = None
        while not self._stop.wait(self._deadline_s / 4):
            waiting = self._recorder.waiting()
            if waiting is None or waiting[0] == reported or time.monotonic() - waiting[1] < self._deadline_s:
                continue
            reported = waiting[0]
            message = self._describe(*waiting)
            if not self._stop.is_set():
                self._report(message)

    def _describe(self, collective: CollectiveId, start_s: float) -> str:
        found: list[str] = []
        asking = threading.Thread(
            target=lambda: found.append(self._who_is_missing()), name="who is missing", daemon=True
        )
        asking.start()  # a store whose host was stopped answers nothing at all, and reading from it cannot be bounded
        asking.join(self._deadline_s)
        who = found[0] if found else f"the group's store does not answer, so its host is missing: {self._peers[0]}"
        return f"{collective} has waited {time.monotonic() - start_s:.1f} s; {who}"

    def _who_is_missing(self) -> str:
        mine = self._recorder.keys()
        try:
            self._board.post(self._rank, "\n".join(mine))
            self._stop.wait(self._deadline_s / 2)  # the others notice at about the same time
            others = [self._board.read(rank).splitlines() for rank in range(len(self._peers))]
        except RuntimeError as error:
            return f"the group's store is gone, so its host is missing: {self._peers[0]} ({error})"
        missing = [peer for peer, theirs in zip(self._peers, others, strict=True) if not theirs]
        astray = [
            f"{peer} {difference}"
            for rank, (peer, theirs) in enumerate(zip(self._peers, others, strict=True))
            if theirs and (difference := self._difference(rank, mine, theirs))
        ]
        said = [f"missing: {', '.join(missing)}"] if missing else []
        said += [f"out of step: {'; '.join(astray)}"] if astray else []
        return "; ".join(said) or "nobody is missing: all have arrived"

    def _difference(self, rank: int, mine: Sequence[str], theirs: Sequence[str]) -> str:
        together = self._together(rank)
        return first_difference(shared(mine, together), shared(theirs, together))


def shared(keys: Sequence[str], scopes: Sequence[str]) -> list[str]:
    """The keys of collectives in these communicators."""
    return [key for key in keys if scope_of(key) in scopes]


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Where two ranks' collectives part, as far as both tell of them: oldest first, the last one may be open. Empty: nowhere.

    Both are sequences of `CollectiveId.key`. A rank that is only behind, or ahead, differs where the shorter one ends.
    """
    if not mine or not theirs:
        return (
            "" if list(mine) == list(theirs) else f"has been through {len(theirs)} collectives, this rank {len(mine)}"
        )
    start = _common_start(mine, theirs)
    if start is None:
        return f"is in {theirs[-1]}, long past or before {mine[-1]}"
    a, b = mine[start[0] :], theirs[start[1] :]
    for here, there in zip(a, b, strict=False):
        if here != there:
            return f"had {there} where this rank had {here}"
    if len(a) > len(b):
        return f"is in {b[-1]}, before {a[-1]}"
    return f"is in {b[-1]}, past {a[-1]}" if len(b) > len(a) else ""


def _common_start(mine: Sequence[str], theirs: Sequence[str]) -> tuple[int, int] | None:
    known = {key: i for i, key in enumerate(theirs)}
    for i, key in enumerate(mine):
        if key in known:
            return i, known[key]
    return None
