"""A scheduler's client at the level of tokens: what a router is to a scheduler, without text.

async with await SchedulerSession.open("127.0.0.1:7000") as session:
    choice = session.submit([1, 2, 3], Sampling(max_tokens=8))
    async for piece in choice: ...
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep_bench.backends import Generation
from lockstep_bench.stats import Served
from lockstep_common import rpc
from lockstep_common.errors import ConfigError, DeadlineExceeded, LockstepError, Unavailable
from lockstep_common.steps import F32, NO_F32, NO_U32, U32, Sampling, f32, u32, u64
from lockstep_proto.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

STOP, LENGTH, CANCELLED, ERROR = "stop", "length", "cancelled", "error"
_BATCH_BYTES = 16 << 20  # far below the largest message
_ENDS = ("", STOP, LENGTH, CANCELLED, ERROR)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message brought for one choice. `at` is time.perf_counter() when it was read."""

    choice: int
    offset: int
    tokens: U32
    logprobs: F32
    end: str
    cached: int
    at: float


@dataclass(frozen=True, slots=True)
class Load:
    """A scheduler's load report; see `Load` in common.proto."""

    running: int
    waiting: int
    kv_usage: float
    step: int
    ready: bool
    reforming: bool
    generation_tokens: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    overrun_row_steps: int
    durable: bool
    at: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's choices folded: tokens and logprobs by choice."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    ends: tuple[str, ...]
    cached: int


Sink = Callable[[Piece | LockstepError], None]


class Request:
    """A submitted request: iterate over it for its pieces until all its choices ended. Raises the request's error.

    With a sink the pieces go there, from inside the reader, and the request cannot be iterated.
    """

    def __init__(self, session: SchedulerSession, handle: int, request_id: str, n: int, sink: Sink | None) -> None:
        self._session = session
        self._queue: asyncio.Queue[Piece | LockstepError] = asyncio.Queue()
        self._open = n
        self.deliver: Sink = sink or self._queue.put_nowait
        self.undelivered_ends = n
        self.handle = handle
        self.request_id = request_id
        self.n = n
        self.sent = time.perf_counter()

    def cancel(self) -> None:
        self._session.cancel(self.handle)

    def finish(self, choice: int, offset: int) -> None:
        """As the router does for a stop string: the choice ends at `offset` tokens."""
        self._session.finish(self.handle, choice, offset)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while self._open:
            item = await self._queue.get()
            if isinstance(item, LockstepError):
                self._open = 0
                raise item
            self._open -= bool(item.end)
            yield item

    async def answer(self) -> Answer:
        """All tokens; AssertionError if an offset does not continue what came before."""
        tokens: list[list[int]] = [[] for _ in range(self.n)]
        logprobs: list[list[float]] = [[] for _ in range(self.n)]
        ends = [""] * self.n
        cached = 0
        async for piece in self:
            assert piece.offset == len(tokens[piece.choice]), (
                f"gap or repeat: {piece.offset} after {len(tokens[piece.choice])}"
            )
            if piece.offset == 0 and piece.choice == 0:
                cached = piece.cached
            tokens[piece.choice] += piece.tokens.tolist()
            logprobs[piece.choice] += piece.logprobs.tolist()
            ends[piece.choice] = piece.end
        return Answer(tuple(map(tuple, tokens)), tuple(map(tuple, logprobs)), tuple(ends), cached)


class SchedulerSession:
    """One `Session` stream. Not for several event loops; close it, or use it as a context."""

    def __init__(self, address: str, security: rpc.Security = rpc.PLAIN) -> None:
        self.address = address
        self.model = ""
        self.vocab_size = 0
        self.block_size = 0
        self.max_model_len = 0
        self.device = self.dtype = ""
        self.dp = 1
        self.load: Load | None = None
        self.on_tokens: Callable[[int, float], None] | None = None  # (tokens of one message, its time), after delivery
        self._security = security
        self._channel = rpc.open_channel(address, security)
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._outbox: deque[scheduler_pb2.ToScheduler] = deque()
        self._outgoing = asyncio.Event()
        self._requests: dict[int, Request] = {}
        self._handles = 0
        self._changed = asyncio.Event()
        self._lost: LockstepError | None = None

    @classmethod
    async def open(cls, address: str, *, timeout: float = 60.0, security: rpc.Security = rpc.PLAIN) -> Self:
        """Connects, again and again until `timeout`, and waits until the engine group takes requests."""
        deadline = time.monotonic() + timeout
        while True:
            session = cls(address, security)
            try:
                await session._start(deadline)
                return session
            except LockstepError as error:
                await session.close()
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"scheduler {address} not ready after {timeout:g} s: {error}") from error
                await asyncio.sleep(0.1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    def submit(
        self,
        prompt: U32 | Iterable[int],
        sampling: Sampling,
        *,
        n: int = 1,
        priority: int = 0,
        salt: str = "",
        deadline_ms: int = 0,
        sink: Sink | None = None,
    ) -> Request:
        self._handles += 1
        request = Request(self, self._handles, uuid.uuid4().hex, n, sink)
        self._requests[self._handles] = request
        message = scheduler_pb2.Submit(
            handle=self._handles,
            request_id=request.request_id,
            prompt=np.asarray(prompt if isinstance(prompt, np.ndarray) else list(prompt), "<u4").tobytes(),
            sampling=rpc.write_sampling(sampling),
            n=n,
            priority=priority,
            cache_salt=salt,
            deadline_ms=deadline_ms,
        )
        self._submit(message)
        return request

    def cancel(self, handle: int) -> None:
        self._put(scheduler_pb2.ToScheduler(cancel=scheduler_pb2.Cancel(handle=handle)))

    def finish(self, handle: int, choice: int, offset: int) -> None:
        message = scheduler_pb2.Finish(handle=handle, choice=choice, offset=offset)
        self._put(scheduler_pb2.ToScheduler(finish=message))

    @property
    def facts(self) -> dict[str, Any]:
        """What the engine runs on, and how."""
        return {"device": self.device, "dtype": self.dtype, "dp": self.dp}

    async def next_load(self, timeout: float = 5.0) -> Load:
        """The next load report to come."""
        before = self.load
        async with asyncio.timeout(timeout):
            while self.load is before or self.load is None:
                await self._wait()
        return self.load

    async def until(self, what: Callable[[Load], bool], timeout: float = 10.0) -> Load:
        """The first load report that `what` accepts; DeadlineExceeded with the last one."""
        try:
            async with asyncio.timeout(timeout):
                while self.load is None or not what(self.load):
                    await self._wait()
            return self.load
        except TimeoutError:
            raise DeadlineExceeded(f"scheduler {self.address}: still {self.load} after {timeout:g} s") from None

    async def _wait(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._changed.clear()
        await self._changed.wait()

    async def _start(self, deadline: float) -> None:
        stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._put(scheduler_pb2.ToScheduler(hello=scheduler_pb2.Hello(router_id=f"bench-{uuid.uuid4().hex}")))
        self._call = stub.Session(self._upward(), metadata=rpc.call_metadata(self._security))
        self._reader = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(max(0.01, deadline - time.monotonic())):
                while not (self.model and self.load is not None and self.load.ready):
                    await self._wait()
        except TimeoutError:
            raise DeadlineExceeded(f"the group did not form; last load: {self.load}") from None

    def _submit(self, message: scheduler_pb2.Submit) -> None:
        """Requests that are submitted before the stream takes them leave in one message, and may be admitted in one plan."""
        last = self._outbox[-1].batch.submits if self._outbox else []
        if last and len(last) * (len(message.prompt) + len(last[0].prompt)) < _BATCH_BYTES:
            last.append(message)
        else:
            self._put(scheduler_pb2.ToScheduler(batch=scheduler_pb2.SubmitBatch(submits=[message])))

    def _put(self, message: scheduler_pb2.ToScheduler) -> None:
        self._outbox.append(message)
        self._outgoing.set()

    async def _upward(self) -> AsyncIterator[scheduler_pb2.ToScheduler]:
        while True:
            await self._outgoing.wait()
            while self._outbox:
                yield self._outbox.popleft()
            self._outgoing.clear()

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._receive(message)
            self._lost = Unavailable(f"scheduler {self.address} closed the session")
        except grpc.RpcError as error:
            self._lost = rpc.from_rpc_error(error, f"scheduler {self.address}")
        for request in self._requests.values():
            request.deliver(self._lost)
        self._requests.clear()
        self._changed.set()

    def _receive(self, message: scheduler_pb2.FromScheduler) -> None:
        match message.WhichOneof("message"):
            case "events":
                self._receive_events(message.events)
            case "load":
                self._receive_load(message.load)
            case "refused":
                self._end(message.refused.handle, rpc.from_detail(message.refused.error))
            case "welcome":
                self._receive_facts(message.welcome.facts)
                self._receive_load(message.welcome.load)
            case "facts":
                self._receive_facts(message.facts)

    def _receive_facts(self, facts: scheduler_pb2.GroupFacts) -> None:
        self.model, self.vocab_size = facts.model, facts.vocab_size
        self.block_size, self.max_model_len = facts.block_size, facts.max_model_len
        self.device, self.dtype, self.dp = facts.device, facts.dtype, facts.dp
        self._changed.set()

    def _receive_load(self, load: common_pb2.Load) -> None:
        self.load = Load(
            load.running,
            load.waiting,
            load.kv_usage,
            load.step,
            load.ready,
            load.reforming,
            load.generation_tokens,
            load.prompt_tokens,
            load.cached_tokens,
            load.preemptions,
            load.overrun_row_steps,
            load.durable,
            time.perf_counter(),
        )
        self._changed.set()

    def _receive_events(self, events: scheduler_pb2.Events) -> None:
        at = time.perf_counter()
        tokens, logprobs = u32(events.tokens), f32(events.logprobs)
        handles, choices, offsets = (
            u64(events.handles).tolist(),
            u32(events.choices).tolist(),
            u32(events.offsets).tolist(),
        )
        counts, cached = u32(events.counts).tolist(), u32(events.cached).tolist()
        faults = {e.entry: e.error for e in events.errors}
        start = 0
        for i, (handle, choice, count, end) in enumerate(zip(handles, choices, counts, events.ends, strict=True)):
            stop = start + count
            own = tokens[start:stop] if count else NO_U32
            scores = logprobs[start:stop] if len(logprobs) else NO_F32
            start = stop
            request = self._requests.get(handle)
            if request is None:
                continue
            hit = cached[i] if i < len(cached) else 0
            request.deliver(Piece(choice, offsets[i], own, scores, "" if i in faults else _ENDS[end], hit, at))
            if i in faults:
                self._end(handle, rpc.from_detail(faults[i]))
            elif end:
                self._ended(request)
        if self.on_tokens is not None:
            self.on_tokens(len(tokens), at)

    def _ended(self, request: Request) -> None:
        request.undelivered_ends -= 1
        if request.undelivered_ends == 0:
            self._requests.pop(request.handle, None)

    def _end(self, handle: int, error: LockstepError) -> None:
        if (request := self._requests.pop(handle, None)) is not None:
            request.deliver(error)


async def serving(address: str, service: str = "", *, timeout: float = 2.0) -> bool:
    """What the health service of `address` says; False if nobody listens. An empty service asks for liveness."""
    async with rpc.open_channel(address) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout, wait_for_ready=False
            )
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def wait_serving(
    address: str, service: str = "", *, timeout: float = 60.0, check: Callable[[], None] = lambda: None
) -> None:
    """Returns once the health service says SERVING; DeadlineExceeded names the address. `check` may raise before."""
    deadline = time.monotonic() + timeout
    while not await serving(address, service):
        check()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{address} is not serving {service or 'anything'} after {timeout:g} s")
        await asyncio.sleep(0.05)


class SessionBackend:
    """A scheduler's own door as a backend of `lockstep bench serve`: without text, so nobody knows the model's EOS ids."""

    def __init__(self, session: SchedulerSession, generation: Generation) -> None:
        self._session = session
        self._sampling = Sampling(temperature=generation.temperature, max_tokens=generation.output_len)

    @classmethod
    async def connect(cls, address: str, generation: Generation) -> Self:
        if not generation.ignore_eos:
            raise ConfigError("a scheduler knows no end-of-sequence ids: leave --ignore-eos on, or measure a router")
        return cls(await SchedulerSession.open(address), generation)

    def prepare(self, prompt: Sequence[int]) -> U32:
        return np.asarray(prompt, np.uint32)

    async def complete(self, request: U32) -> Served:
        submitted = self._session.submit(request, self._sampling)
        chunks: list[float] = []
        tokens = 0
        async for piece in submitted:
            if len(piece.tokens):
                chunks.append(piece.at)
                tokens += len(piece.tokens)
        if not chunks:
            raise LockstepError("the answer has no token")
        return Served(submitted.sent, tuple(chunks), time.perf_counter(), len(request), tokens)

    async def close(self) -> None:
        await self._session.close()
