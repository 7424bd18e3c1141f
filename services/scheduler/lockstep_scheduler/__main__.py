"""Composition of the scheduler: settings -> step loop, ledger, group, server -> serve until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvloop

from lockstep_common import collector, config, logs, rpc
from lockstep_common.clock import SystemClock
from lockstep_common.errors import ConfigError
from lockstep_proto.v1 import scheduler_pb2_grpc
from lockstep_scheduler import metrics
from lockstep_scheduler.config import SchedulerConfig
from lockstep_scheduler.eplb import EplbPolicy
from lockstep_scheduler.follower import Follower
from lockstep_scheduler.group import GroupSupervisor
from lockstep_scheduler.ledger import Ledger, NoLedger
from lockstep_scheduler.loop import StepLoop
from lockstep_scheduler.server import SchedulerService
from lockstep_scheduler.settings import Settings
from lockstep_scheduler.shards import Following, Hub
from lockstep_scheduler.vote import DualBatch

if TYPE_CHECKING:
    from lockstep_scheduler.redis_ledger import RedisLedger

log = logging.getLogger("lockstep_scheduler")

TICK_SECONDS = 0.1
REGISTRY_REFRESH_SECONDS = 3.0  # the entry lives for 10
DRAIN_SECONDS = 30.0
SERVICE = "lockstep.v1.Scheduler"


async def serve(settings: SchedulerConfig) -> None:
    clock = SystemClock()
    redis = None if settings.redis_url == "none" else redis_ledger(settings)
    ledger: Ledger = redis or NoLedger()
    running = asyncio.get_running_loop()
    loop: StepLoop = StepLoop(
        loop_settings(settings),
        clock,
        ledger,
        emit=lambda batch: service.emit(batch),
        defer=lambda seconds: void(running.call_later(seconds, loop.wake)),
    )
    service: SchedulerService = SchedulerService(
        loop, ledger, clock, shard_id=settings.name, grace=settings.session_grace
    )

    server = rpc.make_server(settings.security)
    health = rpc.Health(server, SERVICE)
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(service, server)
    hub = Hub(settings, clock) if len(settings.shards) > 1 and settings.shard == 0 else None
    if hub is not None:
        scheduler_pb2_grpc.add_ShardsServicer_to_server(hub, server)
    port = rpc.bind(server, f"{settings.host}:{settings.port}", settings.security)
    address = settings.advertise or f"{settings.host}:{port}"
    if settings.metrics_port:
        metrics.serve(loop, settings.host, settings.metrics_port)
    await server.start()
    await health.start()

    def changed() -> None:
        ledger.restart()
        if loop.group is not None:
            ledger.term = loop.group.term
        told()

    def told() -> None:
        service.group_changed()
        background.append(asyncio.ensure_future(health.ready(loop.ready)))

    group: GroupSupervisor | Follower
    if settings.shard:
        group = Follower(settings, loop, changed, Following(settings, clock))
    else:
        group = GroupSupervisor(settings, loop, changed, hub)
    background: list[asyncio.Future[None]] = []
    tasks = [
        asyncio.create_task(group.run()),
        asyncio.create_task(tick(loop, group, told)),
        asyncio.create_task(service.publish_load()),
    ]
    if redis:
        tasks += [
            asyncio.create_task(redis.run()),
            asyncio.create_task(register(redis, loop, address, settings.model)),
        ]
    log.info("listening on %s, workers %s", address, ", ".join(settings.workers))

    stopped = await until_signal(tasks)
    await health.draining()
    if stopped:
        await service.drain(DRAIN_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if redis:
        await redis.close()
    await server.stop(1.0)


def void(_: object) -> None:
    """For callbacks that return nothing."""


def redis_ledger(settings: SchedulerConfig) -> RedisLedger:
    from lockstep_scheduler.redis_ledger import RedisLedger  # a scheduler without Redis needs no client

    return RedisLedger(settings.redis_url, settings.name, settings.ledger_ttl)


def loop_settings(settings: SchedulerConfig) -> Settings:
    return Settings(
        max_batched_tokens=settings.max_num_batched_tokens,
        max_window=settings.max_window,
        max_waiting=settings.max_waiting,
        vote_interval=settings.vote_interval_ms / 1000,
        a=settings.prefill_attempt_interval,
        b=settings.prefill_any_attempt_interval,
        watermark=settings.watermark,
        max_prefill_tokens_per_point=settings.max_prefill_tokens_per_point,
        attention_span=settings.attention_span,
        prefix_caching=settings.enable_prefix_caching,
        worker_timeout=settings.worker_timeout,
        reform_timeout=settings.reform_timeout,
        grace=settings.session_grace,
        eplb=EplbPolicy(
            enabled=settings.enable_eplb,
            window=settings.eplb_window,
            interval=settings.eplb_interval_s,
            threshold=settings.eplb_threshold,
            prefill_weight=settings.eplb_prefill_weight,
            report_interval=settings.expert_load_interval_s,
            nodes=settings.eplb_nodes,
        ),
        dual=DualBatch(settings.dbo_decode_token_threshold, settings.dbo_prefill_token_threshold)
        if settings.enable_dbo
        else None,
    )


async def tick(loop: StepLoop, group: GroupSupervisor | Follower, told: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(TICK_SECONDS)
        ready = loop.ready
        if error := loop.tick():
            group.lose(error)
        if loop.ready != ready:
            told()


async def register(ledger: RedisLedger, loop: StepLoop, address: str, model: str) -> None:
    """Keeps this scheduler in the registry while its group is formed, or forms again."""
    while True:
        if loop.known is not None:
            await ledger.register(address, model or loop.known.facts.model)
            await asyncio.sleep(REGISTRY_REFRESH_SECONDS)
        else:
            await asyncio.sleep(0.1)


async def until_signal(tasks: list[asyncio.Task[None]]) -> bool:
    """Waits for SIGTERM or SIGINT (True) or for a task that failed (raises). A second signal exits at once."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    waiter = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        if task is not waiter:
            task.result()
    return stop.is_set()


def main() -> None:
    settings = config.load(SchedulerConfig, prog="lockstep-scheduler", env_prefix="LOCKSTEP_SCHEDULER_")
    logs.setup("scheduler", settings.log_level)
    collector.settle()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(settings))
    except ConfigError as error:
        sys.exit(f"lockstep-scheduler: {error.message}")


if __name__ == "__main__":
    main()
