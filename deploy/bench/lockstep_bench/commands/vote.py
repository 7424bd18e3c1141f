"""`vote`: what a vote between scheduler shards takes, and what shards cost."""

from __future__ import annotations

import argparse
import asyncio

from lockstep_bench import vote
from lockstep_bench.commands import add_output_flags, finish, log, numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument(
        "--cases", default="2x2,1x8,2x8", metavar="SHARDSxWORKERS,...", help="schedulers and workers of each group"
    )
    parser.add_argument("--waits", type=numbers(float), default=[5.0], metavar="MS,...", help="duration of a step")
    parser.add_argument("--window", type=int, default=8, help="decode steps of a plan")
    parser.add_argument("--rows", type=int, default=8, help="choices that decode all the time on each worker")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the steady interval")


def run(args: argparse.Namespace) -> int:
    cases = [
        vote.Case(int(shards), int(workers), wait, args.window, args.rows, args.seconds)
        for wait in args.waits
        for shards, _, workers in (word.partition("x") for word in args.cases.split(","))
    ]
    rows = asyncio.run(vote.run(cases, log))
    settings = {"window": args.window, "rows": args.rows, "seconds": args.seconds}
    return finish(args, "vote", settings, rows, vote.goals(rows), "The vote between scheduler shards")
