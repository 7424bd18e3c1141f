"""The commands of `lockstep bench`, one module each, imported when it is run: a machine needs only what its command uses.

A module has `add_arguments(parser)` and `run(args) -> int` (the exit code). This file holds what they share.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep_bench import report
from lockstep_bench.report import Goal

console = Console(width=None if sys.stdout.isatty() else 200)
errors = Console(stderr=True)


def log(line: str) -> None:
    errors.print(line, markup=False, highlight=False, soft_wrap=True)


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, with machine and versions")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")


def finish(
    args: argparse.Namespace,
    name: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    goals: Sequence[Goal],
    title: str,
    shown: Sequence[Mapping[str, Any]] | None = None,
) -> int:
    """Shows the table and the goals, writes the file that --json names; the exit code."""
    report.show(title, shown or rows, goals, console)
    if args.json is not None:
        report.write(args.json, report.document(name, settings, rows, goals))
        log(f"written to {args.json}")
    return report.exit_code(goals, args.check) if goals else 0


def numbers(kind: type[int] | type[float]) -> Callable[[str], list[Any]]:
    """An argument type: a comma-separated list."""

    def parse(text: str) -> list[Any]:
        return [kind(word) for word in text.split(",") if word]

    parse.__name__ = f"list of {kind.__name__}s"
    return parse
