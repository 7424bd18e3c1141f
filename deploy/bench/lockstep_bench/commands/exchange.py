"""`exchange`: tokens to experts on other ranks and back."""

from __future__ import annotations

import argparse

import torch

from lockstep_bench import exchange, exchange_speed
from lockstep_bench.commands import add_output_flags, finish, numbers
from lockstep_common.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    add = parser.add_argument
    add("--rows", type=numbers(int), default=[1, 256], metavar="N,...", help="tokens of each rank; bytes are counted")
    add(
        "--tokens",
        type=numbers(int),
        default=[],
        metavar="N,...",
        help="instead: tokens of every rank in captured steps, by backend",
    )
    add("--prefill", type=numbers(int), default=[], metavar="N,...", help="and in passes with counts")
    add("--backends", default="all_to_all,symmetric", metavar="NAME,...", help="with --tokens or --prefill")
    add("--ranks", type=int, default=2, metavar="N", help="with --tokens or --prefill")
    add("--hidden", type=int, default=2048, metavar="D")
    add("--experts", type=int, default=128, metavar="E")
    add("--top-k", type=int, default=8, metavar="K")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: rank i on GPU i, through NCCL")
    add("--repeats", type=int, default=20, metavar="N")


def run(args: argparse.Namespace) -> int:
    kept = ("hidden", "experts", "top_k", "dtype", "device", "repeats")
    shown = {name: getattr(args, name) for name in kept}
    common = (args.hidden, args.experts, args.top_k, getattr(torch, args.dtype), args.device, args.repeats)
    if not args.tokens and not args.prefill:
        rows = exchange.run(exchange.Settings(tuple(args.rows), *common))
        return finish(
            args, "exchange", shown | {"rows": args.rows}, rows, [], "Tokens to experts and back, an exchange"
        )
    if args.experts % args.ranks or args.experts % args.top_k or args.top_k % args.ranks:
        raise ConfigError("--experts must be a multiple of --ranks and --top-k, and --top-k of --ranks")
    backends = tuple(args.backends.split(","))
    settings = exchange_speed.Settings(tuple(args.tokens), tuple(args.prefill), backends, args.ranks, *common)
    rows = exchange_speed.run(settings)
    shown |= {name: getattr(args, name) for name in ("tokens", "prefill", "backends", "ranks")}
    return finish(args, "exchange", shown, rows, exchange_speed.goals(rows), "Tokens to experts and back, by backend")
