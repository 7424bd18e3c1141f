"""`scale`: what the step loop itself costs, in CPU microseconds, as the group grows; and whether a shard keeps up.

A steady group: each rank decodes as many rows as it has, steps of 20 ms, a request that ends is followed by another one. What
counts are the loop's own calls (composing plans, booking outcomes, queueing), without messages and without the simulator.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from lockstep_bench import shapes
from lockstep_bench.commands import add_output_flags, finish, log
from lockstep_bench.report import Goal
from lockstep_bench.sim.costs import CostModel, Layout, instant
from lockstep_bench.sim.shape import shape
from lockstep_bench.sim.simulation import Case, Engine, Host, HostTime, Simulation, settings
from lockstep_bench.sim.traces import Drawn, Lengths, draw
from lockstep_common import collector
from lockstep_common.errors import ConfigError

STEP_S = 0.020  # 50 steps a second
SHARD_RANKS, SHARD_ROWS = 32, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument(
        "--groups", default="16x64,32x64,144x64,16x4,144x4,1024x4", metavar="RANKSxROWS,...", help="what is measured"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="simulated, after a warm-up until all rows are in use"
    )
    parser.add_argument("--max-window", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=256, help="mean tokens of an answer")


def run(args: argparse.Namespace) -> int:
    rows = []
    for word in args.groups.split(","):
        try:
            ranks, held = (int(part) for part in word.split("x"))
            if min(ranks, held) < 1:
                raise ValueError(word)
        except ValueError:
            raise ConfigError(f"--groups {word!r}: give RANKSxROWS,...") from None
        log(f"{ranks} ranks x {held} rows")
        rows.append(measured(ranks, held, args.seconds, args.max_window, args.prompt, args.output))
    found = [r for r in rows if (r["ranks"], r["rows"]) == (SHARD_RANKS, SHARD_ROWS)]
    share = found[0]["core_share_at_50_steps_s"] if found else None
    goals = [Goal(f"{SHARD_RANKS} ranks x {SHARD_ROWS} rows at 50 steps/s: share of one core", share, 1.0, False)]
    chosen = {"seconds": args.seconds, "max_window": args.max_window, "prompt": args.prompt, "output": args.output}
    return finish(args, "sim-scale", chosen, rows, goals, "What the step loop costs")


def measured(ranks: int, rows: int, seconds: float, window: int, prompt: int, output: int) -> dict[str, Any]:
    """One group in its steady state."""
    simulation, warm_up = _steady(ranks, rows, seconds, window, prompt, output)
    collector.settle()  # as a scheduler does
    before = HostTime()

    def begin() -> None:
        nonlocal before
        before = replace(simulation.loop.host)

    simulation.call_at(warm_up, begin)
    simulation.run()
    host = simulation.loop.host
    compose, book, queue = host.compose - before.compose, host.book - before.book, host.submit - before.submit
    plans, outcomes, tokens = host.plans - before.plans, host.outcomes - before.outcomes, host.tokens - before.tokens
    total = compose + book + queue
    return {
        "ranks": ranks,
        "rows": rows,
        "plans": plans,
        "outcomes": outcomes,
        "tokens": tokens,
        "compose_us_body": compose / max(1, plans * ranks) * 1e6,
        "book_us_outcome": book / max(1, outcomes) * 1e6,
        "host_us_plan": total / max(1, plans) * 1e6,
        "host_us_token": total / max(1, tokens) * 1e6,
        "rows_in_use": simulation.loop.running / ranks,
        "core_share_at_50_steps_s": total / seconds,
    }


def _steady(ranks: int, rows: int, seconds: float, window: int, prompt: int, output: int) -> tuple[Simulation, float]:
    """A closed loop of as many requests as there are rows, and the time at which all of them have begun."""
    asked = draw(
        Drawn(
            count=ranks * rows + int(2 * ranks * rows * (seconds + 2) / STEP_S / output),
            prompt=Lengths("uniform", prompt, 0.5),
            output=Lengths("uniform", output, 0.5),
            staggered=ranks * rows,
        )
    )
    rates = replace(instant(), step=STEP_S, prefill_step=STEP_S)
    costs = CostModel(shape(shapes.config("smollm2-135m")), rates, Layout(dp=ranks))
    case = Case(
        engine=Engine(dp=ranks, max_rows=rows, kv_tokens=2 * rows * (2 * prompt + 2 * output), max_model_len=8192),
        settings=settings({"max_batched_tokens": rows * 2 * prompt, "max_window": window}),
        costs=costs,
        host=Host(0.0, 0.0, 0.0),
        concurrency=ranks * rows,
        seconds=seconds + 1.0,
    )
    return Simulation(case, asked), 1.0
