"""`exchange`: tokens to experts on other ranks and back."""

from __future__ import annotations

import argparse

import torch

from lockstep_bench import exchange
from lockstep_bench.commands import add_output_flags, finish, numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument("--rows", type=numbers(int), default=[1, 256], metavar="N,...", help="tokens of each rank")
    parser.add_argument("--hidden", type=int, default=2048, metavar="D")
    parser.add_argument("--experts", type=int, default=128, metavar="E")
    parser.add_argument("--top-k", type=int, default=8, metavar="K")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: rank i on GPU i, through NCCL")
    parser.add_argument("--repeats", type=int, default=20, metavar="N")


def run(args: argparse.Namespace) -> int:
    dtype = getattr(torch, args.dtype)
    settings = exchange.Settings(
        tuple(args.rows), args.hidden, args.experts, args.top_k, dtype, args.device, args.repeats
    )
    rows = exchange.run(settings)
    shown = {
        "rows": args.rows,
        "hidden": args.hidden,
        "experts": args.experts,
        "top_k": args.top_k,
        "dtype": args.dtype,
    }
    return finish(
        args, "exchange", shown | {"device": args.device}, rows, [], "Tokens to experts and back, an exchange"
    )
