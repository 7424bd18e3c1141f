"""When the next plan is composed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_common.steps import Header, Kind
from lockstep_scheduler.pace import LONGEST_TURNAROUND, TURNAROUND_GUESS, Pace


def decode(k: int) -> Header:
    return Header(epoch=1, seq=1, kind=Kind.DECODE, first_step=0, k=k)


def test_the_lead_covers_the_turnaround_in_whole_steps() -> None:
    pace = Pace()
    pace.decoded(0.001)
    assert pace.lead_steps == 3 and pace.notice(decode(8)) == 5 and pace.notice(decode(2)) == 0
    slow = Pace()
    slow.decoded(0.025)
    assert slow.lead_steps == 1 and slow.notice(decode(8)) == 7


def test_a_plan_is_composed_as_late_as_it_arrives_in_time() -> None:
    pace = Pace()
    pace.decoded(0.025)
    at = pace.compose_at(decode(8), remaining=1, reported=100.0)
    assert 100.0 + 0.025 - at == pytest.approx(1.25 * TURNAROUND_GUESS + 0.0005)
    pace.prefilled(0.2, 100)
    prefill = Header(epoch=1, seq=1, kind=Kind.PREFILL, first_step=0, k=1, micro_chunks=(50,))
    assert pace.compose_at(prefill, 1, 0.0) == pytest.approx(0.1 - 1.25 * TURNAROUND_GUESS - 0.0005)


def test_late_plans_make_the_next_ones_earlier_and_a_stall_is_forgotten() -> None:
    pace = Pace()
    pace.decoded(0.005)
    for _ in range(5):
        pace.came(0.0006)
    assert pace.turnaround == pytest.approx(TURNAROUND_GUESS + 5 * 0.0006)
    pace.came(3.0)
    assert pace.turnaround == pytest.approx(TURNAROUND_GUESS + 5 * 0.0006 + 0.001)
    for _ in range(1000):
        pace.came(0.0)
    assert pace.turnaround == pytest.approx(TURNAROUND_GUESS, rel=0.05)


@given(st.lists(st.tuples(st.sampled_from(["turned", "came", "decoded"]), st.floats(0, 100)), max_size=50))
def test_measurements_stay_within_bounds(events: list[tuple[str, float]]) -> None:
    pace = Pace()
    for name, value in events:
        getattr(pace, name)(value)
        assert 0 <= pace.turnaround <= LONGEST_TURNAROUND and pace.lead_steps >= 1
