"""`stack-ttft`: TTFT through router and scheduler with a worker that computes nothing."""

from __future__ import annotations

import argparse
import asyncio

from lockstep_bench import stack
from lockstep_bench.commands import add_output_flags, finish


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--random-input-len", type=int, default=32)
    parser.add_argument("--random-output-len", type=int, default=4)


def run(args: argparse.Namespace) -> int:
    rows = asyncio.run(stack.ttft(args.requests, args.random_input_len, args.random_output_len))
    return finish(args, "stack-ttft", {}, rows, stack.goals(rows), "The stack's share of the time to first token")
