"""`pictures`: how a group works, drawn from what the code does."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep_bench import pictures
from lockstep_bench.commands import log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="where the files go (docs)")


def run(args: argparse.Namespace) -> int:
    for file in pictures.write(args.out):
        log(f"{file}: {file.stat().st_size / 1000:.0f} kB")
    return 0
