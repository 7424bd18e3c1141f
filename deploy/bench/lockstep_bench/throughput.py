"""Offline throughput through a scheduler's own door: token ids in and out, greedy, fixed lengths, everything at once.

What is timed is what the peers' figures timed: the clock starts before the first request is submitted and stops when the last
one has ended; three runs with prompts of their own, of which the median counts. A lone request's time per token is
(t - t1) / (output - 1), t1 the better of two runs that end after one token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep_bench.client import LENGTH, Piece, SchedulerSession
from lockstep_bench.workloads import Workload, prompts
from lockstep_common.errors import LockstepError
from lockstep_common.steps import U32, Sampling

RUNS, FIRST_TOKEN_RUNS = 3, 2
_WARM_UP = Workload("warm_up", 8, 64, 8)


class Bench:
    """Runs workloads over one session. Prompts are never repeated within it."""

    def __init__(self, session: SchedulerSession, seed: int = 0) -> None:
        self._session = session
        self._rng = np.random.default_rng(seed)

    async def warm_up(self) -> None:
        limit = self._session.max_model_len
        await self.seconds(replace(_WARM_UP, prompt=min(_WARM_UP.prompt, max(1, limit - _WARM_UP.output))))

    async def measure(self, work: Workload) -> dict[str, Any]:
        """One row: median seconds, tokens a second, and for a lone request milliseconds a token."""
        if work.length > self._session.max_model_len:
            raise LockstepError(
                f"{work.name} needs {work.length} tokens a sequence; the engine was started for {self._session.max_model_len}"
            )
        await self.seconds(replace(work, requests=min(work.requests, 4), output=min(work.output, 2)))
        times = [await self.seconds(work) for _ in range(RUNS)]
        first = 0.0
        if work.requests == 1 and work.output > 1:
            first = min([await self.seconds(replace(work, output=1)) for _ in range(FIRST_TOKEN_RUNS)])
        return row(work, times, first)

    async def seconds(self, work: Workload) -> float:
        """From the first submit to the last end. LockstepError if an answer does not have the length that was asked for."""
        batch = prompts(self._rng, work.requests, work.prompt, self._session.vocab_size)
        return await timed(self._session, batch, work.output)


async def timed(session: SchedulerSession, batch: Sequence[U32], output: int) -> float:
    """Seconds until all answers, of `output` tokens each, have ended."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    sampling = Sampling(temperature=0.0, max_tokens=output)
    left = len(batch)

    def fail(error: LockstepError) -> None:
        if not over.done():
            over.set_exception(error)

    def sink(item: Piece | LockstepError) -> None:
        nonlocal left
        if isinstance(item, LockstepError):
            fail(item)
        elif item.end:
            tokens = item.offset + len(item.tokens)
            if item.end != LENGTH or tokens != output:
                fail(LockstepError(f"an answer ended after {tokens} of {output} tokens ({item.end})"))
            left -= 1
            if left == 0 and not over.done():
                over.set_result(None)

    start = time.perf_counter()
    for prompt in batch:
        session.submit(prompt, sampling, sink=sink)
    await over
    return time.perf_counter() - start


def row(work: Workload, times: Sequence[float], first: float) -> dict[str, Any]:
    """The row of a workload from its runs' seconds; `first` is the time to the first token of a lone request."""
    ordered = sorted(times)
    median = ordered[len(ordered) // 2]
    found: dict[str, Any] = {
        "work": work.name,
        "requests": work.requests,
        "prompt": work.prompt,
        "output": work.output,
        "s": round(median, 4),
        "out_tok_s": round(work.requests * work.output / median, 1),
        "in_tok_s": round(work.requests * work.prompt / median, 1),
    }
    if work.metric == "ms_per_tok":
        found["ms_per_tok"] = round((median - first) / (work.output - 1) * 1e3, 4)
    found["runs_s"] = [round(seconds, 4) for seconds in times]
    return found
