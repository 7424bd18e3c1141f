"""The engine's timeline: what is marked when, and the trace events that it becomes."""

import gzip
import json
import time

import pytest

from lockstep_worker.profile import (
    APPLIED,
    DONE,
    LAUNCHED,
    RECEIVED,
    SENT,
    STARTED,
    Moment,
    Recording,
    Timeline,
    trace_events,
)

US = 1000


def moments() -> list[Moment]:
    """Plan 1 of two steps; plan 2 comes while it runs and starts when it has ended."""
    us = [
        (10, RECEIVED, 1), (12, STARTED, 1), (15, APPLIED, 1), (17, LAUNCHED, 1, 0), (19, LAUNCHED, 1, 1), (21, RECEIVED, 2),
        (40, DONE, 1, 0), (60, DONE, 1, 1), (61, STARTED, 2), (63, SENT, 1, 1), (64, APPLIED, 2), (65, LAUNCHED, 2, 0),
        (80, DONE, 2, 0),
    ]  # fmt: skip
    return [Moment(at * US, *rest) for at, *rest in us]  # type: ignore[arg-type]


def test_a_timeline_collects_only_while_it_is_on() -> None:
    timeline = Timeline()
    timeline.mark(STARTED, 1)
    timeline.begin()
    timeline.mark(STARTED, 2)
    timeline.mark(DONE, 2, 0)
    found = timeline.end()
    timeline.mark(STARTED, 3)
    assert [(m.name, m.seq, m.step) for m in found] == [(STARTED, 2, -1), (DONE, 2, 0)]
    assert found[0].at <= found[1].at and timeline.end() == []


def test_plans_become_spans() -> None:
    spans = {e["name"]: (e["tid"], e["ts"], e["dur"]) for e in trace_events(moments(), 0) if e["ph"] == "X"}
    assert spans == {
        "plan 1": (0, 10, 2),
        "plan 2": (0, 21, 40),
        "apply plan 1": (1, 12, 3),
        "launch plan 1 step 0": (1, 15, 2),
        "launch plan 1 step 1": (1, 17, 2),
        "apply plan 2": (1, 61, 3),
        "launch plan 2 step 0": (1, 64, 1),
        "plan 1 step 0": (2, 17, 23),
        "plan 1 step 1": (2, 40, 20),  # it began when the step before it had ended
        "plan 2 step 0": (2, 65, 15),
    }


def test_outcomes_are_points_and_time_counts_from_the_trace_s_start() -> None:
    [sent] = [e for e in trace_events(moments(), 3 * US) if e["ph"] == "i"]
    assert (sent["ts"], sent["tid"], sent["s"]) == (60, 3, "t")


@pytest.mark.parametrize("first", range(13))
def test_a_recording_that_begins_anywhere_has_no_span_without_a_beginning(first: int) -> None:
    spans = [e for e in trace_events(moments()[first:], 0) if e["ph"] == "X"]
    assert all(e["ts"] >= moments()[first].at / US and e["dur"] >= 0 for e in spans)


def test_a_recording_holds_the_operations_and_the_timeline_on_one_clock() -> None:
    import torch

    timeline = Timeline()
    recording = Recording(timeline)
    recording.start()
    timeline.mark(STARTED, 7)
    with torch.profiler.record_function("marked"):
        torch.ones(3, 3) @ torch.ones(3, 3)
        time.sleep(0.002)
    timeline.mark(APPLIED, 7)
    recording.stop()
    events = json.loads(gzip.decompress(recording.trace()))["traceEvents"]
    [apply] = [e for e in events if e.get("name") == "apply plan 7"]
    [marked] = [e for e in events if e.get("name") == "marked" and e["ph"] == "X"]
    assert any(e.get("name") == "aten::mm" for e in events)
    assert apply["ts"] - 500 < marked["ts"] and marked["ts"] + marked["dur"] < apply["ts"] + apply["dur"] + 500
    assert apply["dur"] >= 2000


def test_stopping_what_did_not_start_does_nothing() -> None:
    Recording(Timeline()).stop()
