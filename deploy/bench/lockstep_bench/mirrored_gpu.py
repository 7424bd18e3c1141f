"""One long prompt on several GPUs: what a pass takes on each number of them, and how much of the gathering of keys is hidden.

Ranks are processes with a GPU each. A trace of one pass says when NCCL's kernels ran, and for how much of that others ran beside
them: the gathering of keys and values is meant to lie under the projections of queries. On a CPU there is no such trace.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from lockstep_bench import mirrored, ranks, shapes
from lockstep_bench.report import Goal
from lockstep_bench.worker_alone import BLOCK_SIZE
from lockstep_kernels.prepare import Share
from lockstep_worker.collectives import Group
from lockstep_worker.exchange.placement import WHOLE, Sharding
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model, load_model

T = TypeVar("T")
Span = tuple[float, float]

MOST_OF_ONE: Final = 0.6  # of one GPU's time, on two
LEAST_HIDDEN: Final = 0.8  # of the gathering


@dataclass(frozen=True, slots=True)
class Settings:
    """Prompts of `tokens`, each in one pass through the first layers of a model's shape with random weights."""

    shape: str = "llama-3.1-8b"
    layers: int = 4
    tokens: tuple[int, ...] = (32768, 131072)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    repeats: int = 5


def run(settings: Settings, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for each prompt and number of ranks, of the slowest rank. DeadlineExceeded or Unavailable if ranks fail."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for count in counts:
        for row in ranks.run(1, count, _on_rank, settings, device=settings.device):
            key = row["tokens"], count
            if key not in found or row["pass ms"] > found[key]["pass ms"]:
                found[key] = row
    rows = [found[tokens, count] for tokens in settings.tokens for count in counts]
    for row in rows:
        alone = found.get((row["tokens"], 1))
        row["speed-up"] = alone["pass ms"] / row["pass ms"] if alone else None
    return rows


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Of two ranks: their time beside that of one, and what is hidden."""
    aims = []
    for row in (row for row in rows if row["ranks"] == 2):
        share = None if row["speed-up"] is None else 1 / row["speed-up"]
        aims.append(Goal(f"{row['tokens']} tokens, of one GPU's time", share, MOST_OF_ONE, at_least=False))
        aims.append(Goal(f"{row['tokens']} tokens, gathering hidden", row["hidden"], LEAST_HIDDEN, at_least=True))
    return aims


def hidden_share(kernels: Sequence[tuple[str, Span]]) -> tuple[float, float | None]:
    """Of kernels (name, (begin, end)): the time that NCCL's take, and the share of it in which another one runs; None: there are
    none of NCCL's."""
    others = _union(span for name, span in kernels if "nccl" not in name.lower())
    total = beside = 0.0
    for name, (begin, end) in kernels:
        if "nccl" in name.lower():
            total += end - begin
            beside += sum(max(0.0, min(end, b) - max(begin, a)) for a, b in others)
    return total, beside / total if total else None


def _union(spans: Any) -> list[Span]:
    """The same time, without overlaps."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _on_rank(group: Group, device: torch.device, settings: Settings) -> list[dict[str, Any]]:
    model = _model(settings, group, device)
    model.join(group)
    return [_measure(settings, model, group, device, tokens) for tokens in settings.tokens]


def _measure(settings: Settings, model: Model, group: Group, device: torch.device, tokens: int) -> dict[str, Any]:
    inputs, blocks = mirrored._inputs(mirrored.Settings(tokens=tokens), Share(group.cp.size, group.cp.rank))
    inputs = on_device(inputs, device)
    kv = KvCache(model.kv_specs(), num_blocks=1 + blocks, block_size=BLOCK_SIZE, device=device)

    def once() -> float:
        group.meet(0)
        _wait(device)
        started = time.perf_counter()
        model.forward(inputs, kv)
        _wait(device)
        return 1e3 * (time.perf_counter() - started)

    for _ in range(2):
        once()  # compiles kernels and makes workspaces
    best = min(once() for _ in range(settings.repeats))
    gathered, hidden = hidden_share(_kernels(once) if device.type == "cuda" else ())
    return {
        "tokens": tokens,
        "ranks": group.cp.size,
        "pass ms": best,
        "speed-up": None,
        "NCCL ms": gathered / 1e3,
        "hidden": hidden,
    }


def _kernels(once: Any) -> list[tuple[str, Span]]:
    """What ran on the device, in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        once()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [(e["name"], (e["ts"], e["ts"] + e["dur"])) for e in events if e.get("cat") == "kernel"]


def on_device(inputs: T, device: torch.device) -> T:
    """A dataclass whose tensors, those in tuples too, are there."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(part) for part in value)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    values = {field.name: moved(getattr(inputs, field.name)) for field in fields(inputs)}  # type: ignore[arg-type]
    return replace(inputs, **values)  # type: ignore[type-var]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _model(settings: Settings, group: Group, device: torch.device) -> Model:
    place = group.place
    sharding = Sharding(place.size, place.rank) if place.size > 1 else WHOLE
    with tempfile.TemporaryDirectory() as name:
        config = shapes.config(settings.shape) | {
            "num_hidden_layers": settings.layers,
            "max_position_embeddings": max(settings.tokens),
        }
        (Path(name) / "config.json").write_text(json.dumps(config))
        return load_model(
            Path(name), dtype=settings.dtype, device=device, deterministic=False, dummy_weights=True, sharding=sharding
        )
