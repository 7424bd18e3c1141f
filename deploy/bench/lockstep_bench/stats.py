"""Arithmetic of measurements: percentiles and the latencies of a streamed answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep_common.errors import ConfigError


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100) with linear interpolation between ranks, as numpy's default; NaN for no values."""
    if not 0 <= q <= 100:
        raise ValueError(f"percentile {q} is outside 0..100")
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """A distribution in the unit of its values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def summarize(values: Iterable[float]) -> Summary:
    """NaN everywhere if there are no values."""
    data = list(values)
    mean = math.fsum(data) / len(data) if data else math.nan
    top = max(data) if data else math.nan
    return Summary(len(data), mean, percentile(data, 50), percentile(data, 90), percentile(data, 99), top)


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request, in seconds of one monotonic clock. `chunks` are the arrivals of chunks that carry tokens."""

    sent: float
    chunks: tuple[float, ...]
    finished: float
    input_tokens: int
    output_tokens: int

    @property
    def ttft(self) -> float:
        """Time to first token: request sent to first chunk."""
        return self.chunks[0] - self.sent

    @property
    def e2el(self) -> float:
        """End-to-end latency: request sent to last chunk of tokens."""
        return self.chunks[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Time per output token without the first one; NaN for an answer of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: gaps between chunks (a chunk may carry several tokens)."""
        return tuple(b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False))


OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_objectives(words: Iterable[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` (milliseconds) to seconds by name; ConfigError for anything else."""
    limits: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in OBJECTIVES or not limit > 0:
            raise ConfigError(f"--goodput {word!r}: give NAME:MILLISECONDS with NAME one of {', '.join(OBJECTIVES)}")
        limits[name] = limit / 1000
    return limits


def goodput(requests: Iterable[Served], limits: Mapping[str, float], duration: float) -> float:
    """Requests per second that met every limit (seconds). An answer of one token has no TPOT and cannot miss it."""
    good = sum(all(not getattr(r, name) > limit for name, limit in limits.items()) for r in requests)
    return good / duration
