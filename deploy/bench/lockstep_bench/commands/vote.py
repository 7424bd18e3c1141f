"""`vote`: what a vote between scheduler shards takes, and what shards cost."""

from __future__ import annotations

import argparse
import asyncio

from lockstep_bench import vote
from lockstep_bench.commands import add_output_flags, finish, log
from lockstep_common.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument(
        "--cases",
        default="2x2x5,2x2x25,1x8x25,2x8x25",
        metavar="SxWxMS,...",
        help="schedulers and workers of each group, and the duration of a step",
    )
    parser.add_argument("--window", type=int, default=8, help="decode steps of a plan")
    parser.add_argument("--rows", type=int, default=8, help="choices that decode all the time on each worker")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the steady interval")


def run(args: argparse.Namespace) -> int:
    cases = [_case(word, args) for word in args.cases.split(",")]
    rows = asyncio.run(vote.run(cases, log))
    settings = {"window": args.window, "rows": args.rows, "seconds": args.seconds}
    return finish(args, "vote", settings, rows, vote.goals(rows), "The vote between scheduler shards")


def _case(word: str, args: argparse.Namespace) -> vote.Case:
    try:
        shards, workers, wait = word.split("x")
        return vote.Case(int(shards), int(workers), float(wait), args.window, args.rows, args.seconds)
    except ValueError:
        raise ConfigError(f"--cases: {word!r} is not SHARDSxWORKERSxMS, such as 2x8x25") from None
