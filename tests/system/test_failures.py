"""What a failure costs: processes killed, stopped and fed garbage while requests run. Real processes, every door.

A stream that cannot go on says so in-band: it is never cut in silence and never ends as if it were complete.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep_bench.processes import HOST, Fleet, free_port, wait_http
from lockstep_common.errors import LockstepError
from lockstep_common.steps import Sampling
from tests.system.harness import ROOT, Probe, Rest, Stack, Stream, gather_in_order, scripted, stack, valkey
from tests.tiny_model import make_tiny_model

RED_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("failures") / "tiny")


def completion(s: Stack, prompt: str | list[int] = "hello", max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"model": s.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


async def until_red(rest: Rest, since: float) -> float:
    """Seconds from `since` until /readyz stops answering 200."""
    while await rest.ready():
        assert time.monotonic() - since < RED_WITHIN_S + 1, f"/readyz is still green after {RED_WITHIN_S} s"
        await asyncio.sleep(0.1)
    return time.monotonic() - since


def assert_failed_in_band(stream: Stream) -> None:
    assert stream.status == 200 and not stream.cut, "the connection was cut"
    assert stream.errors, f"no error event; the last events: {stream.events[-2:]}"
    assert not set(stream.finishes()) & {"stop", "length"}, "a truncated answer looks complete"
    assert stream.done, "no [DONE] after the error"


async def answers_again(s: Stack) -> None:
    reply = await s.rest.post("/v1/completions", completion(s))
    assert reply.status == 200, reply.body
    assert reply.body["usage"]["completion_tokens"] == 16


async def test_32_streams_with_cancels_leave_nothing_behind(model: Path) -> None:
    """A third is closed by its client in the middle; the others are what they are alone; no row or block stays owned."""
    async with stack(model, scheduler={"max_num_seqs": 24, "max_window": 8}) as s:
        bodies = [
            completion(s, f"stream number {i}", 40 + 5 * i, temperature=0.8 * (i % 2), seed=i, cache_salt=str(i))
            for i in range(32)
        ]
        alone = [await s.rest.stream("/v1/completions", {**body, "cache_salt": "alone"}) for body in bodies]
        limits = [2 + i % 5 if i % 3 == 0 else 0 for i in range(32)]
        jobs = [s.rest.stream("/v1/completions", body, limit=limit) for body, limit in zip(bodies, limits, strict=True)]
        together = await gather_in_order(*jobs)
        for i, (found, expected, limit) in enumerate(zip(together, alone, limits, strict=True)):
            if limit:
                assert expected.text().startswith(found.text().rstrip("\ufffd")), (
                    f"stream {i} is no beginning of its solo run"
                )
            else:
                assert found.done and found.finishes() == ["length"]
                assert found.text() == expected.text(), f"stream {i} differs from its solo run"
        await s.idle()
        for _ in range(30):  # load reports travel a moment
            metrics = await s.rest.metrics()
            if metrics["lockstep_num_requests_running"] == metrics["lockstep_requests_in_flight"] == 0:
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError(f"the router still counts running requests: {metrics}")
        await answers_again(s)


async def test_a_client_that_turns_away_stops_its_request(model: Path) -> None:
    """Streamed and plain: far less than max_tokens is generated, and the blocks come back."""
    async with scripted(model, scheduler={"max_window": 8}) as s, s.session() as session:
        before = (await session.next_load()).generation_tokens
        await s.rest.stream("/v1/completions", completion(s, max_tokens=900), limit=2)
        load = await session.until(lambda load: load.running == 0 and load.generation_tokens > before, timeout=3)
        assert load.generation_tokens - before < 200
        before = load.generation_tokens
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(s.rest.post("/v1/completions", completion(s, "plain", 900)), 0.5)
        load = await session.until(lambda load: load.running == 0 and load.generation_tokens > before, timeout=3)
        assert load.generation_tokens - before < 400
        await s.idle()


async def test_killed_worker(model: Path) -> None:
    """Streams pause until there is a new worker, and go on with the tokens that they would have had; /readyz stays green."""
    async with scripted(model) as s:
        started = [asyncio.Event() for _ in range(4)]
        streams = [
            asyncio.create_task(s.rest.stream("/v1/completions", completion(s, f"s{i}", 900), started=e))
            for i, e in enumerate(started)
        ]
        plain = asyncio.create_task(s.rest.post("/v1/completions", completion(s, "plain", 900)))
        await asyncio.gather(*(e.wait() for e in started))
        s.workers[0].running.kill()
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in streams)
        later = asyncio.create_task(s.rest.post("/v1/completions", completion(s, "later", 8)))
        await asyncio.sleep(0.5)
        assert await s.rest.ready() and not later.done()
        s.workers[0].start()
        found = [await asyncio.wait_for(task, 60) for task in streams]
        reply = await asyncio.wait_for(plain, 60)
        assert (await asyncio.wait_for(later, 60)).status == reply.status == 200
        for i, stream in enumerate(found):
            assert stream.finishes() == ["length"] and stream.done and not stream.errors
            if i == 0:
                again = await s.rest.stream("/v1/completions", completion(s, "s0", 900))
                assert stream.text() == again.text(), "the answer is not what it is undisturbed"
        assert reply.body["usage"]["completion_tokens"] == 900
        await s.idle()


async def test_killed_worker_without_another(model: Path) -> None:
    """After `reform_timeout` streams end with an in-band error, /readyz turns red, a new worker is taken up."""
    async with scripted(model, scheduler={"reform_timeout": 1.0}) as s:
        started = [asyncio.Event() for _ in range(4)]
        streams = [
            asyncio.create_task(s.rest.stream("/v1/completions", completion(s, f"s{i}", 900), started=e))
            for i, e in enumerate(started)
        ]
        plain = asyncio.create_task(s.rest.post("/v1/completions", completion(s, "plain", 900)))
        await asyncio.gather(*(e.wait() for e in started))
        s.workers[0].running.kill()
        killed = time.monotonic()
        await until_red(s.rest, killed)
        for task in streams:
            assert_failed_in_band(await asyncio.wait_for(task, 10))
        reply = await asyncio.wait_for(plain, 10)
        assert reply.status in (500, 503) and reply.error["message"]
        refused = await s.rest.post("/v1/completions", completion(s))
        assert refused.status == 503, "no request may be taken that cannot be served"
        s.workers[0].start()
        await s.until_ready()
        await answers_again(s)
        await s.idle()


async def test_worker_that_dies_at_a_token_and_one_that_hangs(model: Path) -> None:
    """The tokens before the failure are delivered; a hang is noticed by its silence."""
    crash = [{"match": [1, 2, 3], "tokens": [10, 11, 12], "crash_after": 3}]
    timeout = {"reform_timeout": 1.0}
    async with scripted(model, crash, scheduler=timeout) as s:
        stream = await s.rest.stream("/v1/completions", completion(s, [1, 2, 3], 50))
        assert_failed_in_band(stream)
        await until_red(s.rest, time.monotonic())
        s.workers[0].start()
        await s.until_ready()
        await answers_again(s)
    hang = [{"match": [1, 2, 3], "tokens": [10, 11, 12], "hang_after": 3}]
    async with scripted(model, hang, scheduler={"worker_timeout": 2.0, **timeout}) as s:
        began = time.monotonic()
        stream = await s.rest.stream("/v1/completions", completion(s, [1, 2, 3], 50))
        assert_failed_in_band(stream)
        assert time.monotonic() - began < 10
        await until_red(s.rest, time.monotonic())
        await asyncio.sleep(1.5)
        assert not await s.rest.ready(), "a worker that hangs was taken up again"


async def test_fault_of_one_row_ends_that_request_only(model: Path) -> None:
    """NaN in one row's logits: an in-band error for it, the same tokens as ever for its neighbours."""
    fault = [{"match": [1, 2, 3], "tokens": [10, 11], "end": "fault"}]
    async with scripted(model, fault) as s:
        probe = Probe(s.rest, s.model)
        await probe.learn()
        async with probe.beside():
            assert_failed_in_band(await s.rest.stream("/v1/completions", completion(s, [1, 2, 3], 50)))
            plain = await s.rest.post("/v1/completions", completion(s, [1, 2, 3], 50))
            assert plain.status == 500 and plain.error["message"]
        await s.idle()


async def test_killed_scheduler(model: Path) -> None:
    async with scripted(model) as s:
        started = asyncio.Event()
        stream = asyncio.create_task(s.rest.stream("/v1/completions", completion(s, max_tokens=900), started=started))
        await started.wait()
        s.schedulers[0].running.kill()
        await until_red(s.rest, time.monotonic())
        assert_failed_in_band(await asyncio.wait_for(stream, 30))
        s.schedulers[0].start()
        await s.until_ready()
        await answers_again(s)
        await s.idle()


async def test_one_of_two_groups_dies(model: Path) -> None:
    """The other group goes on serving, /readyz stays green, the lost group's streams say that they failed when nobody came."""
    async with scripted(model, groups=2, scheduler={"reform_timeout": 2.0}) as s:
        started = [asyncio.Event() for _ in range(8)]
        streams = [
            asyncio.create_task(s.rest.stream("/v1/completions", completion(s, f"g{i}", 400), started=e))
            for i, e in enumerate(started)
        ]
        await asyncio.gather(*(e.wait() for e in started))
        s.workers[0].running.kill()
        found = [await asyncio.wait_for(task, 30) for task in streams]
        lost = [f for f in found if f.errors]
        assert 0 < len(lost) < 8, "the streams were not spread over both groups"
        for f in lost:
            assert_failed_in_band(f)
        assert all(f.finishes() == ["length"] and f.done for f in found if not f.errors)
        assert await s.rest.ready()
        for _ in range(4):
            await answers_again(s)


async def test_killed_router_leaves_no_request_behind(model: Path) -> None:
    async with scripted(model, scheduler={"session_grace": 0.5}) as s:
        started = asyncio.Event()
        stream = asyncio.create_task(s.rest.stream("/v1/completions", completion(s, max_tokens=900), started=started))
        await started.wait()
        assert s.router is not None
        s.router.running.kill()
        assert (await stream).cut
        await s.idle(timeout=4)
        s.router.start()
        await s.until_ready()
        await answers_again(s)


async def test_redis_stopped(model: Path) -> None:
    """SIGSTOP of Redis: running and new requests are served without a pause; durability is reported, lost and back."""
    async with valkey() as (server, url), scripted(model, scheduler={"redis_url": url}) as s, s.session() as session:
        await session.until(lambda load: load.durable)
        probe = Probe(s.rest, s.model)
        await probe.learn()
        async with probe.beside():
            server.signal(signal.SIGSTOP)
            for i in range(10):
                began = time.monotonic()
                reply = await s.rest.post("/v1/completions", completion(s, f"while stopped {i}"))
                assert reply.status == 200 and time.monotonic() - began < 2.0
            await session.until(lambda load: not load.durable, timeout=15)
            await answers_again(s)
            server.signal(signal.SIGCONT)
            await session.until(lambda load: load.durable, timeout=20)
        server.kill()
        await answers_again(s)
        await s.idle()


FORBIDDEN = re.compile(
    r"^\s*(import|from)\s+(pickle|cPickle|dill|cloudpickle|marshal|shelve|jsonpickle)\b|torch\.load\(|yaml\.load\(",
    re.M,
)


def test_nothing_unpickles() -> None:
    """No source of the product reads objects that can run code."""
    sources = [
        p for top in ("libs", "services", "deploy", "proto") for p in (ROOT / top).rglob("*.py") if "_pb2" not in p.name
    ]
    assert len(sources) > 50
    assert not [str(p) for p in sources if FORBIDDEN.search(p.read_text())]


GARBAGE = {
    "random bytes": random.Random(1).randbytes(4096),
    "HTTP/1.1 line": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "TLS hello": bytes.fromhex("16030100c8010000c40303") + random.Random(2).randbytes(190),
    "huge length prefix": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x00\x00" + b"\x00" * 64,
    "gRPC-like frame": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    + b"\x00\xff\xff\xff\xff" * 20,
    "pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "nothing": b"",
}


async def test_garbage_on_every_port(model: Path) -> None:
    """A scanner's bytes and half-open connections on each port, under load: dropped, and nobody notices."""
    metrics_port = free_port()
    async with scripted(model, scheduler={"metrics_port": metrics_port}) as s:
        probe = Probe(s.rest, s.model)
        await probe.learn()
        assert s.router is not None
        ports = [s.workers[0].port, s.schedulers[0].port, s.router.port, s.grpc_port, metrics_port]
        held = []
        async with probe.beside():
            for port in ports:
                for data in GARBAGE.values():
                    reader, writer = await asyncio.open_connection(HOST, port)
                    writer.write(data)
                    try:
                        await asyncio.wait_for(writer.drain(), 1)
                        await asyncio.wait_for(reader.read(1 << 16), 0.05)
                    except (TimeoutError, ConnectionError):
                        pass
                    held.append(writer)  # half open until the end
        for writer in held:
            writer.close()
        s.fleet.check()
        await answers_again(s)
        await s.idle()


async def test_internal_ports_refuse_callers_without_the_token(model: Path) -> None:
    """With an internal token a stranger's session is refused before it costs anything."""
    secret = {"internal_token": "not-to-be-guessed"}
    async with stack(model, scheduler=secret, worker=secret, router=secret) as s:
        with pytest.raises(LockstepError, match="token"):
            async with s.session(timeout=1.0) as session:
                await session.submit([1, 2, 3], Sampling()).answer()
        await answers_again(s)


async def test_supervisor_brings_a_killed_worker_back(model: Path, tmp_path: Path) -> None:
    """`lockstep up` with everything: kill -9 of its worker costs no request, there is a new one; SIGTERM ends all in 5 s."""
    port = free_port()
    with Fleet(tmp_path) as fleet:
        command = [
            sys.executable, "-m", "lockstep_cli", "up", "--model", str(model), "--dtype", "float32", "--port", str(port),
            "--grpc-port", "0", "--log-dir", str(tmp_path / "logs"),
        ]  # fmt: skip
        up = fleet.start("up", command, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
        await wait_http(HOST, port, "/readyz", timeout=90, processes=[up])
        rest = Rest(port)
        body = {"model": model.name, "prompt": "hello", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
        started = asyncio.Event()
        stream = asyncio.create_task(rest.stream("/v1/completions", body, started=started))
        await started.wait()
        [worker] = [pid for pid, line in descendants(up.pid).items() if "lockstep_worker" in line]
        os.kill(worker, signal.SIGKILL)
        found = await asyncio.wait_for(stream, 90)
        assert found.finishes() == ["length"] and found.done and not found.errors
        reply = await rest.post("/v1/completions", {**body, "max_tokens": 4})
        assert reply.status == 200, reply.body
        family = descendants(up.pid)
        assert len(family) >= 4, family
        began = time.monotonic()
        up.signal(signal.SIGTERM)
        while up.returncode is None and time.monotonic() - began < 8:
            await asyncio.sleep(0.05)
        assert up.returncode == 0 and time.monotonic() - began < 5.0
        assert not [pid for pid in family if Path(f"/proc/{pid}").exists()], "processes were left behind"
        await rest.close()


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below `pid`."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found: dict[int, str] = {}
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        for child in level:
            try:
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found
