"""`lockstep profile`: records steps of a running worker in a trace that Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import os
from collections.abc import Sequence
from pathlib import Path

from lockstep_cli.client import record_profile
from lockstep_common.errors import ConfigError
from lockstep_common.rpc import Security


def run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.steps < 1:
        raise ConfigError("--steps must be at least 1")
    security = Security(args.tls_cert, args.tls_key, args.tls_ca, os.environ.get("LOCKSTEP_WORKER_INTERNAL_TOKEN", ""))
    trace = asyncio.run(record_profile(args.worker, args.steps, timeout_s=args.timeout, security=security))
    data = trace.data if args.output.suffix == ".gz" else gzip.decompress(trace.data)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_bytes(data)
    print(f"{trace.steps} steps, {len(data) / 1e6:.1f} MB: open {args.output} at https://ui.perfetto.dev")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep profile",
        description="Records the next steps of a running worker: kernels and operations by torch's profiler, and the engine's "
        "own timeline (a plan's wait, its application, launches, steps, outcomes). Steps are slower meanwhile.",
        epilog="A worker that demands a token: set LOCKSTEP_WORKER_INTERNAL_TOKEN, as for the worker itself.",
        allow_abbrev=False,
    )
    parser.add_argument("--worker", default="127.0.0.1:7001", metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("trace.json.gz"),
        metavar="FILE",
        help=".json or .json.gz; default: %(default)s",
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="wait so long for steps to run")
    parser.add_argument("--tls-cert", default="", metavar="FILE")
    parser.add_argument("--tls-key", default="", metavar="FILE")
    parser.add_argument("--tls-ca", default="", metavar="FILE")
    return parser
