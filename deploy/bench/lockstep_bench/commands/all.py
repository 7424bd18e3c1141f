"""`all`: overhead (the cases with goals), stack-ttft and cpu, one after the other; --json names a directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep_bench.__main__ import main
from lockstep_bench.commands import add_output_flags, log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument("--peer-venv", type=Path, metavar="DIR", help="as for cpu")


def run(args: argparse.Namespace) -> int:
    """Each part as a command of its own, so that its JSON and verdicts are the same; the worst exit code."""
    codes = []
    for name, flags in (
        ("overhead", ["--waits", "0,5", "--windows", "8"]),
        ("stack-ttft", []),
        ("cpu", ["--peer-venv", str(args.peer_venv)] if args.peer_venv else []),
    ):
        log(f"lockstep bench {name}")
        check = ["--check"] if args.check else []
        target = ["--json", str(args.json / f"{name}.json")] if args.json else []
        codes.append(main([name, *flags, *check, *target]))
    return max(codes)
