"""`overhead`: steps/s, CPU a step and TTFT with a worker that only waits."""

from __future__ import annotations

import argparse
import asyncio

from lockstep_bench import overhead
from lockstep_bench.commands import add_output_flags, finish, log, numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument(
        "--waits", type=numbers(float), default=[0.0, 0.7, 5.0, 25.0], metavar="MS,...", help="duration of a step"
    )
    parser.add_argument(
        "--windows", type=numbers(int), default=[1, 4, 8, 16], metavar="K,...", help="decode steps of a plan"
    )
    parser.add_argument("--batch", type=int, default=64, help="choices that decode all the time")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of the steady interval")
    parser.add_argument("--arrivals", type=int, default=40, help="lone requests for TTFT")


def run(args: argparse.Namespace) -> int:
    cases = [
        overhead.Case(wait, window, args.batch, args.seconds, args.arrivals)
        for wait in args.waits
        for window in args.windows
    ]
    rows = asyncio.run(overhead.run(cases, log))
    settings = {"batch": args.batch, "seconds": args.seconds, "arrivals": args.arrivals}
    return finish(args, "overhead", settings, rows, overhead.goals(rows), "The cost of a networked scheduler")
