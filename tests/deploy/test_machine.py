"""What `lockstep up` finds on a machine, and how it asks processes whether they are ready."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep_cli.client import Probe
from lockstep_cli.config import UpConfig
from lockstep_cli.machine import survey
from lockstep_cli.paths import run_directory
from lockstep_cli.services import Role, Service
from lockstep_common import rpc
from lockstep_common.errors import ConfigError
from lockstep_proto.v1 import worker_pb2, worker_pb2_grpc

ANY_PORT = UpConfig(port=0, grpc_port=0)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with run_directory() as path:
        yield path


def test_ports_are_distinct_and_free(run_dir: Path) -> None:
    machine = survey(UpConfig(port=0, grpc_port=0, dp=4), run_dir)
    ports = {*machine.ports, machine.rest_port}
    assert len(ports) == 2 * 4 + 1 and 0 not in ports
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize("flag", ["port", "grpc_port"])
def test_a_port_in_use_is_named(flag: str, run_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--{flag.replace('_', '-')} {number} is in use"):
            survey(UpConfig(**{"port": 0, "grpc_port": 0, flag: number}), run_dir)


def test_gpus_are_those_that_are_visible(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert survey(ANY_PORT, run_dir).gpus == ("3", "5")
    assert survey(UpConfig(port=0, grpc_port=0, device="cpu", dp=3), run_dir).gpus == ()
    with pytest.raises(ConfigError, match="2 GPUs"):
        survey(UpConfig(port=0, grpc_port=0, dp=3), run_dir)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        survey(UpConfig(port=0, grpc_port=0, device="cuda"), run_dir)


def test_a_socket_path_that_no_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TMPDIR"):
        survey(ANY_PORT, tmp_path / ("x" * 100))


def test_a_run_directory_is_private_and_swept_when_its_owner_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "lockstep-up-left"
    left.mkdir()
    (left / "lock").touch()
    with run_directory() as mine, run_directory():
        assert not left.exists() and mine.is_dir(), "one in use is not swept"
        assert mine.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []


async def test_our_own_valkey_answers_and_stops(run_dir: Path) -> None:
    machine = survey(ANY_PORT, run_dir)
    service = Service("valkey", Role.VALKEY, machine.valkey, machine.valkey_socket)
    probe = Probe(rpc.PLAIN)
    assert not await probe.ready(service)
    process = await asyncio.create_subprocess_exec(*machine.valkey, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(5):
            while not await probe.ready(service):
                await asyncio.sleep(0.02)
    finally:
        process.terminate()
        assert await process.wait() == 0
    assert not Path(machine.valkey_socket).exists()


class Loading(worker_pb2_grpc.WorkerServicer):
    async def Status(self, request, context):  # type: ignore[no-untyped-def]
        yield worker_pb2.WorkerStatus(state=worker_pb2.WorkerStatus.LOADING, loaded=0.43, message="loading weights")
        await asyncio.sleep(60)


async def test_a_worker_is_asked_with_the_token_how_far_it_is() -> None:
    security = rpc.Security(token="secret")
    server = rpc.make_server(security)
    worker_pb2_grpc.add_WorkerServicer_to_server(Loading(), server)  # type: ignore[abstract]
    health = rpc.Health(server, "lockstep.v1.Worker")
    worker = Service("worker-0", Role.WORKER, (), f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0', security)}")
    await server.start()
    await health.start()
    probe, stranger = Probe(security), Probe(rpc.PLAIN)
    try:
        fraction, message = await probe.loaded(worker)
        assert fraction == pytest.approx(0.43) and message == "loading weights"
        assert await stranger.loaded(worker) == (0.0, "")
        assert not await probe.ready(worker)
        await health.ready(True)
        assert await probe.ready(worker)
    finally:
        await probe.close()
        await stranger.close()
        await server.stop(None)
    assert not await Probe(security).ready(worker)


@pytest.mark.parametrize(("status", "ready"), [("200 OK", True), ("503 Service Unavailable", False)])
async def test_a_router_is_ready_when_it_says_so(status: str, ready: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readline()).startswith(b"GET /readyz ")
        writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await Probe(rpc.PLAIN).ready(Service("router", Role.ROUTER, (), f"0.0.0.0:{port}")) is ready
