"""Asks the processes of a running stack whether they are ready, and workers how far they have loaded and what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep_cli.services import Role, Service
from lockstep_common import rpc
from lockstep_proto.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 2.0
_HEALTH_NAMES = {Role.WORKER: "lockstep.v1.Worker", Role.SCHEDULER: "lockstep.v1.Scheduler"}


class Probe:
    """One channel per process, opened when its port first answers: a channel that met a closed port would wait out a backoff."""

    def __init__(self, security: rpc.Security) -> None:
        self._security = security
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ready(self, service: Service) -> bool:
        """True if the process says that it can do its work."""
        try:
            if service.role is Role.VALKEY:
                return await _exchange_unix(service.address, b"PING\r\n") == b"+PONG"
            if service.role is Role.ROUTER:
                return b" 200 " in await _exchange_tcp(service.address, b"GET /readyz HTTP/1.0\r\n\r\n")
            return await self._serving(service)
        except (OSError, TimeoutError, grpc.RpcError):
            return False

    async def loaded(self, worker: Service) -> tuple[float, str]:
        """(fraction, message) of a worker that is loading its model; (0, "") while it does not answer."""
        try:
            channel = await self._channel(worker)
            call = worker_pb2_grpc.WorkerStub(channel).Status(
                worker_pb2.StatusRequest(), metadata=rpc.call_metadata(self._security)
            )
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    async for status in call:
                        return status.loaded, status.message
            finally:
                call.cancel()
        except (OSError, TimeoutError, grpc.RpcError):
            pass
        return 0.0, ""

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def _serving(self, service: Service) -> bool:
        channel = await self._channel(service)
        request = health_pb2.HealthCheckRequest(service=_HEALTH_NAMES[service.role])
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def _channel(self, service: Service) -> grpc.aio.Channel:
        """The channel to a process that listens; OSError while it does not."""
        _, writer = await _open(service.address)
        writer.close()
        if service.address not in self._channels:
            self._channels[service.address] = rpc.open_channel(service.address, self._security)
        return self._channels[service.address]


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(_reachable(host), int(port))


def _reachable(host: str) -> str:
    """An address to call a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


async def _exchange_tcp(address: str, request: bytes) -> bytes:
    async with asyncio.timeout(_TIMEOUT_S):
        return await _first_line(*await _open(address), request)


async def _exchange_unix(path: str, request: bytes) -> bytes:
    async with asyncio.timeout(_TIMEOUT_S):
        return await _first_line(*await asyncio.open_unix_connection(path), request)


async def _first_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    try:
        writer.write(request)
        return (await reader.readline()).strip()
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class Trace:
    """A worker's profile: how many steps it holds, and a gzipped JSON file in Chrome's trace format."""

    steps: int
    data: bytes


async def record_profile(
    worker: str,
    steps: int,
    *,
    timeout_s: float = 60.0,
    security: rpc.Security = rpc.PLAIN,
    recorded: Callable[[], None] = lambda: None,
) -> Trace:
    """Records the next `steps` steps of the worker at `host:port`, or those that run within `timeout_s`.

    `recorded` is called when the steps have run; the trace comes some time later.
    LockstepError if none runs, another recording is under way, or the worker does not answer.
    """
    request = worker_pb2.ProfileRequest(steps=steps, timeout_ms=int(timeout_s * 1000))
    pieces: list[bytes] = []
    count = 0
    async with rpc.open_channel(worker, security) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Profile(request, metadata=rpc.call_metadata(security))
        try:
            async for piece in call:
                count = piece.steps
                pieces.append(piece.data)
                if not piece.data:
                    recorded()
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error, f"worker {worker}") from error
    return Trace(count, b"".join(pieces))
