"""`cp`: a prompt that several ranks compute together."""

from __future__ import annotations

import argparse

from lockstep_bench import mirrored
from lockstep_bench.commands import add_output_flags, finish, numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument(
        "--ranks", type=numbers(int), default=[1, 2], metavar="N,...", help="a process and a thread each"
    )
    parser.add_argument("--tokens", type=int, default=8192, metavar="N")
    parser.add_argument("--shape", default="smollm2-135m", help="of a dense model")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="of its first ones")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="each figure is the best of so many")


def run(args: argparse.Namespace) -> int:
    settings = mirrored.Settings(args.shape, args.layers, args.tokens, args.repeats)
    rows = mirrored.run(settings, tuple(args.ranks))
    shown = {"shape": args.shape, "layers": args.layers, "tokens": args.tokens, "repeats": args.repeats}
    return finish(args, "cp", shown, rows, mirrored.goals(rows), "One prompt on several ranks of this CPU")
