"""Goals and the JSON form of a run."""

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from lockstep_bench import cpu, overhead, report
from lockstep_bench.processes import parse_metrics
from lockstep_bench.report import Goal

RESULTS = Path(__file__).parents[2] / "bench" / "results"
TOP = {
    "schema": int,
    "benchmark": str,
    "date": str,
    "commit": str,
    "machine": dict,
    "versions": dict,
    "settings": dict,
    "rows": list,
    "goals": list,
}
GOAL = {
    "name": str,
    "value": (float, int, type(None)),
    "limit": (float, int),
    "at_least": bool,
    "unit": str,
    "met": (bool, type(None)),
}
OVERHEAD_COLUMNS = {
    "wait_ms", "batch", "window", "steps_per_s", "cpu_ms_per_step", "ttft_p50_ms", "ttft_p99_ms", "overrun_row_steps", "lead_ms",
}  # fmt: skip


def check_document(doc: dict[str, object]) -> None:
    assert {key: type(value) for key, value in doc.items()} == TOP
    assert doc["schema"] == report.SCHEMA
    assert {"cpu", "cores", "memory_gib", "python", "load_average"} <= set(doc["machine"])  # type: ignore[call-overload]
    for goal in doc["goals"]:  # type: ignore[attr-defined]
        assert set(goal) == set(GOAL)
        assert all(isinstance(goal[key], kind) for key, kind in GOAL.items())
    if doc["benchmark"] == "overhead":
        for row in doc["rows"]:  # type: ignore[attr-defined]
            assert set(row) >= OVERHEAD_COLUMNS


def test_goals_are_met_missed_or_unmeasured() -> None:
    assert Goal("a", 2.0, 1.0, True).verdict == "PASS"
    assert Goal("a", 1.0, 1.0, True).verdict == "PASS"
    assert Goal("a", 2.0, 1.0, False).verdict == "FAIL"
    assert Goal("a", None, 1.0, False).verdict == Goal("a", math.nan, 1.0, True).verdict == "not measured"


def test_exit_code_fails_for_a_miss_and_for_nothing_measured() -> None:
    met, missed, unknown = Goal("a", 2.0, 1.0, True), Goal("b", 0.0, 1.0, True), Goal("c", None, 1.0, True)
    assert report.exit_code([met, unknown], check=True) == 0
    assert report.exit_code([met, missed], check=True) == 1
    assert report.exit_code([unknown], check=True) == 1
    assert report.exit_code([missed], check=False) == 0


def test_document_survives_json_with_nan_as_null(tmp_path: Path) -> None:
    rows = [dict.fromkeys(OVERHEAD_COLUMNS, 1.0) | {"lead_ms": math.nan}]
    path = tmp_path / "deep" / "out.json"
    report.write(path, report.document("overhead", {"batch": 64}, rows, [Goal("g", math.nan, 1.0, True, "ms")]))
    doc = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    check_document(doc)
    assert doc["rows"][0]["lead_ms"] is None and doc["goals"][0]["value"] is None


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.name)
def test_kept_results_have_the_form(path: Path) -> None:
    check_document(json.loads(path.read_text()))


def test_table_shows_every_column_and_verdict() -> None:
    console = Console(width=160, record=True)
    report.show("T", [{"a": 1, "b": 2.5}, {"a": 2, "c": math.nan}], [Goal("quick", 0.5, 0.4, False, "ms")], console)
    text = console.export_text()
    assert all(word in text for word in ("a", "b", "c", "2.500", "FAIL", "quick", "goal <= 0.400"))


def row(wait: float, window: int, **figures: float) -> dict[str, float]:
    return {"wait_ms": wait, "window": window, **figures}


def test_goals_of_overhead_look_at_their_cases_only() -> None:
    rows = [
        row(0, 4, steps_per_s=10, cpu_ms_per_step=9, ttft_p99_ms=1),
        row(0, 8, steps_per_s=1600, cpu_ms_per_step=0.5, ttft_p99_ms=9),
        row(5, 8, steps_per_s=195, cpu_ms_per_step=1, ttft_p99_ms=47),
    ]
    assert [g.met for g in overhead.goals(rows)] == [True, False, False, True]
    assert [g.met for g in overhead.goals(rows[:1])] == [None] * 4


def test_ratios_are_above_one_where_lockstep_is_better() -> None:
    rows = [
        {"engine": "lockstep", "what": "served", "source": "measured", "output_tok_per_s": 50.0, "ttft_p50_ms": 50.0},
        {
            "engine": "vllm",
            "what": "served",
            "source": "recorded",
            "output_tok_per_s": 40.0,
            "ttft_p50_ms": 60.0,
            "extra": 1.0,
        },
    ]
    [ratio] = cpu.ratios(rows)
    assert ratio["output_tok_per_s"] == 1.25 and ratio["ttft_p50_ms"] == 1.2 and ratio["source"] == "recorded"
    assert "extra" not in ratio


def test_metrics_page_is_summed_over_labels() -> None:
    page = '# HELP x y\nx_total{rank="0"} 1.5\nx_total{rank="1"} 2\nlead_sum 1e-3\n'
    assert parse_metrics(page) == {"x_total": 3.5, "lead_sum": 0.001}
