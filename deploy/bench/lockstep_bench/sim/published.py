"""`published`: DeepSeek-V3's prefill and decode units on H800 as their operator described them, simulated, beside the published figures.

The published figures are means of a day in service: 73.7 thousand input tokens/s a node with 56.3 % of them found in a cache,
14.8 thousand output tokens/s a node at 20 to 22 tokens/s for a user. The prefill unit is simulated with more work than it can do
(a closed loop), and at half the published load for its latency; the decode unit with the published number of rows.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from lockstep_bench.commands import add_output_flags, console, finish, log
from lockstep_bench.report import Goal
from lockstep_bench.sim import figures
from lockstep_bench.sim import run as single
from lockstep_bench.sim.simulation import simulate
from lockstep_common.steps import Kind

PREFILL, DECODE = "h800-deepseek-v3-prefill-ep32", "h800-deepseek-v3-decode-ep144"
PUBLISHED = {PREFILL: 73_700.0, DECODE: 14_800.0}
WITHIN = 1.5
_NODES, _PROMPT = 4, 3953
_FULL = ("--concurrency", "1024", "--requests", "40000")
_HALF = 0.5 * PUBLISHED[PREFILL] * _NODES / _PROMPT
_SHOWN = (
    "case", "tok_s_node", "over_published", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "step_ms", "slowest_over_mean", "busy_share", "cached_share",
    "rows_mean", "placeholder_passes_share",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    costs: str
    flags: tuple[str, ...]
    counts: bool = False  # for the goal


_RUNS = (
    _Run("prefill, full", PREFILL, _FULL, True),
    _Run("prefill, full, prompts alike", PREFILL, (*_FULL, "--prompt", str(_PROMPT))),
    _Run("prefill, full, passes of 4096", PREFILL, (*_FULL, "--max-num-batched-tokens", "4096")),
    _Run("prefill, half the load", PREFILL, ("--rate", f"{_HALF:.2f}", "--requests", "40000")),
    _Run("decode, 88 rows", DECODE, ("--requests", "20000"), True),
    _Run("decode, vote interval 200 ms", DECODE, ("--requests", "20000", "--vote-interval-ms", "200")),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument(
        "--prefill-seconds", type=float, default=180.0, help="simulated, a third of it before it counts"
    )
    parser.add_argument("--decode-seconds", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    rows, goals = [], []
    for one in _RUNS:
        log(one.name)
        seconds = args.prefill_seconds if one.costs == PREFILL else args.decode_seconds
        row = _row(one, seconds, args.seed)
        rows.append(row)
        parts = sorted(row["terms_ms"].items(), key=lambda item: -abs(item[1]))
        text = ", ".join(f"{name} {ms:.1f}" for name, ms in parts if abs(ms) >= 0.05)
        console.print(f"{one.name}, ms of a mean step: {text}", highlight=False)
        if one.counts:
            goals += _within(f"{one.name}: tok/s a node", row["tok_s_node"], PUBLISHED[one.costs])
    shown = [{key: row[key] for key in _SHOWN} for row in rows]
    settings = {"seed": args.seed, "published": PUBLISHED, "runs": {one.name: " ".join(one.flags) for one in _RUNS}}
    return finish(args, "sim-published", settings, rows, goals, "DeepSeek-V3 on H800, simulated", shown)


def _row(one: _Run, seconds: float, seed: int) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    single.add_arguments(parser)
    common = ("--costs", one.costs, "--seconds", str(seconds), "--warm-up", str(seconds / 3), "--seed", str(seed))
    simulation = simulate(*single.prepared(parser.parse_args([*common, *one.flags])), progress=log)
    found = figures.row(simulation)
    prefill = one.costs == PREFILL
    terms = figures.terms(simulation, Kind.PREFILL if prefill else Kind.DECODE)
    local = sum(terms[name] for name in ("dense", "attention", "activations", "rows"))
    tokens = found["in_tok_s_node" if prefill else "out_tok_s_node"]
    return {
        "case": one.name,
        "tok_s_node": tokens,
        "over_published": tokens / PUBLISHED[one.costs],
        "step_ms": found["prefill_pass_ms" if prefill else "decode_step_ms"],
        "slowest_over_mean": 1 + terms["skew"] / local,
        "terms_ms": terms,
        **found,
    }


def _within(name: str, value: float, published: float) -> list[Goal]:
    return [
        Goal(f"{name}, published {published:,.0f}", value, published / WITHIN, True),
        Goal(f"{name}, published {published:,.0f}", value, published * WITHIN, False),
    ]
