"""Kernels on the device: what each op takes, beside the bytes and operations that it cannot do without.

A module of this package is an op's cases, at the shapes of the models of `lockstep_bench.shapes`. `measure` times one on the
device with events around many calls of a captured graph, so that launches are part of the figure as they are in serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

BYTES_PER_S: Final = 4.19e12  # read-only sum of an H200
COPY_BYTES_PER_S: Final = 4.3e12  # copy of large tensors there, bytes read and bytes written
FLOPS: Final = 680e12  # bf16 8192^3 there


@dataclass(frozen=True)
class Case:
    """One timing. `runs` do the same work on operands of their own, enough of them to be larger than the L2 cache together."""

    name: str
    runs: Sequence[Callable[[], Any]]
    bytes: float  # that one run must move
    flops: float = 0.0  # that one run must do
    check: Callable[[], float] | None = None  # the largest error against the reference; raises if it is too large
    capture: bool = True  # whether a graph may hold it
    bytes_per_s: float = BYTES_PER_S  # that bound it


@dataclass(frozen=True)
class Measured:
    name: str
    us: float
    gb_per_s: float
    tflop_per_s: float
    share: float  # of the larger of both limits
    error: float | None


def measure(case: Case, *, repeats: int = 20, budget_s: float = 0.2) -> Measured:
    """The median over `repeats` of the time of one run, in a graph that holds all of `case.runs`."""
    error = case.check() if case.check is not None else None
    for run in case.runs:
        run()
    torch.cuda.synchronize()
    replay = _captured(case.runs) if case.capture else lambda: [run() for run in case.runs]
    times: list[float] = []
    spent = 0.0
    while len(times) < repeats and (spent < budget_s or len(times) < 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
        spent += times[-1]
    seconds = sorted(times)[len(times) // 2] / len(case.runs)
    limit = max(case.bytes / case.bytes_per_s, case.flops / FLOPS)
    return Measured(
        case.name,
        seconds * 1e6,
        case.bytes / seconds / 1e9,
        case.flops / seconds / 1e12,
        limit / seconds,
        error,
    )


def _captured(runs: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay
