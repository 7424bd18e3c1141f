"""What several ranks win when they compute a prompt together: pairs counted, attention and the whole pass timed, a process a rank."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from lockstep_bench import ranks, shapes
from lockstep_bench.report import Goal
from lockstep_bench.worker_alone import BLOCK_SIZE, step_inputs
from lockstep_common.steps import Kind
from lockstep_kernels import prepare
from lockstep_kernels.attention import attention
from lockstep_kernels.prepare import Share
from lockstep_worker import mirror
from lockstep_worker.collectives import Communicator, Group
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model, load_model
from lockstep_worker.models import attention as half

MOST_ATTENTION = 0.6  # of one rank's time, on two
# Ranks of one machine share caches and the way to memory: what attention takes of a core is measured while the others wait, too.
COLUMNS = ("attention in turn (CPU s)", "attention at once (CPU s)", "pass (s)")


@dataclass(frozen=True, slots=True)
class Settings:
    """One prompt of `tokens`, through the first layers of a model's shape with random weights in float32."""

    shape: str = "smollm2-135m"
    layers: int = 2
    tokens: int = 8192
    repeats: int = 3


def run(settings: Settings, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for each number of ranks and rank. DeadlineExceeded or Unavailable if ranks fail."""
    return [row for count in counts for row in ranks.run(1, count, _on_rank, settings)]


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Equal work for every number of ranks, and the time of two of them."""

    def of(count: int, column: str) -> list[float]:
        return [float(row[column]) for row in rows if row["ranks"] == count]

    found = []
    for count in sorted({row["ranks"] for row in rows if row["ranks"] > 1}):
        pairs, chunk = of(count, "pairs (M)"), of(count, "a chunk's (M)")[0]
        name = f"work of {count} ranks: largest less smallest, in chunks"
        found.append(Goal(name, (max(pairs) - min(pairs)) / chunk, 1.0, at_least=False))
    alone, two = of(1, COLUMNS[0]), of(2, COLUMNS[0])
    ratio = max(two) / alone[0] if alone and two else None
    return [*found, Goal("attention of 2 ranks, of one rank's time", ratio, MOST_ATTENTION, at_least=False)]


def _on_rank(group: Group, device: torch.device, settings: Settings) -> list[dict[str, Any]]:
    model = _model(settings)
    model.join(group)
    count, rank = group.cp.size, group.cp.rank
    inputs, blocks = _inputs(settings, Share(count, rank))
    kv = KvCache(model.kv_specs(), num_blocks=1 + blocks, block_size=BLOCK_SIZE)
    timed = _Timed(attention, group.cp)
    best = dict.fromkeys(COLUMNS, float("inf"))
    with mock.patch.object(half, "attention", timed):
        for attempt in range(2 * settings.repeats):
            timed.seconds, timed.in_turn = 0.0, attempt % 2 == 1
            group.cp.maximum("together", torch.zeros(1))
            started = time.perf_counter()
            model.forward(inputs, kv)
            found = [timed.seconds] if timed.in_turn else [timed.seconds, time.perf_counter() - started]
            for column, seconds in zip(COLUMNS[:1] if timed.in_turn else COLUMNS[1:], found, strict=True):
                best[column] = min(best[column], seconds)
    lens = np.array([settings.tokens])
    size = int(mirror.chunk_sizes(lens, count)[0])
    return [
        {
            "ranks": count,
            "rank": rank,
            "pairs (M)": int(mirror.causal_work(lens, count)[rank]) / 1e6,
            "a chunk's (M)": size * settings.tokens / 1e6,
        }
        | best
    ]


class _Timed:
    """A function, and this thread's seconds on a core in it. `in_turn`: ranks call it one after the other."""

    def __init__(self, inner: Callable[..., Any], cp: Communicator) -> None:
        self._inner, self._cp = inner, cp
        self.seconds, self.in_turn = 0.0, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.in_turn:
            return self._call(*args, **kwargs)
        result = None
        for rank in range(self._cp.size):
            if rank == self._cp.rank:
                result = self._call(*args, **kwargs)
            self._cp.maximum("turn", torch.zeros(1))
        return result

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        started = time.thread_time()
        result = self._inner(*args, **kwargs)
        self.seconds += time.thread_time() - started
        return result


def _model(settings: Settings) -> Model:
    with tempfile.TemporaryDirectory() as name:
        few = {"num_hidden_layers": settings.layers, "max_position_embeddings": settings.tokens}
        config = shapes.config(settings.shape) | few
        (Path(name) / "config.json").write_text(json.dumps(config))
        cpu = torch.device("cpu")
        return load_model(Path(name), dtype=torch.float32, device=cpu, deterministic=True, dummy_weights=True)


def _inputs(settings: Settings, share: Share) -> tuple[StepInputs, int]:
    """The pass over the prompt, and the blocks that it takes."""
    size = BLOCK_SIZE * share.ranks
    blocks = -(-settings.tokens // size)
    tokens = [1 + i % 1000 for i in range(settings.tokens)]
    inputs = step_inputs(Kind.PREFILL, [(tokens, 0)], [range(1, 1 + blocks)], size)
    owner = torch.zeros_like(inputs.positions)
    slots = prepare.slots(inputs.block_tables[0], owner, inputs.positions, size, share)
    return replace(inputs, slots=(slots,)), blocks
