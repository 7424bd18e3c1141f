"""What others reach and what was promised, and how our rows compare: a recorded peer, goals and limits, one file a card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_bench.report import Goal

Row = Mapping[str, Any]
Cell = tuple[str, str, int]  # model, workload, data-parallel ranks

STARTUP = "startup"
_UNITS = {"ms_per_tok": "ms/token", "out_tok_s": "out tok/s", "in_tok_s": "in tok/s", "startup_s": "s"}
_METRICS = {
    "decode_b1": "ms_per_tok",
    "decode_b64": "out_tok_s",
    "mixed_256": "out_tok_s",
    "mixed_512": "out_tok_s",
    "prefill_4k": "in_tok_s",
    STARTUP: "startup_s",
}


@dataclass(frozen=True, slots=True)
class Reference:
    """Figures of one card. `peer` says who, which version and when."""

    card: str
    peer: str
    rows: Sequence[Row]
    cells: Sequence[Row]


NOTHING = Reference("", "", (), ())


def load(card: str) -> Reference:
    """The figures recorded for a card; `NOTHING` for a card that nobody has recorded."""
    for path in sorted(Path(__file__).parent.glob("*.json")):
        data = json.loads(path.read_text())
        if data["card"] in card:
            peer = data["peer"]
            return Reference(
                data["card"], f"{peer['name']} {peer['version']}, {peer['date']}", peer["rows"], data["cells"]
            )
    return NOTHING


def metric_of(row: Row) -> str:
    """The column that a row is about: its cell's, for a workload of somebody's own what it has."""
    work = row.get("work", STARTUP)
    return _METRICS.get(work) or ("ms_per_tok" if "ms_per_tok" in row else "out_tok_s")


def compare(rows: Sequence[Row], reference: Reference, measured: Sequence[Row] = ()) -> list[dict[str, Any]]:
    """A line a row: ours, the peer (measured beside us, else recorded), ratio (above 1 we are better), goal, limit, share."""
    recorded = {_cell(row): row for row in reference.rows}
    beside = {_cell(row): row for row in measured}
    aims = {_cell(row): row for row in reference.cells}
    lines = []
    for row in rows:
        metric = metric_of(row)
        other = beside.get(_cell(row)) or recorded.get(_cell(row), {})
        aim = aims.get(_cell(row), {})
        ours, theirs, limit = row[metric], other.get(metric), aim.get("limit")
        lines.append(
            {
                "model": _name(row),
                "work": row.get("work", STARTUP),
                "unit": _UNITS[metric],
                "lockstep": ours,
                "peer": theirs,
                "ratio": _better(metric, ours, theirs),
                "goal": aim.get("goal"),
                "limit": limit,
                "share of limit": _better(metric, ours, limit),
                "against": other.get("engine", reference.peer) if theirs is not None else "",
            }
        )
    return lines


def goals(rows: Sequence[Row], reference: Reference) -> list[Goal]:
    """The goals of the cells that were run."""
    aims = {_cell(row): row["goal"] for row in reference.cells}
    found = []
    for row in rows:
        metric = metric_of(row)
        if (aim := aims.get(_cell(row))) is not None:
            higher = _higher_is_better(metric)
            found.append(Goal(f"{_name(row)} {row.get('work', STARTUP)}", row[metric], aim, higher, _UNITS[metric]))
    return found


def notes(rows: Sequence[Row], reference: Reference) -> list[str]:
    """What must be said beside a ratio."""
    remarks = {_cell(row): row["note"] for row in reference.cells if "note" in row}
    return [f"{_name(row)} {row['work']}: {remarks[_cell(row)]}" for row in rows if _cell(row) in remarks]


def _better(metric: str, ours: float, other: float | None) -> float | None:
    """How many times better ours is."""
    if not other or not ours:
        return None
    return ours / other if _higher_is_better(metric) else other / ours


def _higher_is_better(metric: str) -> bool:
    return metric.endswith("_tok_s")


def _cell(row: Row) -> Cell:
    return row["model"], row.get("work", STARTUP), row.get("dp", 1)


def _name(row: Row) -> str:
    name = f"{row['model']} x{row['dp']}" if row.get("dp", 1) > 1 else str(row["model"])
    return f"{name} {row['options']}" if row.get("options") else name
