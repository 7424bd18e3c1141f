"""A worker (or several that step together) and its scheduler as processes of their own, started for one measurement."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lockstep_bench.client import SchedulerSession, serving
from lockstep_bench.processes import HOST, Fleet, Process, free_port, http_get, parse_metrics
from lockstep_common.errors import DeadlineExceeded, Unavailable

SERVICE = "lockstep.v1.Scheduler"
_NEVER = (
    1 << 30
)  # tokens: prompts that wait are all prefilled before anything decodes, as nobody waits for a token here
_POLL_S, _TELL_S = 0.05, 15.0
RANK = "{rank}"  # in a value of `Settings.worker_env`


@dataclass(frozen=True, slots=True)
class Settings:
    """How the engine is started. The flags at the end are given to the services as they are, after those made from the rest."""

    model: Path
    load_format: str = "dummy"
    dtype: str = "auto"
    dp: int = 1
    max_num_seqs: int = 256
    max_model_len: int = 8192
    max_num_batched_tokens: int = 16384
    max_window: int = 16
    start_timeout_s: float = 900.0
    worker_module: str = "lockstep_worker"
    worker_env: Mapping[str, str] = field(default_factory=dict)
    worker_flags: str = ""
    scheduler_flags: str = ""

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def length(self) -> int:
        """`max_model_len`, or what the model allows if that is less."""
        config = json.loads((self.model / "config.json").read_text())
        return min(self.max_model_len, int(config.get("max_position_embeddings", self.max_model_len)))


@dataclass(frozen=True, slots=True)
class Counters:
    """What the scheduler and the processes have counted so far."""

    page: Mapping[str, float]
    scheduler_cpu: float
    worker_cpu: float

    def since(self, before: Counters) -> dict[str, float]:
        """The differences that explain a workload's time."""

        def delta(name: str) -> float:
            return self.page.get(name, 0.0) - before.page.get(name, 0.0)

        trips = delta("lockstep_plan_round_trip_seconds_count")
        return {
            "plan_round_trip_s": round(delta("lockstep_plan_round_trip_seconds_sum") / trips, 6) if trips else 0.0,
            "plans": delta("lockstep_plans_total"),
            "device_idle_s": round(delta("lockstep_device_idle_seconds_total"), 4),
            "overrun_row_steps": delta("lockstep_overrun_row_steps_total"),
            "preemptions": delta("lockstep_preemptions_total"),
            "cpu_scheduler_s": round(self.scheduler_cpu - before.scheduler_cpu, 3),
            "cpu_worker_s": round(self.worker_cpu - before.worker_cpu, 3),
        }


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine. `startup_s`: from the start of the first process until the scheduler took requests."""

    session: SchedulerSession
    startup_s: float
    workers: tuple[str, ...]
    fleet: Fleet
    scheduler: Process
    worker: Process
    metrics_port: int

    async def counters(self) -> Counters:
        try:
            status, text = await http_get(HOST, self.metrics_port, "/metrics")
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"the scheduler's metrics do not answer: {error or 'no answer in time'}") from None
        if status != 200:
            raise Unavailable(f"the scheduler's metrics answered HTTP {status}")
        return Counters(parse_metrics(text), self.scheduler.cpu_seconds(), self.worker.cpu_seconds())


@asynccontextmanager
async def running(settings: Settings, log: Callable[[str], None], log_dir: Path | None = None) -> AsyncIterator[Engine]:
    """Starts an engine and stops it afterwards, whatever happens. Errors carry the end of the log of whoever failed."""
    with Fleet(log_dir) as fleet:
        start = time.perf_counter()
        ports = [free_port() for _ in range(settings.dp)]
        workers = tuple(f"{HOST}:{port}" for port in ports)
        processes = [_worker(fleet, settings, rank, port) for rank, port in enumerate(ports)]
        port, metrics_port = free_port(), free_port()
        scheduler = _scheduler(fleet, settings, workers, port, metrics_port)
        await _until_serving(f"{HOST}:{port}", settings, fleet, processes[0], log)
        startup_s = time.perf_counter() - start
        async with await SchedulerSession.open(f"{HOST}:{port}", timeout=60) as session:
            yield Engine(session, startup_s, workers, fleet, scheduler, processes[0], metrics_port)
        fleet.check()


def _worker(fleet: Fleet, settings: Settings, rank: int, port: int) -> Process:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    env = {name: value.replace(RANK, str(rank)) for name, value in settings.worker_env.items()}
    if settings.dp > 1:
        env["CUDA_VISIBLE_DEVICES"] = visible[rank] if rank < len(visible) and visible[0] else str(rank)
    return fleet.python(
        f"{settings.name}-worker{rank}", "-m", settings.worker_module, "--port", port, "--model", settings.model,
        "--served-model-name", settings.name, "--load-format", settings.load_format, "--dtype", settings.dtype,
        "--dp", settings.dp, "--rank", rank, *_sizes(settings), *shlex.split(settings.worker_flags), env=env,
    )  # fmt: skip


def _scheduler(fleet: Fleet, settings: Settings, workers: tuple[str, ...], port: int, metrics_port: int) -> Process:
    return fleet.python(
        f"{settings.name}-scheduler", "-m", "lockstep_scheduler", "--port", port, "--workers", ",".join(workers),
        "--redis-url", "none", "--no-enable-prefix-caching", "--lockstep", "always", *_sizes(settings),
        "--max-window", settings.max_window, "--max-prefill-tokens-per-point", _NEVER,
        "--metrics-port", metrics_port, *shlex.split(settings.scheduler_flags),
    )  # fmt: skip


def _sizes(settings: Settings) -> list[str | int]:
    return [
        "--max-num-seqs", settings.max_num_seqs, "--max-model-len", settings.length,
        "--max-num-batched-tokens", settings.max_num_batched_tokens,
    ]  # fmt: skip


async def _until_serving(
    address: str, settings: Settings, fleet: Fleet, worker: Process, log: Callable[[str], None]
) -> None:
    begin = told = time.monotonic()
    while not await serving(address, SERVICE):
        fleet.check()
        now = time.monotonic()
        if now - begin > settings.start_timeout_s:
            raise DeadlineExceeded(
                f"{settings.name} is not serving after {settings.start_timeout_s:g} s; the worker's log ends with\n{worker.tail()}"
            )
        if now - told >= _TELL_S:
            told = now
            log(f"{settings.name}: starting for {now - begin:.0f} s: {worker.tail(1)}")
        await asyncio.sleep(_POLL_S)
