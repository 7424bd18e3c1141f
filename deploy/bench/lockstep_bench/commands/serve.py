"""`serve`: load on a running server over REST or gRPC; definitions as `vllm bench serve`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from lockstep_bench import plots, serve
from lockstep_bench.backends import ADDRESSES
from lockstep_bench.commands import add_output_flags, finish, log, numbers
from lockstep_bench.stats import parse_objectives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument(
        "--backend", choices=tuple(ADDRESSES), default="rest",
        help="rest: any OpenAI-compatible server; grpc: a router's gRPC door; scheduler: a scheduler's own door",
    )  # fmt: skip
    defaults = ", ".join(f"{address} for {backend}" for backend, address in ADDRESSES.items())
    parser.add_argument("--base-url", default="", metavar="ADDRESS", help=f"default: {defaults}")
    parser.add_argument("--model", default="", help="default: the first one that the server names")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument(
        "--max-concurrency", "--concurrency", type=int, help="closed loop: requests in flight (default 1)"
    )
    parser.add_argument("--request-rate", type=float, default=0.0, help="open loop: Poisson arrivals a second")
    parser.add_argument("--random-input-len", type=int, default=128)
    parser.add_argument("--random-output-len", type=int, default=128)
    parser.add_argument(
        "--random-vocab", type=numbers(int), default=[100, 32_000], metavar="LOW,HIGH", help="ids of prompts"
    )
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-warmups", type=int, default=1)
    parser.add_argument("--goodput", nargs="*", default=[], metavar="NAME:MS", help="ttft:200 tpot:50 e2el:5000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the distributions (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    work = serve.Workload(
        url=args.base_url or ADDRESSES[args.backend],
        backend=args.backend,
        model=args.model,
        num_prompts=args.num_prompts,
        concurrency=args.max_concurrency if args.max_concurrency is not None else int(not args.request_rate),
        request_rate=args.request_rate,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        ignore_eos=args.ignore_eos,
        vocab=(args.random_vocab[0], args.random_vocab[1]),
        seed=args.seed,
        api_key=args.api_key,
        warmups=args.num_warmups,
        temperature=args.temperature,
    )
    limits = parse_objectives(args.goodput)
    if args.plot is not None:
        plots.check()
    outcome = asyncio.run(serve.run(work))
    row = serve.summary(work, outcome, limits)
    for message in outcome.errors[:3]:
        log(f"failed request: {message}")
    if args.plot is not None:
        plots.latencies(args.plot, outcome.served, f"{work.backend} {work.url}")
        log(f"drawn in {args.plot}")
    settings = {
        "backend": work.backend,
        "base_url": work.url,
        "input_len": work.input_len,
        "output_len": work.output_len,
        "seed": work.seed,
    }
    code = finish(args, "serve", settings, [row], [], "Served", shown=[serve.brief(row)])
    return code or int(bool(outcome.errors))
