"""Sessions to schedulers: one gRPC stream per scheduler carries all requests that this router sent there.

A stream that breaks is opened again with a backoff. Requests that the scheduler had accepted are resumed from the tokens
that came; if it is not back within its grace (and the router's own bound) they are ended by an error. Requests that it
had not accepted are given back at once, to be placed elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
import numpy as np

from lockstep_common import rpc
from lockstep_common.clock import Clock
from lockstep_common.errors import LockstepError, Unavailable
from lockstep_common.steps import f32, u32, u64
from lockstep_proto.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from lockstep_router.fleet import GroupFacts, Load, Sink, Submission
from lockstep_router.output import End
from lockstep_router.policy import GroupView

log = logging.getLogger(__name__)

WELCOME_SECONDS = 5.0
SILENCE_SECONDS = 5.0  # a scheduler repeats its load each second; one that is silent for so long gets nothing new
BACKOFF_SECONDS = (0.1, 2.0)  # first and longest pause between attempts to connect

_handles = itertools.count(1)  # never used twice, on no stream of this process


class _Entry:
    """A submission until its last event. Counts towards its link's load for exactly as long as it stands in the table."""

    __slots__ = ("accepted", "ended", "seen", "sink", "submission")

    def __init__(self, submission: Submission, sink: Sink) -> None:
        self.submission = submission
        self.sink = sink
        self.accepted = False
        self.seen = False  # a snapshot that counts it has come
        self.ended: set[int] = set()  # choices whose end has come


class SchedulerSession:
    """The link to one scheduler. `run` keeps it up until cancelled."""

    def __init__(
        self,
        address: str,
        *,
        router_id: str,
        clock: Clock,
        security: rpc.Security = rpc.PLAIN,
        reconnect_seconds: float = 10.0,
    ) -> None:
        self._address = address
        self._router_id = router_id
        self._clock = clock
        self._security = security
        self._reconnect_seconds = reconnect_seconds
        self._entries: dict[int, _Entry] = {}
        self._sent_choices = 0  # of entries that no snapshot counts yet
        self._sent_tokens = 0
        self._outgoing: deque[scheduler_pb2.ToScheduler] = deque()
        self._wake = asyncio.Event()
        self._facts: GroupFacts | None = None
        self._load = Load()
        self._term = 0
        self._grace = 0.0
        self._heard = 0.0
        self._open = False
        self._pause = BACKOFF_SECONDS[0]
        self._expiry: asyncio.TimerHandle | None = None  # gives requests up that wait for a resumed stream

    # --- what placement and requests use

    @property
    def address(self) -> str:
        return self._address

    @property
    def facts(self) -> GroupFacts | None:
        return self._facts

    @property
    def load(self) -> Load:
        return self._load

    @property
    def in_flight(self) -> int:
        return len(self._entries)

    @property
    def connected(self) -> bool:
        return self._open and self._clock.now() - self._heard < SILENCE_SECONDS

    def view(self) -> GroupView:
        load = self._load
        return GroupView(
            ready=self.connected and load.ready and not load.draining and self._facts is not None,
            reforming=load.reforming,
            running=load.running,
            waiting=load.waiting,
            max_running=load.max_running,
            waiting_uncached_tokens=load.waiting_uncached_tokens,
            kv_usage=load.kv_usage,
            sent_choices=self._sent_choices,
            sent_tokens=self._sent_tokens,
        )

    def submit(self, submission: Submission, sink: Sink) -> int:
        handle = next(_handles)
        self._entries[handle] = _Entry(submission, sink)
        self._sent_choices += submission.n
        self._sent_tokens += len(submission.prompt)
        self._send(scheduler_pb2.ToScheduler(submit=_write_submit(handle, submission)))
        return handle

    def cancel(self, handle: int) -> None:
        if handle in self._entries:
            self._forget(handle)
            if self._open:
                self._send(scheduler_pb2.ToScheduler(cancel=scheduler_pb2.Cancel(handle=handle)))

    def finish(self, handle: int, choice: int, offset: int) -> None:
        if handle in self._entries and self._open:  # on a broken stream it is repeated after Resume
            message = scheduler_pb2.Finish(handle=handle, choice=choice, offset=offset)
            self._send(scheduler_pb2.ToScheduler(finish=message))

    def _send(self, message: scheduler_pb2.ToScheduler) -> None:
        self._outgoing.append(message)
        self._wake.set()

    def _forget(self, handle: int) -> None:
        entry = self._entries.pop(handle)
        self._count_as_seen(entry)

    def _count_as_seen(self, entry: _Entry) -> None:
        if not entry.seen:
            entry.seen = True
            self._sent_choices -= entry.submission.n
            self._sent_tokens -= len(entry.submission.prompt)

    # --- the stream

    async def run(self) -> None:
        """Connects, serves, and connects again, until cancelled."""
        channel = rpc.open_channel(self._address, self._security)
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        try:
            while True:
                try:
                    await self._serve(stub)
                except grpc.RpcError as error:
                    self._broke(rpc.from_rpc_error(error, f"scheduler {self._address}"))
                except LockstepError as error:
                    self._broke(error)
                await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
                self._pause = min(self._pause * 2, BACKOFF_SECONDS[1])
        finally:
            self._open = False
            self._give_up()
            await channel.close()

    async def _serve(self, stub: Any) -> None:
        """One stream from Hello to its end, which is always an error."""
        call = stub.Session(metadata=rpc.call_metadata(self._security))
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(WELCOME_SECONDS):
                await call.write(scheduler_pb2.ToScheduler(hello=scheduler_pb2.Hello(router_id=self._router_id)))
                first = await call.read()
            if first is grpc.aio.EOF:
                raise await _status(call, self._address)
            if first.WhichOneof("message") != "welcome":
                raise Unavailable(f"scheduler {self._address} did not begin its session with Welcome")
            self._welcome(first.welcome)
            writer = asyncio.create_task(self._write(call))
            while (message := await call.read()) is not grpc.aio.EOF:
                self._receive(message)
            raise await _status(call, self._address)
        except TimeoutError:
            raise Unavailable(f"scheduler {self._address} did not answer within {WELCOME_SECONDS:g} s") from None
        finally:
            if writer is not None:
                writer.cancel()
            call.cancel()

    def _broke(self, error: LockstepError) -> None:
        """A stream ended, or an attempt to open one failed."""
        if not self._open:
            log.debug("scheduler %s: %s", self._address, error.message)
            return
        log.warning("session to scheduler %s broke: %s", self._address, error.message)
        self._open = False
        seconds = min(self._grace, self._reconnect_seconds)
        self._expiry = asyncio.get_running_loop().call_later(seconds, self._give_up)
        self._give_back_unaccepted()

    async def _write(self, call: Any) -> None:
        try:
            while True:
                while self._outgoing:
                    await call.write(self._outgoing.popleft())
                self._wake.clear()
                await self._wake.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            call.cancel()  # the reader reports why

    def _welcome(self, message: scheduler_pb2.Welcome) -> None:
        self._heard = self._clock.now()
        self._grace = message.grace_ms / 1000
        self._term = max(self._term, message.term)
        if message.HasField("facts"):
            self._facts = _read_facts(message.facts)
        self._load = _read_load(message.load)
        self._outgoing.clear()
        self._open = True
        self._pause = BACKOFF_SECONDS[0]
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._entries:
            self._resume()
        log.info("session to scheduler %s (shard %s) is open", self._address, message.shard_id)

    def _resume(self) -> None:
        ids: list[str] = []
        handles: list[int] = []
        choices: list[int] = []
        offsets: list[int] = []
        for handle, entry in self._entries.items():
            for choice, offset in enumerate(entry.sink.received()):
                ids.append(entry.submission.request_id)
                handles.append(handle)
                choices.append(choice)
                offsets.append(offset)
        self._send(
            scheduler_pb2.ToScheduler(
                resume=scheduler_pb2.Resume(
                    request_ids=ids,
                    handles=np.array(handles, "<u8").tobytes(),
                    choices=np.array(choices, "<u4").tobytes(),
                    offsets=np.array(offsets, "<u4").tobytes(),
                )
            )
        )
        for handle, entry in self._entries.items():
            for choice, offset in entry.sink.stopped().items():
                if choice not in entry.ended:
                    self.finish(handle, choice, offset)

    # --- messages

    def _receive(self, message: scheduler_pb2.FromScheduler) -> None:
        self._heard = self._clock.now()
        match message.WhichOneof("message"):
            case "events":
                self._events(message.events)
            case "accepted":
                if (entry := self._entries.get(message.accepted.handle)) is not None:
                    entry.accepted = True
                    self._tell(message.accepted.handle, entry.sink.accepted)
            case "refused":
                if (entry := self._entries.get(message.refused.handle)) is not None:
                    self._forget(message.refused.handle)
                    error = rpc.from_detail(message.refused.error)
                    self._tell(message.refused.handle, partial(entry.sink.refused, error))
            case "load":
                self._load = _read_load(message.load)
                for entry in self._entries.values():
                    if entry.accepted:  # sent before this snapshot was taken
                        self._count_as_seen(entry)
            case "facts":
                self._facts = _read_facts(message.facts)
            case "welcome" | None:
                pass  # a second Welcome, or a message of a newer version

    def _events(self, message: scheduler_pb2.Events) -> None:
        """Hands each entry to its request. An error in one request's handling ends that request only."""
        if message.term < self._term:
            return  # from a scheduler that has been replaced
        self._term = message.term
        handles, choices = u64(message.handles).tolist(), u32(message.choices).tolist()
        offsets, counts = u32(message.offsets).tolist(), u32(message.counts).tolist()
        ends, tokens = message.ends, u32(message.tokens).tolist()
        logprobs: list[float] = f32(message.logprobs).tolist() if message.logprobs else []
        tops = _read_tops(message.top, len(tokens)) if message.HasField("top") else ()
        cached = u32(message.cached).tolist() if message.cached else ()
        errors = {e.entry: rpc.from_detail(e.error) for e in message.errors} if message.errors else {}
        for prompt in message.prompts:
            if (entry := self._entries.get(prompt.handle)) is not None:
                self._tell(prompt.handle, partial(_tell_scores, entry.sink, prompt.scores))
        start = 0
        for i, handle in enumerate(handles):
            stop = start + counts[i]
            entry = self._entries.get(handle)
            if entry is not None:
                end = End(ends[i])
                entry.accepted = True
                if end:
                    entry.ended.add(choices[i])
                    if len(entry.ended) == entry.submission.n:
                        self._forget(handle)
                try:
                    entry.sink.event(
                        choices[i],
                        offsets[i],
                        tokens[start:stop],
                        end,
                        logprobs[start:stop],
                        tops[start:stop],
                        cached[i] if cached and offsets[i] == 0 else -1,
                        errors.get(i),
                    )
                except Exception as fault:
                    self._end_faulty(handle, entry, fault)
            start = stop

    def _tell(self, handle: int, call: Callable[[], None]) -> None:
        entry = self._entries.get(handle)
        try:
            call()
        except Exception as fault:
            if entry is not None:
                self._end_faulty(handle, entry, fault)
            else:
                log.exception("request %d: handling its last event failed", handle)

    def _end_faulty(self, handle: int, entry: _Entry, fault: Exception) -> None:
        log.error("request %s: handling an event failed", entry.submission.request_id, exc_info=fault)
        self.cancel(handle)
        entry.sink.lost(LockstepError("the router failed on this request's output"))

    # --- breaks

    def _give_back_unaccepted(self) -> None:
        error = Unavailable(f"scheduler {self._address} went away before it took the request", retry_after_ms=1000)
        for handle, entry in list(self._entries.items()):
            if not entry.accepted:
                self._forget(handle)
                self._tell(handle, partial(entry.sink.lost, error))

    def _give_up(self) -> None:
        self._expiry = None
        error = Unavailable(f"scheduler {self._address} went away and did not come back", retry_after_ms=1000)
        for handle, entry in list(self._entries.items()):
            self._forget(handle)
            self._tell(handle, partial(entry.sink.lost, error))


async def _status(call: Any, address: str) -> LockstepError:
    """What a stream ended with."""
    code = await call.code()
    for key, value in await call.trailing_metadata() or ():
        if key == rpc.ERROR_TRAILER and isinstance(value, bytes):
            return rpc.from_detail(common_pb2.ErrorDetail.FromString(value))
    return Unavailable(f"scheduler {address}: {await call.details() or code.name}")


# --- messages to values and back --------------------------------------------------------------------------------------


def _write_submit(handle: int, submission: Submission) -> scheduler_pb2.Submit:
    return scheduler_pb2.Submit(
        handle=handle,
        request_id=submission.request_id,
        prompt=np.array(submission.prompt, "<u4").tobytes(),
        sampling=rpc.write_sampling(submission.sampling),
        n=submission.n,
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        deadline_ms=submission.deadline_ms,
    )


def _tell_scores(sink: Sink, message: common_pb2.PromptLogprobs) -> None:
    sink.scored(rpc.read_scores(message))


def _read_facts(message: scheduler_pb2.GroupFacts) -> GroupFacts:
    return GroupFacts(
        model=message.model,
        epoch=message.epoch,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        block_size=message.block_size,
        max_choices=message.max_choices,
        dp=message.dp,
        cp=message.cp,
        device=message.device,
        dtype=message.dtype,
    )


def _read_load(message: common_pb2.Load) -> Load:
    return Load(
        running=message.running,
        waiting=message.waiting,
        waiting_uncached_tokens=message.waiting_uncached_tokens,
        kv_usage=message.kv_usage,
        step=message.step,
        silence_ms=message.silence_ms,
        ready=message.ready,
        draining=message.draining,
        max_running=message.max_running,
        generation_tokens=message.generation_tokens,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        preemptions=message.preemptions,
        overrun_row_steps=message.overrun_row_steps,
        durable=message.durable,
        reforming=message.reforming,
    )


def _read_tops(message: common_pb2.TopLogprobs, tokens: int) -> Sequence[Sequence[tuple[int, float]]]:
    """The n best of each token of a message; empty where not asked."""
    tops: list[Sequence[tuple[int, float]]] = [()] * tokens
    pairs = list(zip(u32(message.ids).tolist(), f32(message.values).tolist(), strict=True))
    start = 0
    for index, count in zip(u32(message.index).tolist(), u32(message.counts).tolist(), strict=True):
        tops[index] = pairs[start : start + count]
        start += count
    return tops
