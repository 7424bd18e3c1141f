"""`fit`: the rates of one GPU from measured offline workloads (`lockstep bench throughput --json`), by least squares.

Every workload's steps are those that the real step loop plans for it (they do not depend on how long steps take). A step's
time is a sum of products of bytes, operations and layers with inverse rates, and of larger ones of two such, so it is
piecewise linear in the inverse rates: with the slopes at the present ones, least squares over relative errors gives the next
ones, until they stay; no rate may exceed what the card was measured at, no time may be negative. Cells that no other one could replace are told by leaving each out in turn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep_bench import report, shapes
from lockstep_bench.commands import add_output_flags, finish, log
from lockstep_bench.report import Goal
from lockstep_bench.sim.costs import CostModel, Rates, Work, load, rates_dict
from lockstep_bench.sim.shape import shape
from lockstep_bench.sim.simulation import Case, Engine, Simulation, settings
from lockstep_bench.sim.traces import Asked
from lockstep_bench.throughput import FIRST_TOKEN_RUNS
from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind

Floats = npt.NDArray[np.float64]

# What is fitted: a name, the fields that it sets, the fastest that it can be.
READ_LIMIT, FLOP_LIMIT = 4.19e12, 6.8e14  # of an H200: what plain reads and large products of 16 bits were measured at
_INVERSE = (
    ("weight", ("weight_bandwidth", "expert_bandwidth"), READ_LIMIT),
    ("kv", ("kv_bandwidth",), READ_LIMIT),
    ("activation", ("activation_bandwidth",), 1e18),  # fused operations keep them on the chip
    ("flops", ("flops",), FLOP_LIMIT),
    ("expert_flops", ("expert_flops",), FLOP_LIMIT),
    ("attention_flops", ("prefill_attention_flops", "decode_attention_flops"), FLOP_LIMIT),
)
_TIMES = (("layer", 3e-6), ("moe_layer", 1e-5), ("row", 2e-6))
NAMES = tuple(name for name, *_ in _INVERSE) + tuple(name for name, _ in _TIMES)
_LEAST = np.array([1 / limit for *_, limit in _INVERSE] + [0.0] * len(_TIMES))
_GUESS = np.array([1 / 6.8e14 if "flops" in name else 1 / READ_LIMIT for name, *_ in _INVERSE] + [t for _, t in _TIMES])
_ROUNDS = 30
_WARM_UPS = 1  # runs beside those that are timed, over which the worker counts its idle time as well
_SUBMIT_S = 1e-4  # between two requests that are sent "at once"


@dataclass(frozen=True, slots=True)
class Cell:
    """A measured workload: its steps, each so many times, and the seconds that the device was busy with them."""

    name: str
    model: str
    steps: tuple[tuple[Work, int], ...]
    seconds: float


def cell(row: dict[str, Any], engine: Engine, options: dict[str, Any]) -> Cell:
    """Of a row of `lockstep bench throughput`."""
    works: list[Work] = []
    _offline(row, engine, options, rates(_GUESS), works)
    runs = len(row["runs_s"]) + (
        _WARM_UPS if row["output"] == 1 or row["requests"] > 1 else _WARM_UPS + FIRST_TOKEN_RUNS
    )
    waited = row["counters"]["device_idle_s"] / runs
    return Cell(f"{row['model']} {row['work']}", row["model"], tuple(_compressed(works)), row["s"] - waited)


def rates(theta: Floats) -> Rates:
    """The rates that inverse rates and times stand for."""
    values = dict(zip(NAMES, theta.tolist(), strict=True))
    found = {field: 1 / values[name] for name, names, _ in _INVERSE for field in names}
    return Rates(**found, **{name: values[name] for name, _ in _TIMES})


def predict(cells: Sequence[Cell], theta: Floats) -> Floats:
    """Seconds of each cell."""
    found = rates(theta)
    result = []
    for one in cells:
        model = CostModel(shape(shapes.config(one.model)), found)
        result.append(sum(n * model.step(work).seconds for work, n in one.steps))
    return np.array(result)


def fit(cells: Sequence[Cell], start: Floats | None = None) -> Floats:
    """The inverse rates and times with the smallest sum of squared relative errors that was found."""
    measured = np.array([one.seconds for one in cells])
    theta = _GUESS.copy() if start is None else start.copy()
    best, smallest = theta, np.inf
    for _ in range(_ROUNDS):
        error = float((((predict(cells, theta) - measured) / measured) ** 2).sum())
        if error >= smallest * (1 - 1e-9):
            break
        best, smallest = theta, error
        scaled = _slopes(cells, theta) * _GUESS / measured[:, None]
        more = non_negative(scaled, 1 - scaled @ (_LEAST / _GUESS))
        theta = _LEAST + more * _GUESS
    return best


def non_negative(a: Floats, b: Floats) -> Floats:
    """x >= 0 with the smallest |a x - b|, by the active set method of Lawson and Hanson."""
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ b).max()))
    for _ in range(20 * a.shape[1]):
        pull = a.T @ (b - a @ x)
        if free.all() or pull[~free].max() <= tolerance:
            break
        free[np.where(free, -np.inf, pull).argmax()] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            bad = free & (trial <= 0)
            if not bad.any():
                break
            x += (x[bad] / (x[bad] - trial[bad])).min() * (trial - x)
            free &= x > 1e-15
        x = trial
    return x


def _slopes(cells: Sequence[Cell], theta: Floats) -> Floats:
    """Seconds of each cell per unit of each parameter, [cells, parameters]."""
    base = predict(cells, theta)
    columns = []
    for j, guess in enumerate(_GUESS):
        more = theta.copy()
        more[j] += 1e-3 * guess
        columns.append((predict(cells, more) - base) / (1e-3 * guess))
    return np.array(columns).T


def _compressed(works: Sequence[Work], most: int = 16) -> list[tuple[Work, int]]:
    """Neighbouring decode steps of the same rows become one of mean context, up to `most`."""
    found: list[tuple[Work, int]] = []
    at = 0
    while at < len(works):
        first, stop = works[at], at + 1
        while (
            first.kind is Kind.DECODE
            and stop < min(len(works), at + most)
            and works[stop].kind is Kind.DECODE
            and (works[stop].rows == first.rows).all()
            and works[stop].bucket == first.bucket
        ):
            stop += 1
        mean = np.mean([w.context for w in works[at:stop]], axis=0)
        found.append((replace(first, context=mean, pairs=mean) if stop > at + 1 else first, stop - at))
        at = stop
    return found


def _offline(
    row: dict[str, Any], engine: Engine, options: dict[str, Any], found: Rates, works: list[Work] | None = None
) -> Simulation:
    """The workload of a row through the step loop."""
    asked = [Asked(i * _SUBMIT_S, row["prompt"], row["output"]) for i in range(row["requests"])]
    costs = CostModel(shape(shapes.config(row["model"])), found)
    simulation = Simulation(Case(engine, settings(options), costs), asked, works.append if works is not None else None)
    simulation.run()
    return simulation


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_flags(parser)
    parser.add_argument(
        "results", type=Path, metavar="FILE", help="of lockstep bench throughput --json, one GPU a worker"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the cost model, for lockstep sim --costs FILE")
    parser.add_argument("--name", default="", help="of the cost model (default: the file's)")


def run(args: argparse.Namespace) -> int:
    rows, options = _measured(args.results)
    engine = Engine(1, options["max_num_seqs"], 4_000_000, 64, options["max_model_len"])
    looped = {
        "max_batched_tokens": options["max_num_batched_tokens"],
        "max_window": options["max_window"],
        "prefix_caching": False,
        "max_prefill_tokens_per_point": 1 << 30,  # as the measurement runs its scheduler
    }
    cells = [cell(row, engine, looped) for row in rows]
    theta = fit(cells)
    fitted = predict(cells, theta)
    left_out = np.array([predict([c], fit([o for o in cells if o is not c], theta))[0] for c in cells])
    runs = [_offline(row, engine, looped, rates(theta)) for row in rows]
    simulated, planned = np.array([one.end for one in runs]), [one.loop.host.plans for one in runs]
    measured = np.array([c.seconds for c in cells])
    table = [
        {
            "cell": c.name,
            "measured_s": row["s"],
            "busy_s": m,
            "fitted_s": f,
            "fitted_error": f / m - 1,
            "left_out_error": o / m - 1,
            "simulated_s": s,
            "simulated_error": s / row["s"] - 1,
            "simulated_plans": plans,
            "measured_plans": row["counters"]["plans"] / len(row["runs_s"]),
        }
        for row, plans, c, m, f, o, s in zip(
            rows, planned, cells, *(a.tolist() for a in (measured, fitted, left_out, simulated)), strict=True
        )
    ]
    wall = np.array([row["s"] for row in rows])
    goodness = {
        "cells": len(cells),
        "parameters": int((theta > _LEAST * (1 + 1e-9)).sum()),
        "rms_error": _rms(fitted / measured - 1),
        "largest_error": float(np.abs(fitted / measured - 1).max()),
        "rms_error_left_out": _rms(left_out / measured - 1),
        "rms_error_simulated": _rms(simulated / wall - 1),
        "largest_error_simulated": float(np.abs(simulated / wall - 1).max()),
    }
    found = rates_dict(rates(theta))
    for name, value in (found | goodness).items():
        log(f"{name:<26}{value:.4g}")
    if args.out is not None:
        _write(args, rows, found, goodness)
    goals = [
        Goal("rms error of the fit", goodness["rms_error"], 0.10, False),
        Goal("rms error of whole simulated runs", goodness["rms_error_simulated"], 0.15, False),
    ]
    return finish(
        args, "sim-fit", {"results": args.results.name, "rates": found, "goodness": goodness}, table, goals, "Fit"
    )


def _write(
    args: argparse.Namespace, rows: Sequence[dict[str, Any]], found: dict[str, float], goodness: dict[str, Any]
) -> None:
    doc = {
        "name": args.name or args.out.stem,
        "about": f"{rows[0]['card']}, {rows[0]['dtype']}, fitted to {args.results.name}",
        "sources": [
            f"lockstep bench throughput, commit {rows[0]['commit']}, {rows[0]['date']}",
            "one GPU cannot tell what a link costs: its rates are assumed, 400 Gb/s a GPU and 20 us",
        ],
        "rates": found,
        "fit": goodness,
    }
    report.write(args.out, doc)
    load(str(args.out))
    log(f"written to {args.out}")


def _measured(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    try:
        doc = json.loads(path.read_text())
        rows = [row for row in doc["rows"] if "work" in row and "engine" not in row and row["dp"] == 1]
        options = doc["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: not a file of lockstep bench throughput --json") from None
    if len(rows) < len(NAMES):
        raise ConfigError(
            f"{path}: {len(rows)} workloads are too few for {len(NAMES)} rates; measure more models or shapes"
        )
    return rows, options


def _rms(errors: Floats) -> float:
    return float(np.sqrt((errors**2).mean()))
