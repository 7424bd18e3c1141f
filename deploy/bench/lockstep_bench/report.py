"""What a measurement leaves behind: a table with its goals for people, JSON with machine and versions for later."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SCHEMA = 1
_VERSIONS = ("lockstep-bench", "torch", "triton", "numpy", "grpcio", "protobuf")


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that was promised. Without a value (not measured) it is neither met nor missed."""

    name: str
    value: float | None
    limit: float
    at_least: bool
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None or math.isnan(self.value):
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def verdict(self) -> str:
        return {True: "PASS", False: "FAIL", None: "not measured"}[self.met]


def machine() -> dict[str, Any]:
    """What a figure depends on and cannot be read off it."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def card(device: str) -> str:
    """The name of what a worker on `device` ("cuda:0", "cpu") computes on. Asked from outside: no CUDA context is made here."""
    if not device.startswith("cuda"):
        return _cpu_model()
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "CUDA device"
    return answer.stdout.partition("\n")[0].strip() or "CUDA device"


def version(name: str) -> str:
    """Of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def document(
    benchmark: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], goals: Sequence[Goal]
) -> dict[str, Any]:
    """The JSON form of a run: schema, benchmark, date, commit, machine, versions, settings, rows, goals."""
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": {name: version(name) for name in _VERSIONS},
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
        "goals": [
            {"name": g.name, "value": g.value, "limit": g.limit, "at_least": g.at_least, "unit": g.unit, "met": g.met}
            for g in goals
        ],
    }


def write(path: Path, doc: Mapping[str, Any]) -> None:
    """NaN becomes null: the file is JSON for every reader."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(_finite(doc), indent=1) + "\n")
    draft.replace(path)  # a run that is cut while it writes leaves what was written before


def show(title: str, rows: Sequence[Mapping[str, Any]], goals: Sequence[Goal], console: Console | None = None) -> None:
    """A table of the rows (their keys are the columns), then one line a goal."""
    console = console or Console()
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right" if any(_number(row.get(column)) for row in rows) else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(table)
    for goal in goals:
        sign = ">=" if goal.at_least else "<="
        color = {True: "green", False: "red", None: "yellow"}[goal.met]
        value = "-" if goal.value is None else _cell(goal.value)
        console.print(
            f"[{color}]{goal.verdict:>12}[/]  {goal.name}: {value} {goal.unit} (goal {sign} {_cell(goal.limit)})"
        )


def exit_code(goals: Sequence[Goal], check: bool) -> int:
    """1 if `check` and a goal was missed, or none was measured at all; else 0."""
    if not check:
        return 0
    missed = any(g.met is False for g in goals) or not any(g.met is not None for g in goals)
    return int(missed)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
    return f"{value:,}" if _number(value) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """The commit of the checkout that holds this file, with "+" if it has changes; "unknown" outside of one.

    LOCKSTEP_BENCH_COMMIT names it where the files are only a copy of a checkout.
    """
    if told := os.environ.get("LOCKSTEP_BENCH_COMMIT"):
        return told
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "") if head.returncode == 0 else "unknown"
