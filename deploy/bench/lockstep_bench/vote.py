"""What several scheduler shards cost: real schedulers, workers whose forward pass is a timed wait, a client, on this machine.

Every rank decodes a full batch all the time. A vote's duration is what the shard that is not the coordinator measures: from its
ballot to the header, less the time for which the ballots of others kept it back.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from lockstep_bench.client import SchedulerSession, wait_serving
from lockstep_bench.overhead import KV_GB, MAX_MODEL_LEN, VOCAB, fill, page
from lockstep_bench.processes import HOST, Fleet, Process, free_port, parse_metrics
from lockstep_bench.report import Goal

WARM_UP_S = 2.0
START_S = 120.0
_QUANTILE = re.compile(r'^lockstep_vote_seconds\{quantile="([^"]+)"\} (\S+)$', re.M)


@dataclass(frozen=True, slots=True)
class Case:
    shards: int
    workers: int  # DP ranks, one worker each
    wait_ms: float
    window: int
    rows: int  # that decode on each rank
    seconds: float


@dataclass(frozen=True, slots=True)
class Shard:
    process: Process
    address: str
    metrics_port: int


@dataclass(frozen=True, slots=True)
class Mark:
    step: int
    at: float
    schedulers_cpu: float
    workers_cpu: float
    pages: list[dict[str, float]]


async def run(cases: Sequence[Case], log: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row a case, in order."""
    rows = []
    for i, case in enumerate(cases, 1):
        log(f"[{i}/{len(cases)}] {case.shards} shard(s), {case.workers} workers")
        rows.append(await measure(case))
    return rows


async def measure(case: Case) -> dict[str, Any]:
    with Fleet() as fleet:
        workers, shards = await _start(fleet, case)
        async with AsyncExitStack() as stack:
            sessions = []
            for number, shard in enumerate(shards):
                session = await stack.enter_async_context(await SchedulerSession.open(shard.address, timeout=START_S))
                ranks = (number + 1) * case.workers // case.shards - number * case.workers // case.shards
                fill(session, ranks * case.rows)
                sessions.append((session, ranks * case.rows))
            for session, batch in sessions:
                await _full(session, batch)
            await asyncio.sleep(WARM_UP_S)
            before = await _mark(sessions[0][0], workers, shards)
            await asyncio.sleep(case.seconds)
            after = await _mark(sessions[0][0], workers, shards)
            text = await page(shards[-1].metrics_port)
        fleet.check()
    return _row(case, before, after, {q: float(v) for q, v in _QUANTILE.findall(text)})


def _row(case: Case, before: Mark, after: Mark, quantiles: dict[str, float]) -> dict[str, Any]:
    seconds, steps = after.at - before.at, after.step - before.step
    windows = steps / case.window
    idle = sum(p["lockstep_device_idle_seconds_total"] for p in after.pages)
    idle -= sum(p["lockstep_device_idle_seconds_total"] for p in before.pages)
    several = case.shards > 1
    return {
        "shards": case.shards,
        "workers": case.workers,
        "wait_ms": case.wait_ms,
        "window": case.window,
        "rows": case.rows,
        "steps_per_s": steps / seconds,
        "votes": int(after.pages[-1]["lockstep_vote_seconds_count"]),
        "vote_p50_ms": quantiles["0.5"] * 1e3 if several else float("nan"),
        "vote_p99_ms": quantiles["0.99"] * 1e3 if several else float("nan"),
        "plan_round_trip_ms": max(map(_round_trip, before.pages, after.pages)) * 1e3,
        "cpu_schedulers_ms_per_window": (after.schedulers_cpu - before.schedulers_cpu) / windows * 1e3,
        "cpu_worker_ms_per_window": (after.workers_cpu - before.workers_cpu) / case.workers / windows * 1e3,
        "idle_share": idle / seconds / case.workers,
    }


def _round_trip(before: dict[str, float], after: dict[str, float]) -> float:
    name = "lockstep_plan_round_trip_seconds"
    plans = after[f"{name}_count"] - before[f"{name}_count"]
    return (after[f"{name}_sum"] - before[f"{name}_sum"]) / plans if plans else float("nan")


async def _start(fleet: Fleet, case: Case) -> tuple[list[Process], list[Shard]]:
    rows = case.rows + 1
    workers, addresses = [], []
    for number in range(case.workers):
        port = free_port()
        addresses.append(f"{HOST}:{port}")
        workers.append(
            fleet.python(
                f"worker{number}", "-m", "lockstep_worker", "--port", port, "--null-step-ms", case.wait_ms,
                "--null-vocab-size", VOCAB, "--null-max-model-len", MAX_MODEL_LEN, "--max-num-seqs", rows,
                "--kv-cache-memory-gb", KV_GB, "--threads", 1, "--log-level", "WARNING",
            )
        )  # fmt: skip
    for address in addresses:
        await wait_serving(address, timeout=START_S, check=fleet.check)
    ports = [(free_port(), free_port()) for _ in range(case.shards)]
    places = ",".join(f"{HOST}:{port}" for port, _ in ports)
    shards = []
    for number, (port, metrics_port) in enumerate(ports):
        process = fleet.python(
            f"scheduler{number}", "-m", "lockstep_scheduler", "--port", port, "--workers", ",".join(addresses),
            "--shards", places, "--shard", number, "--lockstep", "always", "--redis-url", "none",
            "--max-num-seqs", rows, "--max-model-len", MAX_MODEL_LEN,
            "--prefill-attempt-interval", case.window, "--prefill-any-attempt-interval", 2 * case.window,
            "--max-window", case.window, "--metrics-port", metrics_port, "--log-level", "WARNING",
        )  # fmt: skip
        shards.append(Shard(process, f"{HOST}:{port}", metrics_port))
    for shard in shards:
        await wait_serving(shard.address, "lockstep.v1.Scheduler", timeout=START_S, check=fleet.check)
    return workers, shards


async def _full(session: SchedulerSession, batch: int) -> None:
    await session.until(lambda load: load.running == batch and load.waiting == 0, timeout=30)


async def _mark(session: SchedulerSession, workers: Sequence[Process], shards: Sequence[Shard]) -> Mark:
    load = await session.next_load()
    return Mark(
        load.step,
        load.at,
        sum(shard.process.cpu_seconds() for shard in shards),
        sum(worker.cpu_seconds() for worker in workers),
        [parse_metrics(await page(shard.metrics_port)) for shard in shards],
    )


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """What was promised for a vote between two shards on one machine; without such a case nothing is measured."""
    found = []
    for row in (row for row in rows if row["shards"] == 2):
        name = f"vote between two shards, {row['workers']} workers, {row['wait_ms']:g} ms a step"
        found.append(Goal(f"{name}, p50", row["vote_p50_ms"], 1.0, False, "ms"))
        found.append(Goal(f"{name}, p99", row["vote_p99_ms"], 5.0, False, "ms"))
    return found
