"""The cost of a networked scheduler: a real scheduler and a worker whose forward pass is a timed wait, on one core.

The client keeps a full batch decoding from the other core. First a steady interval gives steps/s, CPU a step and the lead
of plans; then lone arrivals at random phases beside the full batch give the time to first token.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lockstep_bench import processes
from lockstep_bench.client import Load, Piece, Request, SchedulerSession, wait_serving
from lockstep_bench.processes import HOST, Fleet, Process, free_port
from lockstep_bench.report import Goal
from lockstep_bench.stats import percentile
from lockstep_common.errors import ConfigError, LockstepError, Unavailable
from lockstep_common.steps import Sampling

VOCAB = 32_000
PROMPT_TOKENS = 16
MAX_MODEL_LEN = 32_768  # a row that reaches it is submitted anew
KV_GB = 0.25  # the null model keeps 64 bytes a token: every row can reach the limit
SPARE_ROWS = 2  # for lone arrivals
WARM_UP_S = 1.0
NEVER_STOP = Sampling(max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS)


@dataclass(frozen=True, slots=True)
class Case:
    wait_ms: float
    window: int
    batch: int
    seconds: float
    arrivals: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment at which tokens arrived, and what had happened until then."""

    at: float
    tokens: int
    scheduler_cpu: float
    worker_cpu: float


class Meter:
    """Counts all tokens that arrive; marks are taken at arrivals, so that intervals hold whole messages."""

    def __init__(self, session: SchedulerSession, scheduler: Process, worker: Process) -> None:
        self._scheduler, self._worker = scheduler, worker
        self._tokens = 0
        self._waiting: asyncio.Future[Mark] | None = None
        session.on_tokens = self._arrived

    async def mark(self, timeout: float = 30.0) -> Mark:
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(self._waiting, timeout)
        except TimeoutError:
            raise Unavailable(f"no token arrived within {timeout:g} s") from None

    def _arrived(self, tokens: int, at: float) -> None:
        self._tokens += tokens
        if tokens and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(Mark(at, self._tokens, self._scheduler.cpu_seconds(), self._worker.cpu_seconds()))


def cores() -> tuple[int, int]:
    """(core of scheduler and worker, core of the client)."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        raise ConfigError("this measurement needs two cores: one for scheduler and worker, one for the client")
    return available[0], available[1]


async def run(cases: Sequence[Case], log: Any) -> list[dict[str, Any]]:
    """One row a case, in order. `log` is called with a line before each."""
    rows = []
    for i, case in enumerate(cases, 1):
        log(f"[{i}/{len(cases)}] wait {case.wait_ms:g} ms, window {case.window}")
        rows.append(await measure(case))
    return rows


async def measure(case: Case) -> dict[str, Any]:
    server_core, client_core = cores()
    with Fleet() as fleet, _pinned(client_core):
        session, meter, metrics_port = await _start(fleet, case, server_core)
        async with session:
            fill(session, case.batch)
            await session.until(lambda load: load.running == case.batch and load.waiting == 0, timeout=30)
            await asyncio.sleep(WARM_UP_S)
            steady = await _steady(session, meter, metrics_port, case)
            ttfts = await _arrivals(session, case)
            overrun = (await session.next_load()).overrun_row_steps
        fleet.check()
    return {
        "wait_ms": case.wait_ms,
        "batch": case.batch,
        "window": case.window,
        "steps_per_s": steady.pop("steps_per_s"),
        "cpu_ms_per_step": steady.pop("cpu_ms_per_step"),
        "ttft_p50_ms": percentile(ttfts, 50) * 1e3,
        "ttft_p99_ms": percentile(ttfts, 99) * 1e3,
        "overrun_row_steps": overrun,
        **steady,
    }


async def _start(fleet: Fleet, case: Case, core: int) -> tuple[SchedulerSession, Meter, int]:
    worker_port, scheduler_port, metrics_port = free_port(), free_port(), free_port()
    rows = case.batch + SPARE_ROWS
    worker = fleet.python(
        "worker", "-m", "lockstep_worker", "--port", worker_port, "--null-step-ms", case.wait_ms,
        "--null-vocab-size", VOCAB, "--null-max-model-len", MAX_MODEL_LEN, "--max-num-seqs", rows, "--kv-cache-memory-gb", KV_GB, "--threads", 1,
        "--log-level", "WARNING", cores=[core],
    )  # fmt: skip
    await wait_serving(f"{HOST}:{worker_port}", check=worker.check)
    scheduler = fleet.python(
        "scheduler", "-m", "lockstep_scheduler", "--port", scheduler_port, "--workers", f"{HOST}:{worker_port}",
        "--redis-url", "none", "--max-num-seqs", rows, "--max-model-len", MAX_MODEL_LEN,
        "--prefill-attempt-interval", case.window, "--prefill-any-attempt-interval", 2 * case.window,
        "--max-window", case.window, "--metrics-port", metrics_port, "--log-level", "WARNING", cores=[core],
    )  # fmt: skip
    address = f"{HOST}:{scheduler_port}"
    await wait_serving(address, "lockstep.v1.Scheduler", check=fleet.check)
    session = await SchedulerSession.open(address, timeout=60)
    return session, Meter(session, scheduler, worker), metrics_port


def fill(session: SchedulerSession, batch: int) -> None:
    """Keeps `batch` choices decoding: one that ends at the context's limit is submitted anew."""
    rng = random.Random(0)

    def submit() -> Request:
        return session.submit(_prompt(rng), NEVER_STOP, sink=again)

    def again(item: Piece | LockstepError) -> None:
        if isinstance(item, LockstepError):
            raise item
        if item.end:
            submit()

    for _ in range(batch):
        submit()


async def _steady(session: SchedulerSession, meter: Meter, metrics_port: int, case: Case) -> dict[str, Any]:
    before = await _scrape(metrics_port)
    load = await session.next_load()
    start = await meter.mark()
    await asyncio.sleep(case.seconds)
    end = await meter.mark()
    load_after = await session.next_load()
    after = await _scrape(metrics_port)
    seconds, steps = end.at - start.at, (end.tokens - start.tokens) / case.batch
    _check_full(load, load_after, steps / seconds, case)
    cpu = (end.scheduler_cpu - start.scheduler_cpu, end.worker_cpu - start.worker_cpu)
    plans = after["lockstep_plan_lead_seconds_count"] - before["lockstep_plan_lead_seconds_count"]
    lead = after["lockstep_plan_lead_seconds_sum"] - before["lockstep_plan_lead_seconds_sum"]
    idle = after["lockstep_device_idle_seconds_total"] - before["lockstep_device_idle_seconds_total"]
    trips = after["lockstep_plan_round_trip_seconds_count"] - before["lockstep_plan_round_trip_seconds_count"]
    trip = after["lockstep_plan_round_trip_seconds_sum"] - before["lockstep_plan_round_trip_seconds_sum"]
    return {
        "steps_per_s": steps / seconds,
        "cpu_ms_per_step": sum(cpu) / steps * 1e3,
        "lead_ms": lead / plans * 1e3 if plans else float("nan"),
        "plan_round_trip_ms": trip / trips * 1e3 if trips else float("nan"),
        "cpu_scheduler_ms": cpu[0] / steps * 1e3,
        "cpu_worker_ms": cpu[1] / steps * 1e3,
        "idle_share": idle / seconds,
    }


def _check_full(before: Load, after: Load, steps_per_s: float, case: Case) -> None:
    """Tokens over batch must agree with the scheduler's own step counter, or rows stood idle and the figure is void.

    The counter moves by whole windows when they are planned, so it may be off by two windows at each end.
    """
    planned = (after.step - before.step) / (after.at - before.at)
    slack = 0.03 * planned + 4 * case.window / (after.at - before.at)
    if abs(planned - steps_per_s) > slack:
        raise LockstepError(
            f"the batch was not full: {steps_per_s:.1f} steps/s by tokens, {planned:.1f} by the scheduler's counter"
        )


async def _arrivals(session: SchedulerSession, case: Case) -> list[float]:
    """TTFT in seconds of lone short requests, each at a random phase of the windows."""
    rng = random.Random(1)
    window_s = case.window * max(case.wait_ms, 0.5) / 1e3
    ttfts = []
    for _ in range(case.arrivals):
        await asyncio.sleep(window_s + rng.random() * 2 * window_s)
        request = session.submit(_prompt(rng), Sampling(max_tokens=rng.randint(1, 4)))
        pieces = [piece async for piece in request]
        ttfts.append(next(p.at for p in pieces if len(p.tokens)) - request.sent)
    return ttfts


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """What was promised; a case that was not run leaves its goals unmeasured."""
    free, slow = _row(rows, wait_ms=0, window=8), _row(rows, wait_ms=5, window=8)
    ideal = 1e3 / 5
    lookahead_ms = 5.0  # L = 1 step
    return [
        Goal("steps/s at wait 0, window 8", free.get("steps_per_s"), 1500, True, "steps/s"),
        Goal("CPU a step at wait 0, window 8", free.get("cpu_ms_per_step"), 0.4, False, "ms"),
        Goal("steps/s at wait 5 ms, window 8 (2 % of 200)", slow.get("steps_per_s"), 0.98 * ideal, True, "steps/s"),
        Goal(
            "TTFT p99 at wait 5 ms, window 8 (one window + L + 3 ms)",
            slow.get("ttft_p99_ms"),
            8 * 5 + lookahead_ms + 3,
            False,
            "ms",
        ),
    ]


def _row(rows: Sequence[dict[str, Any]], **keys: float) -> dict[str, Any]:
    """The row of that case, or an empty one."""
    return next((row for row in rows if all(row[key] == value for key, value in keys.items())), {})


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]


async def page(port: int) -> str:
    """A scheduler's metrics."""
    status, text = await processes.http_get(HOST, port, "/metrics")
    if status != 200:
        raise Unavailable(f"the scheduler's metrics answered HTTP {status}")
    return text


async def _scrape(port: int) -> dict[str, float]:
    return processes.parse_metrics(await page(port))


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
