"""What a worker did when: the engine's own timeline beside torch's profiler, in one trace that Perfetto opens.

A plan's moments are marked where they happen: `received` and `sent` on the server's thread, `started` and `done` by the
driver, `applied` and `launched` by the engine. Off, a mark costs one comparison. Torch is imported when a recording begins.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep_common.errors import LockstepError

RECEIVED: Final = "received"  # a plan came
STARTED: Final = "started"  # the step thread took it up
APPLIED: Final = "applied"  # its body is in the rows
LAUNCHED: Final = "launched"  # a step was given to the device
DONE: Final = "done"  # a step's results were read
SENT: Final = "sent"  # an outcome with the steps up to this one left

_PROCESS: Final = 1_000_000_000  # no process id, so that it cannot meet the profiler's
_TRACKS: Final = ("plan waits", "host", "steps", "outcomes")


@dataclass(frozen=True, slots=True)
class Moment:
    """`at`: time.perf_counter_ns(). `step` counts within the plan `seq`; -1 for what concerns the plan as a whole."""

    at: int
    name: str
    seq: int
    step: int = -1


class Timeline:
    """Collects moments while it is on. Threads may mark at once: an append is atomic."""

    def __init__(self) -> None:
        self._moments: list[Moment] | None = None

    def mark(self, name: str, seq: int, step: int = -1) -> None:
        if self._moments is not None:
            self._moments.append(Moment(time.perf_counter_ns(), name, seq, step))

    def begin(self) -> None:
        self._moments = []

    def end(self) -> list[Moment]:
        """Stops collecting; what was collected, in order of time."""
        moments, self._moments = self._moments or [], None
        return sorted(moments, key=lambda moment: moment.at)


class Recording:
    """One recording of `timeline` and torch's profiler. `start` and `stop` belong to the thread that runs the steps."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._moments: list[Moment] = []
        self._profiler: Any = None
        self._offset_ns = 0

    def start(self) -> None:
        """LockstepError if the profiler does not start; then nothing is recorded."""
        import torch
        from torch.profiler import ProfilerActivity

        os.environ["TEARDOWN_CUPTI"] = "0"  # graphs do not outlive a CUPTI that is torn down and set up again
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        try:
            profiler.start()
        except RuntimeError as error:
            raise LockstepError(f"torch's profiler does not start: {error}") from error
        self._profiler = profiler
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._timeline.begin()

    def stop(self) -> None:
        """Does nothing if it was not started."""
        self._moments = self._timeline.end()
        if self._profiler is not None:
            self._profiler.stop()

    def trace(self) -> bytes:
        """The whole recording as gzipped JSON in Chrome's trace format; from any thread, after `stop`."""
        with tempfile.TemporaryDirectory(prefix="lockstep-") as scratch:
            path = Path(scratch) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            document = json.loads(path.read_text())
        start_ns = int(document.get("baseTimeNanoseconds", 0)) - self._offset_ns
        document["traceEvents"] += trace_events(self._moments, start_ns)
        return gzip.compress(json.dumps(document).encode(), compresslevel=5)


def trace_events(moments: Sequence[Moment], start_ns: int) -> list[dict[str, Any]]:
    """The timeline as trace events; `start_ns` is the moment (perf_counter) from which the trace counts microseconds.

    Four tracks: how long a plan waited for the one before it; what the host did (apply a plan, launch a step); each step from
    its launch, or the end of the step before it, to its results; and when outcomes left.
    """
    events = [
        _meta("process_name", name="Lockstep engine"),
        _meta("process_sort_index", sort_index=-1),
        *(_meta("thread_name", thread, name=name) for thread, name in enumerate(_TRACKS)),
    ]
    spans = _Spans(start_ns)
    at: dict[tuple[str, int, int], int] = {}
    last_host: dict[int, int] = defaultdict(int)  # by plan: when the host had done what is known so far
    last_done = 0
    for moment in moments:
        at[moment.name, moment.seq, moment.step] = moment.at
        plan = f"plan {moment.seq}"
        match moment.name:
            case "started":
                spans.add(0, plan, at.get((RECEIVED, moment.seq, -1)), moment.at)
            case "applied":
                spans.add(1, f"apply {plan}", at.get((STARTED, moment.seq, -1)), moment.at)
            case "launched":
                spans.add(1, f"launch {plan} step {moment.step}", last_host[moment.seq], moment.at)
            case "done":
                launched = at.get((LAUNCHED, moment.seq, moment.step)) or at.get((STARTED, moment.seq, -1))
                if launched is not None:
                    spans.add(2, f"{plan} step {moment.step}", max(launched, last_done), moment.at)
                last_done = moment.at
            case "sent":
                events.append(
                    _event(3, f"outcome of {plan} up to step {moment.step}", "i", moment.at - start_ns) | {"s": "t"}
                )
        if moment.name in (STARTED, APPLIED, LAUNCHED):
            last_host[moment.seq] = moment.at
    return events + spans.events


class _Spans:
    def __init__(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self.events: list[dict[str, Any]] = []

    def add(self, track: int, name: str, begin: int | None, end: int) -> None:
        """Nothing if the beginning lies before the recording."""
        if begin:
            self.events.append(_event(track, name, "X", begin - self._start_ns) | {"dur": (end - begin) / 1e3})


def _event(track: int, name: str, kind: str, at_ns: int) -> dict[str, Any]:
    return {"ph": kind, "name": name, "cat": "lockstep", "pid": _PROCESS, "tid": track, "ts": at_ns / 1e3}


def _meta(kind: str, track: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": args}
