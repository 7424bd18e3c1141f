"""Host time on the path of a decode step: what scheduler and worker take for a plan, over the steps of its window.

`python -m lockstep_bench.host_time ...` is a worker that keeps its timeline from start to end: it takes the worker's flags, and
writes the moments to the file named by LOCKSTEP_BENCH_TIMELINE when it is stopped. Torch's profiler is off, so launches take
what they take in serving.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from lockstep_bench import skew
from lockstep_worker.profile import LAUNCHED, STARTED, Moment, Timeline

VARIABLE = "LOCKSTEP_BENCH_TIMELINE"


def per_step(moments: Sequence[Moment], window: int, round_trip_s: float) -> dict[str, float] | None:
    """Mean milliseconds a step, over the plans of `window` decode steps that follow another such plan; None if there are none.

    scheduler_ms: of `round_trip_s`, the mean time from when a worker sent the outcome that a plan waited for until the plan came,
    less what the scheduler held it back on purpose: both ways on the wire, booking, deciding, writing. worker_ms: from when the
    worker took the plan up until its last step was given to the device. Both may lie behind the device's work of the plan before.
    Where no device works beside the host, the worker's time is that of the steps themselves. Moments are in order of time.
    """
    steps: defaultdict[int, int] = defaultdict(int)
    started: dict[int, int] = {}
    launched: dict[int, int] = {}
    for moment in moments:
        if moment.name == STARTED:
            started[moment.seq] = moment.at
        elif moment.name == LAUNCHED:
            steps[moment.seq] += 1
            launched[moment.seq] = moment.at
    plans = [seq for seq in steps if steps[seq] == steps.get(seq - 1) == window > 1 and seq in started]
    if not plans:
        return None
    scheduler = round_trip_s / window * 1e3
    worker = fmean(launched[seq] - started[seq] for seq in plans) / window / 1e6
    return {
        "window": window,
        "plans": len(plans),
        "scheduler_ms": round(scheduler, 4),
        "worker_ms": round(worker, 4),
        "ms": round(scheduler + worker, 4),
    }


def write(path: Path, moments: Iterable[Moment]) -> None:
    path.write_text(json.dumps([(moment.at, moment.name, moment.seq, moment.step) for moment in moments]))


def read(path: Path, begin: int, end: int) -> list[Moment]:
    """The moments from `begin` to `end` (time.perf_counter_ns(), which all processes of a machine share)."""
    found = (Moment(*fields) for fields in json.loads(path.read_text())) if path.exists() else ()
    return [moment for moment in found if begin <= moment.at <= end]


def main() -> None:
    from lockstep_worker import runner
    from lockstep_worker.__main__ import main as worker

    kept: list[Timeline] = []

    def keeping() -> Timeline:
        kept.append(Timeline())
        kept[-1].begin()
        return kept[-1]

    vars(runner)["Timeline"] = keeping
    skew.apply()
    try:
        worker()
    finally:
        write(Path(os.environ[VARIABLE]), kept[0].end() if kept else ())


if __name__ == "__main__":
    main()
