"""`cp`: a prompt that several ranks compute together."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch

from lockstep_bench import mirrored, mirrored_gpu
from lockstep_bench.commands import add_output_flags, finish, numbers
from lockstep_common.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    add = parser.add_argument
    add("--ranks", type=numbers(int), default=[1, 2], metavar="N,...", help="a process each")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: rank i on GPU i, through NCCL")
    add("--tokens", type=numbers(int), default=[], metavar="N,...", help="of a prompt (8192; on GPUs 32768,131072)")
    add("--shape", default="", help="of a model (smollm2-135m; on GPUs llama-3.1-8b)")
    add("--layers", type=int, default=0, metavar="N", help="of its first ones (2; on GPUs 4)")
    add("--repeats", type=int, default=3, metavar="N", help="each figure is the best of so many")


def run(args: argparse.Namespace) -> int:
    if args.device == "cuda":
        return _on_gpus(args)
    tokens = args.tokens or [8192]
    if len(tokens) > 1:
        raise ConfigError("--tokens: one prompt at a time on a CPU")
    settings = mirrored.Settings(args.shape or "smollm2-135m", args.layers or 2, tokens[0], args.repeats)
    rows = mirrored.run(settings, tuple(args.ranks))
    goals = mirrored.goals(rows)
    return finish(args, "cp", asdict(settings), rows, goals, "One prompt on several ranks of this CPU")


def _on_gpus(args: argparse.Namespace) -> int:
    settings = mirrored_gpu.Settings(
        args.shape or "llama-3.1-8b",
        args.layers or 4,
        tuple(args.tokens or (32768, 131072)),
        torch.bfloat16,
        "cuda",
        args.repeats,
    )
    rows = mirrored_gpu.run(settings, tuple(args.ranks))
    shown = {
        "shape": settings.shape,
        "layers": settings.layers,
        "tokens": list(settings.tokens),
        "repeats": args.repeats,
    }
    return finish(args, "cp", shown | {"device": "cuda"}, rows, mirrored_gpu.goals(rows), "One prompt on several GPUs")
