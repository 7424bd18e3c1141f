"""How fast backends bring tokens to experts on other GPUs and back: each beside NCCL's all_to_all of the same bytes.

Every rank brings as many tokens, and each token goes to every rank: `tokens` rows from each rank to each, the most that an
exchange of them can take. Captured steps are timed as they run, inside a CUDA graph; passes with counts, as prefill has, eagerly.
On a CPU nothing is captured, and the only backend is all_to_all over gloo.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from lockstep_bench import ranks
from lockstep_bench.report import Goal
from lockstep_common.errors import Unsupported
from lockstep_worker.collectives import Group
from lockstep_worker.exchange import Exchange
from lockstep_worker.exchange.backends import open_exchange
from lockstep_worker.exchange.symmetric import Room
from lockstep_worker.overlap import last_of

# NCCL 2.28.9 between two H200 of one host, multicast off, bfloat16, hidden 7168, in a CUDA graph: us by tokens a peer
RECORDED_US: Final = {1: 9.7, 8: 10.3, 64: 16.4, 256: 28.3, 1024: 74.5, 4096: 225.6}
RECORDED_HIDDEN: Final = 7168
RECORDED_GB_S: Final = 389.0  # a copy from one GPU to the other
_LIMIT_S: Final = 20.0
_IN_GRAPH: Final = 100  # exchanges, so that what a replay costs does not count


@dataclass(frozen=True, slots=True)
class Settings:
    tokens: tuple[int, ...] = (1, 64, 256, 4096)  # of a rank, in captured steps
    prefill: tuple[int, ...] = (4096,)  # of a rank, in passes with counts
    backends: tuple[str, ...] = ("all_to_all", "symmetric")
    ranks: int = 2
    hidden: int = RECORDED_HIDDEN
    experts: int = 128
    chosen: int = 8
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    repeats: int = 20


def run(settings: Settings) -> list[dict[str, Any]]:
    """A row for each backend, way and number of tokens: the slowest rank's. DeadlineExceeded or Unavailable if ranks fail;
    a backend that cannot be has rows that say why."""
    found = ranks.run(settings.ranks, 1, _on_rank, settings, device=settings.device)
    each = len(found) // settings.ranks
    return [_slowest(found[number::each]) for number in range(each)]


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Where the recorded figures are of the same rows: to be faster than NCCL was, each way, and to copy as fast as memory does."""
    aims = []
    for row in rows:
        name = f"{row['backend']}, {row['way']}, {row['tokens']} tokens a peer"
        if row["backend"] != "symmetric" or row["way"] != "captured":
            continue
        for way in ("dispatch us", "combine us"):
            if (limit := row["recorded us"]) is not None:
                aims.append(Goal(f"{name}: {way[:-3]}", row[way], limit, at_least=False, unit="us"))
    return aims


def _slowest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    worst = max(rows, key=lambda row: row["dispatch us"] + row["combine us"] if row["dispatch us"] is not None else 0.0)
    return {key: value for key, value in worst.items() if key != "rank"}


def _on_rank(group: Group, device: torch.device, settings: Settings) -> list[dict[str, Any]]:
    rows = []
    plain = {tokens: _nccl(group, device, settings, tokens) for tokens in sorted({*settings.tokens, *settings.prefill})}
    most = max((*settings.tokens, *settings.prefill))
    for backend in settings.backends:
        local = settings.experts // settings.ranks
        room = Room(
            settings.ranks,
            local,
            max(settings.tokens, default=1),
            settings.hidden,
            settings.chosen,
            settings.dtype,
            False,
        )
        exchange, why = None, ""
        try:
            exchange = open_exchange(backend, group, room, device, tokens=most, limit_s=_LIMIT_S)
        except (Unsupported, ImportError) as error:
            why = str(error)
        for way, numbers in (("captured", settings.tokens), ("counts", settings.prefill)):
            for tokens in numbers:
                row = {"backend": backend, "way": way, "tokens": tokens, "rank": group.place.rank}
                times = _Times(None, None)
                if exchange is not None:
                    times = _measure(group, device, settings, exchange, tokens, captured=way == "captured")
                rows.append(row | _columns(settings, tokens, times, plain[tokens]) | {"note": why})
        if exchange is not None:
            exchange.close()
    return rows


@dataclass(frozen=True, slots=True)
class _Times:
    """Microseconds; None: not measured."""

    dispatch: float | None
    combine: float | None


def _columns(settings: Settings, tokens: int, times: _Times, plain: float) -> dict[str, Any]:
    sent = (settings.ranks - 1) * tokens * settings.hidden * settings.dtype.itemsize  # bytes of rows that leave a rank
    recorded = RECORDED_US.get(tokens) if (settings.hidden, settings.ranks) == (RECORDED_HIDDEN, 2) else None

    def rate(us: float | None) -> float | None:
        return sent / us / 1e3 if us else None

    return {
        "MB": sent / 1e6,
        "dispatch us": times.dispatch,
        "combine us": times.combine,
        "dispatch GB/s": rate(times.dispatch),
        "combine GB/s": rate(times.combine),
        "all_to_all of the bytes us": plain,
        "recorded us": recorded if settings.device == "cuda" and settings.dtype.itemsize == 2 else None,
    }


def _measure(
    group: Group, device: torch.device, settings: Settings, exchange: Exchange, tokens: int, *, captured: bool
) -> _Times:
    """Median of the repeats; of graphs, of an exchange in them."""
    generator = torch.Generator().manual_seed(group.place.rank)
    x = torch.randn(tokens, settings.hidden, generator=generator).to(device, settings.dtype)
    ids = spread(tokens, settings.experts, settings.chosen).to(device)
    weights = torch.full((tokens, settings.chosen), 1 / settings.chosen, device=device)
    capacity = tokens if captured else 0

    def once(mark: Callable[[], None] = lambda: None) -> None:
        mark()
        arrived = last_of(exchange.dispatch("e", x, ids, weights, capacity=capacity))
        mark()
        exchange.combine("e", arrived.x.contiguous(), arrived.handle)(x)
        mark()

    for _ in range(3):
        once()
    if device.type == "cuda" and captured:
        whole = _replayed(group, device, settings.repeats, once)
        first, second = _split_in_graph(group, device, settings.repeats, once)
        share = first / (first + second)  # what events cost is in both
        return _Times(whole * share, whole * (1 - share))
    found = [_split(group, device, once) for _ in range(settings.repeats)]
    return _Times(*(statistics.median(column) for column in zip(*found, strict=True)))


def spread(tokens: int, experts: int, chosen: int) -> torch.Tensor:
    """int32 [tokens, chosen]: different experts at equal distances, so that all ranks have some of each token's if `chosen` is
    a multiple of their number."""
    token, choice = torch.arange(tokens)[:, None], torch.arange(chosen)
    return ((token + choice * (experts // chosen)) % experts).int()


def _nccl(group: Group, device: torch.device, settings: Settings, tokens: int) -> float:
    """Microseconds of one all_to_all of the rows that an exchange sends one way."""
    x = torch.ones(settings.ranks, tokens, settings.hidden, dtype=settings.dtype, device=device)

    def once(mark: Callable[[], None] = lambda: None) -> None:
        mark()
        group.world.swap("plain", x)
        mark()

    for _ in range(3):
        once()
    if device.type == "cuda":
        return _replayed(group, device, settings.repeats, once)
    return statistics.median(_split(group, device, once)[0] for _ in range(settings.repeats))


def _split(group: Group, device: torch.device, once: Callable[[Callable[[], None]], None]) -> list[float]:
    """Microseconds between the marks of one eager call, after all ranks have met."""
    moments: list[Any] = []

    def mark() -> None:
        if device.type != "cuda":
            moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        moments.append(event)

    group.meet(0)
    once(mark)
    return _between(moments)


def _between(moments: Sequence[Any]) -> list[float]:
    if isinstance(moments[0], float):
        return [1e6 * (b - a) for a, b in itertools.pairwise(moments)]
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(moments)]


def _replayed(group: Group, device: torch.device, repeats: int, once: Callable[[], None]) -> float:
    """Microseconds of one of the calls in a graph of many."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_IN_GRAPH):
            once()
    graph.replay()

    def replay(mark: Callable[[], None]) -> None:
        mark()
        graph.replay()
        mark()

    return statistics.median(_split(group, device, replay)[0] for _ in range(repeats)) / _IN_GRAPH


def _split_in_graph(
    group: Group, device: torch.device, repeats: int, once: Callable[[Callable[[], None]], None]
) -> tuple[float, float]:
    """The same of its two parts, by events that are captured with it."""
    graph, events = torch.cuda.CUDAGraph(), list[Any]()

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_IN_GRAPH):
            once(mark)
    parts: list[list[float]] = []
    for _ in range(repeats):
        group.meet(0)
        graph.replay()
        for start in range(0, len(events), 3):
            parts.append(_between(events[start : start + 3]))
    first, second = (statistics.median(column) for column in zip(*parts, strict=True))
    return first, second
