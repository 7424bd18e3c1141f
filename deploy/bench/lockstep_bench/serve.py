"""A load generator for running servers, over REST or gRPC; latencies are defined as by `vllm bench serve`.

Prompts are random token ids, all different, so that a prefix cache does not help. A closed loop keeps `concurrency`
requests in flight; an open one sends them at Poisson times, whatever the server does.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep_bench.backends import Backend, Generation, connect
from lockstep_bench.stats import Served, goodput, summarize
from lockstep_common.errors import LockstepError


@dataclass(frozen=True, slots=True)
class Workload:
    """What to send, and to which door (see `backends`).

    `request_rate` (requests/s) makes it an open loop; `concurrency` then caps what is in flight (0: no cap).
    """

    url: str
    backend: str = "rest"
    model: str = ""
    num_prompts: int = 64
    concurrency: int = 1
    request_rate: float = 0.0
    input_len: int = 128
    output_len: int = 128
    ignore_eos: bool = True
    vocab: tuple[int, int] = (100, 32_000)  # ids of prompts are drawn from [low, high)
    seed: int = 0
    api_key: str = ""
    warmups: int = 1
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests of a run: the answered ones and the errors of the others."""

    served: tuple[Served, ...]
    errors: tuple[str, ...]
    duration: float


async def run(work: Workload, pause: float = 0.0) -> Outcome:
    """Warm-ups, then the load; a client of the closed loop waits `pause` seconds after each answer.

    Failures of single requests are counted, not raised; failing warm-ups are raised.
    """
    generation = Generation(work.model, work.input_len, work.output_len, work.temperature, work.ignore_eos)
    backend = await connect(work.backend, work.url, generation, work.api_key)
    try:
        rng = random.Random(work.seed)
        requests = [backend.prepare(_prompt(work, rng)) for _ in range(work.warmups + work.num_prompts)]
        for request in requests[: work.warmups]:
            await backend.complete(request)
        pending = requests[work.warmups :]
        start = time.perf_counter()
        if work.request_rate > 0:
            results = await _open_loop(work, backend, pending, rng)
        else:
            results = await _closed_loop(work, backend, pending, pause)
        duration = time.perf_counter() - start
    finally:
        await backend.close()
    served = tuple(r for r in results if isinstance(r, Served))
    return Outcome(served, tuple(r for r in results if isinstance(r, str)), duration)


def summary(work: Workload, outcome: Outcome, limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """One row: throughput over the whole run, latency distributions in milliseconds."""
    served = outcome.served
    output = sum(r.output_tokens for r in served)
    row: dict[str, Any] = {
        "concurrency": work.concurrency or None,
        "request_rate": work.request_rate or None,
        "completed": len(served),
        "failed": len(outcome.errors),
        "duration_s": outcome.duration,
        "requests_per_s": len(served) / outcome.duration,
        "output_tok_per_s": output / outcome.duration,
        "total_tok_per_s": (output + sum(r.input_tokens for r in served)) / outcome.duration,
        "input_tokens": sum(r.input_tokens for r in served),
        "output_tokens": output,
    }
    if limits:
        row["goodput_per_s"] = goodput(served, limits, outcome.duration)
    for name, values in latency_series(served).items():
        for key, value in asdict(summarize(v * 1e3 for v in values)).items():
            if key != "count":
                row[f"{name}_{key}_ms"] = value
    return row


def latency_series(served: Sequence[Served]) -> dict[str, list[float]]:
    """Seconds by name, over all requests."""
    return {
        "ttft": [r.ttft for r in served],
        "tpot": [r.tpot for r in served if r.output_tokens > 1],
        "itl": [gap for r in served for gap in r.itl],
        "e2el": [r.e2el for r in served],
    }


def brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that fit a terminal."""
    keys = ("concurrency", "request_rate", "completed", "failed", "output_tok_per_s", "goodput_per_s")
    latencies = [f"{name}_{q}_ms" for name in ("ttft", "tpot", "itl", "e2el") for q in ("p50", "p99")]
    return {key: row[key] for key in (*keys, *latencies) if row.get(key) is not None}


async def _closed_loop(work: Workload, backend: Backend, requests: list[Any], pause: float) -> list[Served | str]:
    results: list[Served | str] = []
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            results.append(await _attempt(backend, request))
            await asyncio.sleep(pause)

    await asyncio.gather(*(client() for _ in range(max(1, work.concurrency))))
    return results


async def _open_loop(work: Workload, backend: Backend, requests: list[Any], rng: random.Random) -> list[Served | str]:
    gate = asyncio.Semaphore(work.concurrency or len(requests))

    async def one(request: Any) -> Served | str:
        async with gate:
            return await _attempt(backend, request)

    loop = asyncio.get_running_loop()
    due = loop.time()
    tasks = []
    for request in requests:
        await asyncio.sleep(max(0.0, due - loop.time()))
        tasks.append(asyncio.create_task(one(request)))
        due += rng.expovariate(work.request_rate)  # due times do not drift when sending is late
    return await asyncio.gather(*tasks)


async def _attempt(backend: Backend, request: Any) -> Served | str:
    try:
        return await backend.complete(request)
    except (LockstepError, OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def _prompt(work: Workload, rng: random.Random) -> list[int]:
    low, high = work.vocab
    return [rng.randrange(low, high) for _ in range(work.input_len)]
