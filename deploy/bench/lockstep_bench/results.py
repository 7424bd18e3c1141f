"""The rows of an offline run: written to the file one by one, shown beside peers, goals and limits at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep_bench import reference, report
from lockstep_common.errors import ConfigError

BENCHMARK = "throughput"
Row = dict[str, Any]


class Results:
    """`expected` names the cells (model, workload) that the run is for. Rows of a peer carry its name as `engine`."""

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        expected: Sequence[tuple[str, str]],
        log: Callable[[str], None],
    ) -> None:
        """ConfigError if `path` holds something else."""
        self.rows: list[Row] = []
        self.peer_rows: list[Row] = []
        self._card = ""
        self._path = path
        self._settings = dict(settings)
        self._expected = list(expected)
        self._log = log
        self._earlier = [] if path is None else earlier(path)

    def add(self, row: Row) -> None:
        """A row of ours, with the `device` it was measured on; it is in the file when this returns."""
        self._card = self._card or report.card(row["device"])
        metric = reference.metric_of(row)
        self._log(f"{row['model']} {row.get('work', reference.STARTUP)}: {row[metric]:,} {metric}")
        self.rows.append(row | self._circumstances())
        self._write()

    def add_peer(self, row: Row) -> None:
        self._log(
            f"{row['engine']}: {row['model']} {row.get('work', reference.STARTUP)}: {row[reference.metric_of(row)]:,}"
        )
        self.peer_rows.append(row | self._circumstances())
        self._write()

    def annotate(self, model: str, work: str, name: str, value: Any) -> None:
        """Adds a column to a row that was measured before."""
        for row in self.rows:
            if (row["model"], row.get("work")) == (model, work):
                row[name] = value
        self._log(f"{model} {work}: {name} {value}")
        self._write()

    @property
    def missing(self) -> list[str]:
        done = {(row["model"], row.get("work")) for row in self.rows}
        return [f"{model} {work}" for model, work in self._expected if (model, work) not in done]

    def show(self, console: Console) -> None:
        known = reference.load(self._card) if self._card else reference.NOTHING
        if self.rows:
            lines = reference.compare(self.rows, known, self.peer_rows)
            title = f"Offline throughput on {self._card}; ratio: above 1 lockstep is better"
            report.show(title, lines, reference.goals(self.rows, known), console)
            for note in reference.notes(self.rows, known):
                self._log(note)
            if known is reference.NOTHING:
                self._log(f"no peer's figures, goals or limits are recorded for {self._card}")
            if self._path is not None:
                self._log(f"written to {self._path}")
        if self.missing:
            self._log(f"not measured: {', '.join(self.missing)}")

    def exit_code(self, check: bool) -> int:
        """1 if a cell is missing, or with `check` a goal was missed."""
        if self.missing:
            return 1
        goals = reference.goals(self.rows, reference.load(self._card))
        return report.exit_code(goals, check) if goals else 0

    def _circumstances(self) -> Row:
        """What makes a row good for comparison when it lies beside rows of other runs."""
        return {
            "card": self._card,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commit": report.commit(),
            "torch": report.version("torch"),
            "triton": report.version("triton"),
        }

    def _write(self) -> None:
        if self._path is not None:
            rows = merged(self._earlier, [*self.rows, *self.peer_rows])
            goals = reference.goals([row for row in rows if "engine" not in row], reference.load(self._card))
            report.write(self._path, report.document(BENCHMARK, self._settings, rows, goals))


def merged(before: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Rows of earlier runs and of this one; a cell that was measured again has its new row, in the old one's place."""

    def cell(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("engine", "model", "work", "dp", "dtype", "card", "options"))

    found = {cell(row): row for row in before}
    found.update({cell(row): row for row in rows})
    return list(found.values())


def earlier(path: Path) -> list[Row]:
    """The rows that a file of this benchmark holds already; ConfigError if the file is something else."""
    if not path.exists():
        return []
    try:
        doc = json.loads(path.read_text())
        benchmark, rows = doc["benchmark"], doc["rows"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"--json {path}: this file is no result of a benchmark; give another one") from None
    if benchmark != BENCHMARK:
        raise ConfigError(f"--json {path}: this file holds figures of {benchmark}; give another one")
    return list(rows)
