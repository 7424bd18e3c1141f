"""What it costs to bring tokens to experts on other ranks and their results back: bytes and time, a process a rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep_bench import ranks
from lockstep_worker.collectives import Communicator, Group
from lockstep_worker.exchange.all_to_all import AllToAll
from lockstep_worker.overlap import last_of


@dataclass(frozen=True, slots=True)
class Settings:
    """rows[r]: tokens that rank r brings, each to `chosen` of `experts` experts by chance."""

    rows: tuple[int, ...]
    hidden: int = 2048
    experts: int = 128
    chosen: int = 8
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    repeats: int = 20


def run(settings: Settings) -> list[dict[str, Any]]:
    """A row for each rank and way. DeadlineExceeded if the ranks do not answer, Unavailable if one of them failed."""
    return ranks.run(len(settings.rows), 1, _on_rank, settings, device=settings.device)


def _on_rank(group: Group, device: torch.device, settings: Settings) -> list[dict[str, Any]]:
    return [_measure(settings, _Counting(group.world), device, captured) for captured in (False, True)]


def _measure(settings: Settings, world: _Counting, device: torch.device, captured: bool) -> dict[str, Any]:
    tokens = settings.rows[world.rank]
    generator = torch.Generator().manual_seed(world.rank)
    ids = torch.rand(tokens, settings.experts, generator=generator).topk(settings.chosen).indices.int().to(device)
    x = torch.randn(tokens, settings.hidden, generator=generator).to(device, settings.dtype)
    weights = torch.rand(tokens, settings.chosen, generator=generator).to(device)
    exchange, capacity = AllToAll(world, settings.experts), max(settings.rows) if captured else 0
    seconds = []
    for _ in range(settings.repeats + 2):
        world.sent = 0
        world.maximum("together", torch.zeros(1, device=device))
        started = _now(device)
        arrived = last_of(exchange.dispatch("e", x, ids, weights, capacity=capacity))
        exchange.combine("e", arrived.x, arrived.handle)(x)
        seconds.append(_now(device) - started)
    return {
        "way": f"capacity {capacity}" if captured else "counts",
        "rank": world.rank,
        "tokens": tokens,
        "rows arrived": len(arrived.x),
        "MB sent": world.sent / 1e6,
        "ms": 1e3 * statistics.median(seconds[2:]),
        "ms worst": 1e3 * max(seconds[2:]),
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Counting:
    """A communicator, and the bytes that this rank has sent to others through it."""

    def __init__(self, inner: Communicator) -> None:
        self._inner, self.rank, self.size, self.sent = inner, inner.rank, inner.size, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather_later(self, name: str, x: torch.Tensor) -> Any:
        self.sent += (self.size - 1) * x.nbytes
        return self._inner.all_gather_later(name, x)

    def swap(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.sent += x.nbytes - x.nbytes // self.size
        return self._inner.swap(name, x)

    def swap_later(self, name: str, x: torch.Tensor) -> Any:
        self.sent += x.nbytes - x.nbytes // self.size
        return self._inner.swap_later(name, x)

    def all_to_all(self, name: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        self._count(x, sent)
        return self._inner.all_to_all(name, x, sent, received)

    def all_to_all_later(self, name: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Any:
        self._count(x, sent)
        return self._inner.all_to_all_later(name, x, sent, received)

    def _count(self, x: torch.Tensor, sent: Sequence[int]) -> None:
        self.sent += (sum(sent) - sent[self.rank]) * x[:1].nbytes
