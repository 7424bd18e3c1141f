"""A load generator for any OpenAI-compatible completions endpoint; latencies are defined as by `vllm bench serve`.

Prompts are random token ids, all different, so that a prefix cache does not help. A closed loop keeps `concurrency`
requests in flight; an open one sends them at Poisson times, whatever the server does.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep_bench.sse import DONE, Connection, Url
from lockstep_bench.stats import Served, goodput, summarize
from lockstep_common.errors import LockstepError, Unavailable


@dataclass(frozen=True, slots=True)
class Workload:
    """What to send. `request_rate` (requests/s) makes it an open loop; `concurrency` then caps what is in flight (0: no cap)."""

    url: str
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

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


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
    url = Url.parse(work.url)
    model = work.model or await first_model(url, work.headers)
    rng = random.Random(work.seed)
    bodies = [_body(work, model, rng) for _ in range(work.warmups + work.num_prompts)]
    connection = Connection(url, work.headers)
    for body in bodies[: work.warmups]:
        await complete(connection, body, work.input_len)
    connection.close()
    pending = bodies[work.warmups :]
    start = time.perf_counter()
    if work.request_rate > 0:
        results = await _open_loop(work, url, pending, rng)
    else:
        results = await _closed_loop(work, url, pending, pause)
    duration = time.perf_counter() - start
    served = tuple(r for r in results if isinstance(r, Served))
    return Outcome(served, tuple(r for r in results if isinstance(r, str)), duration)


async def first_model(url: Url, headers: Mapping[str, str]) -> str:
    connection = Connection(url, headers)
    try:
        status, body = await connection.fetch("GET", "/v1/models")
    finally:
        connection.close()
    models = json.loads(body)["data"] if status == 200 else []
    if not models:
        raise Unavailable(f"{url.host}:{url.port}/v1/models names no model (HTTP {status}); give --model")
    name: str = models[0]["id"]
    return name


async def complete(connection: Connection, body: bytes, input_tokens: int) -> Served:
    """Sends one streamed completion and times its chunks. LockstepError if it fails or ends without usage or finish."""
    chunks: list[float] = []
    finish = usage = None
    done = False
    sent = time.perf_counter()
    async for event in connection.stream("POST", "/v1/completions", body):
        if event.data == DONE:
            done = True
            continue
        message = json.loads(event.data)
        if "error" in message:
            raise LockstepError(f"in-band error: {str(message['error'])[:300]}")
        usage = message.get("usage") or usage
        for choice in message["choices"]:
            finish = choice.get("finish_reason") or finish
            if choice.get("text") or not choice.get("finish_reason"):
                chunks.append(event.at)
    finished = time.perf_counter()
    if not (done and finish and usage and chunks):
        raise LockstepError(
            f"the stream was incomplete: done={done}, finish={finish}, usage={usage}, chunks={len(chunks)}"
        )
    return Served(sent, tuple(chunks), finished, usage.get("prompt_tokens", input_tokens), usage["completion_tokens"])


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
    series: dict[str, Sequence[float]] = {
        "ttft": [r.ttft for r in served],
        "tpot": [r.tpot for r in served if r.output_tokens > 1],
        "itl": [gap for r in served for gap in r.itl],
        "e2el": [r.e2el for r in served],
    }
    for name, values in series.items():
        for key, value in asdict(summarize(v * 1e3 for v in values)).items():
            if key != "count":
                row[f"{name}_{key}_ms"] = value
    return row


def brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that fit a terminal."""
    keys = ("concurrency", "request_rate", "completed", "failed", "output_tok_per_s", "goodput_per_s")
    latencies = [f"{name}_{q}_ms" for name in ("ttft", "tpot", "itl", "e2el") for q in ("p50", "p99")]
    return {key: row[key] for key in (*keys, *latencies) if row.get(key) is not None}


async def _closed_loop(work: Workload, url: Url, bodies: list[bytes], pause: float) -> list[Served | str]:
    results: list[Served | str] = []
    waiting = iter(bodies)

    async def client() -> None:
        connection = Connection(url, work.headers)
        for body in waiting:
            results.append(await _attempt(connection, body, work.input_len))
            await asyncio.sleep(pause)
        connection.close()

    await asyncio.gather(*(client() for _ in range(max(1, work.concurrency))))
    return results


async def _open_loop(work: Workload, url: Url, bodies: list[bytes], rng: random.Random) -> list[Served | str]:
    idle: list[Connection] = []
    gate = asyncio.Semaphore(work.concurrency or len(bodies))

    async def one(body: bytes) -> Served | str:
        async with gate:
            connection = idle.pop() if idle else Connection(url, work.headers)
            result = await _attempt(connection, body, work.input_len)
            idle.append(connection)
            return result

    loop = asyncio.get_running_loop()
    due = loop.time()
    tasks = []
    for body in bodies:
        await asyncio.sleep(max(0.0, due - loop.time()))
        tasks.append(asyncio.create_task(one(body)))
        due += rng.expovariate(work.request_rate)  # due times do not drift when sending is late
    results = await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return results


async def _attempt(connection: Connection, body: bytes, input_tokens: int) -> Served | str:
    try:
        return await complete(connection, body, input_tokens)
    except (LockstepError, OSError, ValueError, KeyError) as error:
        connection.close()
        return f"{type(error).__name__}: {error}"


def _body(work: Workload, model: str, rng: random.Random) -> bytes:
    low, high = work.vocab
    request = {
        "model": model,
        "prompt": [rng.randrange(low, high) for _ in range(work.input_len)],
        "max_tokens": work.output_len,
        "temperature": work.temperature,
        "ignore_eos": work.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(request).encode()
