"""Pictures of a run, if matplotlib is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep_bench.serve import latency_series
from lockstep_bench.stats import Served
from lockstep_common.errors import ConfigError

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between chunks",
    "e2el": "whole answer",
}


def check() -> None:
    """ConfigError if there is no matplotlib: better before a measurement than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")


def latencies(path: Path, served: Sequence[Served], title: str) -> None:
    """The share of requests (of gaps for ITL) within so many milliseconds, a curve a latency. The suffix says the format."""
    curves(path, latency_series(served), f"{title}: {len(served)} requests")


def curves(path: Path, series: Mapping[str, Sequence[float]], title: str) -> None:
    """The same of any four latencies in seconds, named as in `_TITLES`."""
    check()
    figure_class = importlib.import_module("matplotlib.figure").Figure
    figure = figure_class(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    for axis, (name, seconds) in zip(axes, series.items(), strict=True):
        ordered = sorted(value * 1e3 for value in seconds)
        axis.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post")
        axis.set(title=_TITLES[name], xlabel="ms", ylabel="share", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
