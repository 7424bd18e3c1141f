"""`run`: requests through the step loop with a cost model; with `--sweep`, once for each value or pair of values."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep_bench import plots
from lockstep_bench.commands import add_output_flags, console, finish, log, numbers
from lockstep_bench.sim import costs, figures, traces
from lockstep_bench.sim.simulation import Case, Engine, Host, Simulation, settings, simulate
from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind

SWEPT = {  # name: the flag that it replaces
    "a": "prefill_attempt_interval",
    "b": "prefill_any_attempt_interval",
    "vote-interval-ms": "vote_interval_ms",
    "window": "max_window",
    "max-tokens": "max_num_batched_tokens",
    "rate": "rate",
    "concurrency": "concurrency",
    "span": "attention_span",
    "dp": "dp",
}
NOT_NEGATIVE = (
    "dp", "cp", "link_gb_s", "rate", "concurrency", "request_max_tokens", "prefixes", "seconds", "warm_up", "rtt_ms", "jitter_ms", "seed", "max_num_seqs",
    "kv_tokens", "block_size", "max_model_len", "max_num_batched_tokens", "vote_interval_ms", "prefill_attempt_interval", "prefill_any_attempt_interval",
    "max_prefill_tokens_per_point", "attention_span",
)  # fmt: skip
AT_LEAST_ONE = ("requests", "shard_ranks", "max_window", "max_waiting")
BRIEF = (
    "in_tok_s", "out_tok_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms", "queue_p99_ms", "prefill_any", "prefill_all", "decode_plans",
    "placeholder_steps_share", "placeholder_passes_share", "kv_usage_max", "preemptions",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    add = parser.add_argument
    add("--costs", default="h200", metavar="NAME|FILE", help=f"cost model: {', '.join(costs.names())} (default h200)")
    add("--model", default="", metavar="NAME|DIR", help="shape or model directory, if the cost model names none")
    add("--dp", type=int, default=0, help="DP ranks (default: the cost model's)")
    add("--cp", type=int, default=0, help="context parallel ranks of each")
    add("--imbalance", type=float, default=0.0, help="heaviest rank's expert load over the mean")
    add("--link-gb-s", type=float, default=0.0, help="dispatch and combine: GB/s of a GPU in one direction")
    add("--trace", type=Path, metavar="FILE", help="requests as JSONL instead of drawn ones")
    add("--requests", type=int, default=1000, help="how many are drawn")
    add("--rate", type=float, default=0.0, help="requests/s at Poisson times (0: all at once)")
    add("--concurrency", type=int, default=0, help="a closed loop of so many requests; they start in mid-answer")
    add(
        "--prompt",
        default="",
        metavar="LENGTHS",
        help="TOKENS, uniform:MEAN:SPREAD or lognormal:MEAN:SIGMA (default 512)",
    )
    add("--output", default="", metavar="LENGTHS", help="the same of answers (default 128)")
    add("--request-max-tokens", type=int, default=0, help="max_tokens of every request (0: its answer's length)")
    add("--prefix-share", type=float, default=-1.0, help="share of each prompt that is one of --prefixes common ones")
    add("--prefixes", type=int, default=0)
    add("--seconds", type=float, default=0.0, help="simulated time (0: until all requests have ended)")
    add("--warm-up", type=float, default=0.0, metavar="S", help="simulated seconds that do not count")
    add("--rtt-ms", type=float, default=0.5, help="round trip of a message between scheduler and worker")
    add("--jitter-ms", type=float, default=0.0, help="mean of an exponential delay of each message")
    add("--shard-ranks", type=int, default=32, help="ranks that one scheduler process drives")
    add("--seed", type=int, default=0)
    add("--max-num-seqs", type=int, default=0, help="rows of a rank")
    add("--kv-tokens", type=int, default=0, help="KV cache of a rank")
    add("--block-size", type=int, default=0)
    add("--max-model-len", type=int, default=0)
    add("--max-num-batched-tokens", type=int, default=0)
    add("--max-window", type=int, default=16)
    add("--max-waiting", type=int, default=1 << 30, help="beyond, requests are refused")
    add("--vote-interval-ms", type=float, default=0.0)
    add("--prefill-attempt-interval", type=int, default=0, help="A, in steps")
    add("--prefill-any-attempt-interval", type=int, default=0, help="B, in steps")
    add("--max-prefill-tokens-per-point", type=int, default=0)
    add("--attention-span", type=int, default=0, help="as the scheduler's (default: its default)")
    add("--no-prefix-caching", action="store_true")
    add(
        "--sweep", action="append", default=[], metavar="NAME=V,...", help=f"{', '.join(SWEPT)}; two of them: all pairs"
    )
    add("--plot", type=Path, metavar="FILE", help="distributions of latencies (of a sweep: of its last run)")


def run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        plots.check()
    swept = [_swept(word) for word in args.sweep]
    rows, last = [], None
    for values in itertools.product(*(choices for _, choices in swept)):
        changed = argparse.Namespace(**vars(args))
        chosen = dict(zip((name for name, _ in swept), values, strict=True))
        for name, value in chosen.items():
            setattr(changed, SWEPT[name], value)
        if chosen:
            log(", ".join(f"{name} {value:g}" for name, value in chosen.items()))
        last = simulate(*prepared(changed), progress=log)
        if not figures.begun(last).any():
            raise ConfigError(
                f"no request has begun between --warm-up {args.warm_up:g} s and the end at {last.end:.3g} s"
            )
        rows.append(chosen | figures.row(last))
    assert last is not None
    if args.plot is not None:
        plots.curves(args.plot, figures.latencies(last), f"{args.costs}, simulated")
        log(f"drawn in {args.plot}")
    shown = _brief(rows, swept) if swept else _upright(rows[0])
    if not swept:
        show_terms(last)
    kept = {name: value for name, value in vars(args).items() if name not in ("json", "check", "plot")}
    title = f"{args.costs}: the real step loop in simulated time"
    return finish(
        args, "sim", {k: str(v) if isinstance(v, Path) else v for k, v in kept.items()}, rows, [], title, shown
    )


def prepared(args: argparse.Namespace) -> tuple[Case, Sequence[traces.Asked]]:
    """The case and the requests that the flags ask for; what they leave open is the cost model's. ConfigError names a flag that
    cannot be."""
    _check(args)
    machine = costs.load(args.costs)
    layout = {name: value for name in ("dp", "cp", "imbalance") if (value := getattr(args, name))}
    model = machine.cost_model(args.model, **layout)
    if args.link_gb_s:
        model = replace(model, rates=replace(model.rates, link_bandwidth=args.link_gb_s * 1e9))
    base = machine.engine

    def size(value: int, name: str, default: int) -> int:
        return value or int(base.get(name, default))

    engine = Engine(
        dp=model.layout.dp,
        max_rows=size(args.max_num_seqs, "max_rows", 64),
        kv_tokens=size(args.kv_tokens, "kv_tokens", 200_000),
        block_size=size(args.block_size, "block_size", 64) * model.layout.cp,
        max_model_len=size(args.max_model_len, "max_model_len", 32_768),
    )
    loop = settings(
        {
            "max_batched_tokens": size(args.max_num_batched_tokens, "max_batched_tokens", 2048),
            "max_window": args.max_window,
            "max_waiting": args.max_waiting,
            "vote_interval": args.vote_interval_ms / 1000,
            "a": args.prefill_attempt_interval,
            "b": args.prefill_any_attempt_interval,
            "max_prefill_tokens_per_point": args.max_prefill_tokens_per_point,
            **({"attention_span": args.attention_span} if args.attention_span else {}),
            "prefix_caching": not args.no_prefix_caching and base.get("prefix_caching", True),
        }
    )
    concurrency = args.concurrency or (
        0 if args.rate or args.trace else int(machine.load.get("concurrency_a_rank", 0)) * engine.dp
    )
    case = Case(
        engine=engine,
        settings=loop,
        costs=model,
        host=replace(Host(), shard_ranks=args.shard_ranks),
        rtt_s=args.rtt_ms / 1000,
        jitter_s=args.jitter_ms / 1000,
        concurrency=concurrency,
        seconds=args.seconds,
        warm_up=args.warm_up,
        seed=args.seed,
    )
    return case, asked(args, machine.load, engine, concurrency)


def asked(
    args: argparse.Namespace, load: Mapping[str, Any], engine: Engine, concurrency: int
) -> Sequence[traces.Asked]:
    if args.trace is not None:
        return traces.read(args.trace)
    return traces.draw(
        traces.Drawn(
            count=args.requests,
            prompt=traces.Lengths.parse(args.prompt or load.get("prompt", "512")),
            output=traces.Lengths.parse(args.output or load.get("output", "128")),
            rate=args.rate,
            prefix_share=args.prefix_share if args.prefix_share >= 0 else load.get("prefix_share", 0.0),
            prefixes=args.prefixes or load.get("prefixes", 1),
            max_tokens=args.request_max_tokens,
            staggered=concurrency,
            seed=args.seed,
            longest=min(engine.max_model_len, engine.kv_tokens),
        )
    )


def show_terms(simulation: Simulation) -> None:
    """Where a step's time goes."""
    for kind in (Kind.PREFILL, Kind.DECODE):
        if simulation.workers.totals.steps[kind]:
            parts = [f"{name} {ms:.2f}" for name, ms in figures.terms(simulation, kind).items() if abs(ms) >= 0.005]
            console.print(f"ms of a mean {kind.name.lower()} step: {', '.join(parts)}", highlight=False)


def _check(args: argparse.Namespace) -> None:
    for name, least in [*((name, 0) for name in NOT_NEGATIVE), *((name, 1) for name in AT_LEAST_ONE)]:
        if getattr(args, name) < least:
            raise ConfigError(f"{_flag(name)} must be at least {least}, not {getattr(args, name):g}")
    if args.prefix_share > 1:
        raise ConfigError("--prefix-share must be at most 1")
    if args.imbalance and args.imbalance < 1:
        raise ConfigError("--imbalance must be at least 1: the heaviest rank's load is never below the mean")
    a, b = args.prefill_attempt_interval, args.prefill_any_attempt_interval
    if b and (not a or b <= a or b % a):
        raise ConfigError("--prefill-any-attempt-interval must be a multiple of --prefill-attempt-interval and greater")
    if 0 < args.seconds <= args.warm_up:
        raise ConfigError("--warm-up must be less than --seconds")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _swept(word: str) -> tuple[str, list[float]]:
    name, _, values = word.partition("=")
    if name not in SWEPT:
        raise ConfigError(f"--sweep {word!r}: give NAME=V,... with NAME one of {', '.join(SWEPT)}")
    kind = float if name in ("vote-interval-ms", "rate") else int
    try:
        found = numbers(kind)(values)
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"--sweep {word!r}: give NAME=V,... with numbers")
    return name, found


def _brief(rows: Sequence[Mapping[str, Any]], swept: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    names = [name for name, _ in swept]
    return [{key: row[key] for key in (*names, *BRIEF)} for row in rows]


def _upright(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One run as a table of two columns."""
    return [{"figure": name, "value": value} for name, value in row.items()]
