"""Real processes for system tests: a stack of workers, schedulers and a router on free ports, and clients for its doors.

async with stack(model) as s:                  # one worker, one scheduler, one router
    reply = await s.rest.post("/v1/completions", {...})
    async with s.session() as session: ...      # the scheduler's own door, token ids
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lockstep_bench.client import SchedulerSession, wait_serving
from lockstep_bench.processes import HOST, Fleet, Process, free_port, http_get, parse_metrics, wait_http
from lockstep_bench.sse import SseReader
from lockstep_cli.machine import _valkey_binary
from tests.tiny_model import Shape

Flags = Mapping[str, Any]
ROOT = Path(__file__).parents[2]
SCRIPTED = "tests.scripted_worker"
START_S = 200.0  # a first start on a GPU compiles kernels, beside other tests that do
GAP_LIMIT_S = 1.5  # a neighbour's token may come so late on a busy machine, but not later


def flag_words(flags: Flags) -> list[str]:
    """{"max_num_seqs": 8, "deterministic": True} to command-line words."""
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        else:
            words += [flag, str(value)]
    return words


@dataclass
class Service:
    """One service process that can be started again on its port."""

    fleet: Fleet
    name: str
    module: str
    flags: Flags
    port: int
    process: Process | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def running(self) -> Process:
        assert self.process is not None, f"{self.name} was not started"
        return self.process

    def start(self) -> None:
        words = ["-m", self.module, "--port", str(self.port), *flag_words(self.flags)]
        self.process = self.fleet.python(self.name, *words, env={"PYTHONPATH": str(ROOT), **self.env})


@dataclass
class Reply:
    status: int
    body: Any
    headers: httpx.Headers

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["error"]
        return found


@dataclass
class Stream:
    """A streamed answer as it came: the JSON of its events, when each arrived, and whether [DONE] closed it."""

    status: int
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: bool = False
    cut: bool = False  # the connection ended in the middle of the answer

    def text(self, choice: int = 0) -> str:
        """The joined text of a choice, for completions and chat."""
        pieces = []
        for c in self.choices(choice):
            piece = c["delta"].get("content") if "delta" in c else c.get("text")
            pieces.append(piece or "")
        return "".join(pieces)

    def choices(self, choice: int = 0) -> list[dict[str, Any]]:
        return [c for e in self.events for c in e.get("choices", ()) if c["index"] == choice]

    def finishes(self, choice: int = 0) -> list[str]:
        return [c["finish_reason"] for c in self.choices(choice) if c.get("finish_reason")]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [e["error"] for e in self.events if "error" in e]

    @property
    def usage(self) -> dict[str, Any]:
        [found] = [e["usage"] for e in self.events if e.get("usage")]
        return dict(found)

    @property
    def largest_gap(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


class Rest:
    """The router's REST door."""

    def __init__(self, port: int, headers: Mapping[str, str] | None = None) -> None:
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=240, limits=httpx.Limits(max_connections=256), trust_env=False
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def post(
        self, path: str, body: Any = None, *, raw: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        content = raw if raw is not None else json.dumps(body).encode()
        head = {"content-type": "application/json"} | dict(headers or {})
        return _reply(await self._http.post(path, content=content, headers=head))

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        return _reply(await self._http.get(path, headers=headers))

    async def stream(
        self, path: str, body: Mapping[str, Any], *, started: asyncio.Event | None = None, limit: int = 0
    ) -> Stream:
        """Reads the whole stream; with `limit` turns away (closes the connection) after so many events."""
        found = Stream(0)
        reader = SseReader()
        try:
            async with self._http.stream("POST", path, json={**body, "stream": True}) as response:
                found.status = response.status_code
                if response.status_code != 200:
                    found.events.append(json.loads(await response.aread()))
                    return found
                async for piece in response.aiter_bytes():
                    for data in reader.feed(piece):
                        if data == b"[DONE]":
                            found.done = True
                            continue
                        assert not found.done, f"an event after [DONE]: {data!r}"
                        found.events.append(json.loads(data, parse_constant=_no_constant))
                        found.times.append(time.perf_counter())
                        if started is not None:
                            started.set()
                        if limit and len(found.events) >= limit:
                            return found
        except (httpx.RemoteProtocolError, httpx.ReadError):
            found.cut = True
        return found

    async def metrics(self) -> dict[str, float]:
        status, text = await http_get(HOST, self.port, "/metrics")
        assert status == 200
        return parse_metrics(text)

    async def ready(self) -> bool:
        try:
            return (await self._http.get("/readyz", timeout=2)).status_code == 200
        except httpx.HTTPError:
            return False


class Probe:
    """A steady greedy stream beside whatever happens in its context: its text must not change, its tokens must not stop.

    It repeats one request until the context ends and then once more, so that a late effect is seen too.
    """

    def __init__(self, rest: Rest, model: str, *, tokens: int = 150) -> None:
        self._rest = rest
        self._body = {
            "model": model, "prompt": "the steady stream of", "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        self._alone = ""
        self.rounds = 0

    async def learn(self) -> None:
        """The answer when nothing else runs."""
        alone = await self._once(None)
        self._alone = alone.text()
        assert (await self._once(None)).text() == self._alone, "the probe's answer is not the same twice"

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        stop, started = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(self._repeat(stop, started))
        try:
            await asyncio.wait_for(started.wait(), 20)
            yield
        finally:
            stop.set()
            await task

    async def _repeat(self, stop: asyncio.Event, started: asyncio.Event) -> None:
        last = False
        while not last:
            last = stop.is_set()
            found = await self._once(started)
            assert found.text() == self._alone, "a neighbour changed the steady stream's text"
            assert found.largest_gap < GAP_LIMIT_S, (
                f"a neighbour stopped the steady stream for {found.largest_gap:.2f} s"
            )
            self.rounds += 1

    async def _once(self, started: asyncio.Event | None) -> Stream:
        found = await self._rest.stream("/v1/completions", self._body, started=started)
        assert found.status == 200 and found.done and found.finishes() == ["length"], (
            f"the steady stream failed: {found}"
        )
        return found


@dataclass
class Stack:
    """A running stack. `schedulers[i]` serves its own group of workers, or with shards its part of a group."""

    fleet: Fleet
    model: str
    workers: list[Service]
    schedulers: list[Service]
    router: Service | None
    grpc_port: int = 0
    rest_client: Rest | None = None

    @property
    def rest(self) -> Rest:
        assert self.rest_client is not None, "this stack has no router"
        return self.rest_client

    @property
    def inference(self) -> str:
        """Address of the router's gRPC door."""
        return f"{HOST}:{self.grpc_port}"

    @asynccontextmanager
    async def session(self, scheduler: int = 0, *, timeout: float = START_S) -> AsyncIterator[SchedulerSession]:
        session = await SchedulerSession.open(self.schedulers[scheduler].address, timeout=timeout)
        try:
            yield session
        finally:
            await session.close()

    async def until_ready(self, timeout: float = START_S) -> None:
        """All processes run and the group takes requests."""
        if self.router is not None:
            processes = [s.running for s in (*self.workers, *self.schedulers, self.router)]
            await wait_http(HOST, self.router.port, "/readyz", timeout=timeout, processes=processes)
            return
        for scheduler in self.schedulers:
            await wait_serving(scheduler.address, "lockstep.v1.Scheduler", timeout=timeout, check=self._check)

    def _check(self) -> None:
        for service in (*self.workers, *self.schedulers):
            service.running.check()

    async def idle(self, scheduler: int = 0, timeout: float = 10.0) -> None:
        """Nothing runs or waits, and no block is owned."""
        async with self.session(scheduler) as session:
            await session.until(lambda load: load.running == load.waiting == 0 and load.kv_usage == 0, timeout)


@asynccontextmanager
async def stack(
    model: Path,
    *,
    worker_module: str = "lockstep_worker",
    coupled: int = 1,
    cp: int = 1,
    groups: int = 1,
    shards: int = 1,
    gpus: int = 0,
    worker: Flags | None = None,
    scheduler: Flags | None = None,
    router: Flags | None = None,
    with_router: bool = True,
    log_dir: Path | None = None,
) -> AsyncIterator[Stack]:
    """`groups` groups of `coupled` DP ranks of `cp` workers each, driven by `shards` schedulers, behind one router; waits until
    it is ready, stops it afterwards. With `gpus`, worker i gets GPU i modulo so many."""
    name, size = model.name, coupled * cp
    with Fleet(log_dir) as fleet:
        flags = _worker_flags(worker_module, model, worker)
        if worker_module != SCRIPTED:
            flags |= {"dp": coupled, "cp": cp}
        workers = [
            _service(fleet, f"worker{i}", worker_module, flags | ({"rank": i % size} if "cp" in flags else {}))
            for i in range(groups * size)
        ]
        for i, service in enumerate(workers):
            if gpus:
                service.env = {"CUDA_VISIBLE_DEVICES": str(i % gpus)}
            service.start()
        await asyncio.gather(*(wait_serving(w.address, timeout=START_S, check=w.running.check) for w in workers))
        schedulers = []
        for i in range(groups):
            own = workers[i * size : (i + 1) * size]
            settings = {"workers": ",".join(w.address for w in own), "redis_url": "none", **(scheduler or {})}
            if coupled > 1:
                settings["lockstep"] = "always"
            ports = [free_port() for _ in range(shards)]
            for shard, port in enumerate(ports):
                place: dict[str, Any] = (
                    {"shards": ",".join(f"{HOST}:{p}" for p in ports), "shard": shard} if shards > 1 else {}
                )
                if shard and "metrics_port" in settings:
                    place["metrics_port"] = 0  # the coordinator's
                label = f"scheduler{len(schedulers)}"
                schedulers.append(Service(fleet, label, "lockstep_scheduler", settings | place, port))
                schedulers[-1].start()
        found = Stack(fleet, name, workers, schedulers, None)
        if with_router:
            found.grpc_port = free_port()
            found.router = _service(
                fleet,
                "router",
                "lockstep_router",
                {
                    "grpc_port": found.grpc_port,
                    "schedulers": ",".join(s.address for s in schedulers),
                    "redis_url": "none",
                    "model": model,
                    "served_model_name": name,
                    **(router or {}),
                },
            )
            found.router.start()
            found.rest_client = Rest(found.router.port)
        try:
            await found.until_ready()
            yield found
        finally:
            if found.rest_client is not None:
                await found.rest_client.close()


@asynccontextmanager
async def scripted(model: Path, scripts: list[dict[str, Any]] | None = None, **options: Any) -> AsyncIterator[Stack]:
    """A stack around scripted workers; by default they generate slowly enough to be interrupted."""
    flags = {"step_ms": 5.0, **options.pop("worker", {})}
    if scripts is not None:
        path = model.parent / f"script-{free_port()}.json"
        path.write_text(json.dumps(scripts))
        flags["script"] = path
    async with stack(model, worker_module=SCRIPTED, worker=flags, **options) as found:
        yield found


@asynccontextmanager
async def valkey() -> AsyncIterator[tuple[Process, str]]:
    """A real Valkey and its URL."""
    port = free_port()
    with Fleet() as fleet:
        command = [
            str(_valkey_binary()),
            "--port",
            str(port),
            "--bind",
            HOST,
            "--save",
            "",
            "--dir",
            str(fleet.log_dir),
        ]
        server = fleet.start("valkey", command)
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex((HOST, port)) == 0:
                    break
            await asyncio.sleep(0.05)
        server.check()
        yield server, f"redis://{HOST}:{port}/0"


def _service(fleet: Fleet, name: str, module: str, flags: Flags) -> Service:
    return Service(fleet, name, module, flags, free_port())


def _worker_flags(module: str, model: Path, extra: Flags | None) -> dict[str, Any]:
    """A real worker on one core; a scripted one that fits the tokenizer of the tiny model."""
    base: dict[str, Any] = {"model": model, "dtype": "float32", "device": "cpu", "threads": 1}
    if module == SCRIPTED:
        shape = Shape()
        base = {"served_model_name": model.name, "vocab_size": shape.vocab, "max_model_len": shape.max_model_len}
    return base | dict(extra or {})


def _reply(response: httpx.Response) -> Reply:
    try:
        body = json.loads(response.content, parse_constant=_no_constant)
    except ValueError:
        body = response.text
    return Reply(response.status_code, body, response.headers)


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


async def gather_in_order(*jobs: Any) -> list[Any]:
    """Results of all jobs; the first failure cancels the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job) for job in jobs]
    return [t.result() for t in tasks]
