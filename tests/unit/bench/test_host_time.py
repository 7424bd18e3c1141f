"""Host time a step, from the moments of a timeline."""

from pathlib import Path

from lockstep_bench import host_time
from lockstep_worker.profile import DONE, LAUNCHED, RECEIVED, SENT, STARTED, Moment

MS = 1_000_000


def plan(seq: int, at: int, steps: int) -> list[Moment]:
    """Received 2 ms after the last outcome left, taken up 1 ms later, with a step each half millisecond from then on."""
    launched = [Moment(at + 3 * MS + (i + 1) * MS // 2, LAUNCHED, seq, i) for i in range(steps)]
    return [
        Moment(at, SENT, seq - 1, 0),
        Moment(at + 2 * MS, RECEIVED, seq),
        Moment(at + 3 * MS, STARTED, seq),
        *launched,
        Moment(launched[-1].at + MS, DONE, seq, 0),
    ]


def test_the_time_between_outcome_and_plan_is_the_schedulers_and_up_to_the_last_launch_the_workers() -> None:
    moments = plan(5, 0, 8) + plan(6, 100 * MS, 8) + plan(7, 200 * MS, 8)
    assert host_time.per_step(moments, 8, 0.002) == {
        "window": 8,
        "plans": 2,
        "scheduler_ms": 0.25,
        "worker_ms": 0.5,
        "ms": 0.75,
    }


def test_plans_count_in_a_row_of_the_same_window_only() -> None:
    assert host_time.per_step(plan(5, 0, 4) + plan(6, 100 * MS, 8), 8, 0.002) is None, (
        "the scheduler waited for something else"
    )
    found = host_time.per_step(plan(5, 0, 8)[3:] + plan(6, 100 * MS, 8) + plan(7, 200 * MS, 8), 8, 0.002)
    assert found is not None and found["plans"] == 2, "the first one was cut by the recording"
    assert host_time.per_step(plan(5, 0, 1) + plan(6, 100 * MS, 1), 1, 0.002) is None, (
        "of a single step nothing can be told"
    )


def test_moments_are_kept_and_read_by_their_time(tmp_path: Path) -> None:
    moments = plan(5, 0, 2) + plan(6, 100 * MS, 2)
    host_time.write(tmp_path / "moments", moments)
    assert host_time.read(tmp_path / "moments", 100 * MS, 200 * MS) == plan(6, 100 * MS, 2)
    assert host_time.read(tmp_path / "nothing", 0, 1) == []
