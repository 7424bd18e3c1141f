"""What a person sees while something takes long: bars on a terminal, a plain line now and then everywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

_PLAIN_INTERVAL_S = 1.0
_PLAIN_STEP = 0.1


class Report(Protocol):
    def __call__(self, label: str, fraction: float, note: str = "") -> None:
        """`label` is `fraction` (0..1) done; `note` says what it does. At 1 the label is finished."""
        ...


class ProgressDisplay:
    """Progress of several labelled things at once; use as a context manager and call it as a `Report`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._plain: dict[str, tuple[float, float, str]] = {}  # label -> (when, fraction, note) as last printed
        if stream.isatty():
            self._bars = Progress(
                TextColumn("{task.description:<24}"),
                BarColumn(bar_width=30),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("[dim]{task.fields[note]}"),
                console=Console(file=stream),
            )

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def __call__(self, label: str, fraction: float, note: str = "") -> None:
        if self._bars:
            if label not in self._tasks:
                self._tasks[label] = self._bars.add_task(label, total=1.0, note=note)
            self._bars.update(self._tasks[label], completed=fraction, note=note)
        elif self._worth_a_line(label, fraction, note):
            suffix = f" ({note})" if note else ""
            print(f"{label}: {fraction:.0%}{suffix}", file=self._stream, flush=True)

    def _worth_a_line(self, label: str, fraction: float, note: str) -> bool:
        now = time.monotonic()
        when, shown, shown_note = self._plain.get(label, (0.0, -1.0, ""))
        finished = fraction >= 1 > shown
        changed = note != shown_note or fraction - shown >= _PLAIN_STEP
        if label not in self._plain or finished or (changed and fraction < 1 and now - when >= _PLAIN_INTERVAL_S):
            self._plain[label] = (now, fraction, note)
            return True
        return False
