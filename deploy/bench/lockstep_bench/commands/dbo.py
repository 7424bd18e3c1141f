"""`dbo`: what dual-batch overlap hides of a slow link."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from lockstep_bench import overlap
from lockstep_bench.commands import add_output_flags, finish


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument("--delay-ms", type=float, default=5.0, metavar="MS", help="of the artificial link, an exchange")
    parser.add_argument("--attention-ms", type=float, default=12.0, metavar="MS", help="that a layer's takes")
    parser.add_argument("--experts-ms", type=float, default=20.0, metavar="MS", help="that a layer's take")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="a process and a thread each")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="each figure is the best of so many")


def run(args: argparse.Namespace) -> int:
    settings = overlap.Settings(
        args.delay_ms, args.attention_ms, args.experts_ms, ranks=args.ranks, layers=args.layers, repeats=args.repeats
    )
    rows = overlap.run(settings)
    return finish(args, "dbo", asdict(settings), rows, overlap.goals(rows), "Passes as one and as two halves, rank 0")
