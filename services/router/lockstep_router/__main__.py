"""Starts a router: settings to objects, serve until SIGTERM or SIGINT, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator

import prometheus_client
import uvicorn
import uvloop
from fastapi import FastAPI

from lockstep_common import collector, logs, rpc
from lockstep_common import config as settings
from lockstep_common.clock import SystemClock
from lockstep_common.errors import ConfigError
from lockstep_router.client import SchedulerSession
from lockstep_router.config import RouterConfig
from lockstep_router.discovery import Links, RedisRegistry
from lockstep_router.fleet import Fleet
from lockstep_router.http.app import build_app
from lockstep_router.http.routes import Context
from lockstep_router.metrics import Metrics
from lockstep_router.server import InferenceService, add_inference
from lockstep_router.session import Sessions
from lockstep_router.template import load_template
from lockstep_router.text import load_tokenizer
from lockstep_router.validate import Door, load_defaults

log = logging.getLogger("lockstep_router")

READY_SECONDS = 0.1  # how often readiness is carried to the gRPC health service


def main() -> None:
    config = settings.load(RouterConfig, prog="lockstep-router", env_prefix="LOCKSTEP_ROUTER_")
    logs.setup("router", config.log_level)
    collector.settle()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one at a time: a pool of threads only costs
    try:
        uvloop.run(serve(config))
    except ConfigError as error:
        raise SystemExit(f"lockstep-router: {error.message}") from None


async def serve(config: RouterConfig) -> None:
    """Runs a router until a signal has come and its requests have ended."""
    stop = _stop_on_signal()
    clock = SystemClock()
    tokenizer = load_tokenizer(config.model)
    fleet = Fleet()
    door = Door(
        names=(config.name,),
        tokenizer=tokenizer,
        template=load_template(config.model, tokenizer),
        defaults=load_defaults(config.model),
        limits=fleet.limits,
        seed=config.seed if config.seed >= 0 else None,
    )
    metrics = Metrics(fleet)
    sessions = Sessions(fleet, tokenizer.vocabulary, metrics, clock, accept_seconds=config.accept_timeout)
    router_id = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"

    def connect(address: str) -> SchedulerSession:
        return SchedulerSession(
            address,
            router_id=router_id,
            clock=clock,
            security=config.security,
            reconnect_seconds=config.reconnect_timeout,
        )

    links = Links(fleet, connect, config.schedulers)
    registry = RedisRegistry(config.redis_url, {config.name, config.model.name}) if config.redis_url != "none" else None
    context = Context(
        door=door,
        fleet=fleet,
        sessions=sessions,
        metrics=metrics,
        started=int(time.time()),
        root=str(config.model),
        version=importlib.metadata.version("lockstep-router"),
        settings=settings.shown(config),
        degraded=lambda: ["redis"] if registry is not None and registry.away else [],
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(door.close)
        stack.push_async_callback(links.close)
        if registry is not None:
            stack.push_async_callback(registry.close)
            stack.callback(asyncio.create_task(registry.watch(links.update)).cancel)
        if config.metrics_port:
            prometheus_client.start_http_server(config.metrics_port, config.host, metrics.registry)
        if config.grpc_port:
            await stack.enter_async_context(_grpc_front(config, context))
        rest = _Rest(build_app(context, api_key=config.api_key), config)
        serving = asyncio.create_task(rest.serve(sockets=[_listen(config.host, config.port)]))
        log.info(
            "router of %s listens on %s://%s:%d",
            config.name,
            "https" if config.ssl_certfile else "http",
            config.host,
            config.port,
        )
        done, _ = await asyncio.wait([serving, stop], return_when=asyncio.FIRST_COMPLETED)
        if serving in done:
            await serving
            raise ConfigError("the REST interface ended by itself")
        log.info("draining %d requests", sessions.active)
        await sessions.drained(config.drain_timeout)
        rest.should_exit = True
        await serving


class _Rest(uvicorn.Server):
    """uvicorn without its own idea of signals."""

    def __init__(self, app: FastAPI, config: RouterConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=2,
                ssl_certfile=config.ssl_certfile or None,
                ssl_keyfile=config.ssl_keyfile or None,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


@contextlib.asynccontextmanager
async def _grpc_front(config: RouterConfig, context: Context) -> AsyncIterator[None]:
    server = rpc.make_server(config.public_security)
    health = add_inference(server, InferenceService(context.door, context.sessions))
    rpc.bind(server, f"{config.host}:{config.grpc_port}", config.public_security)
    await server.start()
    await health.start()

    async def follow() -> None:
        while True:
            await health.ready(context.ready)
            await asyncio.sleep(READY_SECONDS)

    following = asyncio.create_task(follow())
    try:
        yield
    finally:
        following.cancel()
        await health.draining()
        await server.stop(1.0)


def _stop_on_signal() -> asyncio.Future[None]:
    """Done at the first SIGTERM or SIGINT; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def first_or_second() -> None:
        if stop.done():
            os._exit(1)
        stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, first_or_second)
    return stop


if __name__ == "__main__":
    main()
