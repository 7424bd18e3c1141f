"""The scheduler's gRPC side: one Session stream per router, turned into calls of the step loop, and its events back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from lockstep_common import rpc
from lockstep_common.clock import Clock
from lockstep_common.errors import Cancelled, InvalidRequest, LockstepError, Overloaded, Unavailable
from lockstep_common.steps import U32, u32, u64
from lockstep_proto.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from lockstep_scheduler.booking import EventBatch
from lockstep_scheduler.ledger import Ledger
from lockstep_scheduler.loop import StepLoop
from lockstep_scheduler.request import Request
from lockstep_scheduler.settings import Group

log = logging.getLogger(__name__)

ACCEPT_SECONDS = 0.020  # an Accepted waits no longer than this for the ledger
LOAD_SECONDS = 0.1
LOAD_HEARTBEAT = 1.0  # an unchanged load is repeated, so that a router can tell silence from idleness
MAX_QUEUED_MESSAGES = 4096  # a router that does not read loses its session, never a step


@dataclass(frozen=True, slots=True)
class Told:
    """Events that become a message when it is their turn to be sent: until then a plan may leave, which a device waits for."""

    batch: EventBatch
    term: int

    def message(self) -> scheduler_pb2.FromScheduler:
        return scheduler_pb2.FromScheduler(events=write_events(self.batch, self.term))


class RouterSession:
    """One router's stream. Messages down go through a bounded queue; `handles` maps its numbers to live requests."""

    def __init__(self, number: int, router_id: str) -> None:
        self.number = number
        self.router_id = router_id
        self.handles: dict[int, Request] = {}
        self.recording: dict[int, bool] = {}  # submits whose record is being written: True once they were cancelled
        self.outgoing: asyncio.Queue[scheduler_pb2.FromScheduler | Told] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self.overrun = asyncio.Event()

    def send(self, message: scheduler_pb2.FromScheduler | Told) -> None:
        try:
            self.outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self.overrun.set()


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    def __init__(self, loop: StepLoop, ledger: Ledger, clock: Clock, *, shard_id: str, grace: float) -> None:
        self._loop = loop
        self._ledger = ledger
        self._clock = clock
        self._shard_id = shard_id
        self._grace = grace
        self._numbers = itertools.count(1)
        self._sessions: dict[int, RouterSession] = {}
        self._term = 0  # of the last group: what it owes is told under it, also when it is lost
        self._advance_scheduled = False
        self._closing = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- the stream -----------------------------------------------------------------------------------------------------

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[scheduler_pb2.ToScheduler], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "hello" or not first.hello.router_id:
            await rpc.abort(context, InvalidRequest("the first message of a session must be Hello with a router_id"))
        session = RouterSession(next(self._numbers), first.hello.router_id)
        self._sessions[session.number] = session
        session.send(self._welcome())
        log.info("router %s connected", session.router_id)
        reader = asyncio.create_task(self._read(session, request_iterator))
        writer = asyncio.create_task(self._write(session, context))
        overrun = asyncio.create_task(session.overrun.wait())
        closing = asyncio.create_task(self._closing.wait())
        tasks = [reader, writer, overrun, closing]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if overrun in done:
                await rpc.abort(context, Overloaded(f"the router left {MAX_QUEUED_MESSAGES} messages unread"))
            if closing in done:
                await rpc.abort(context, Unavailable("the scheduler is shutting down"))
            for task in done:
                error = task.exception()
                if isinstance(error, LockstepError):
                    await rpc.abort(context, error)
        finally:
            for task in tasks:
                task.cancel()
            del self._sessions[session.number]
            self._loop.orphan(session.number)
            log.info("router %s left, %d requests open", session.router_id, len(session.handles))

    async def _read(self, session: RouterSession, messages: AsyncIterator[scheduler_pb2.ToScheduler]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(session, message.submit)
                case "batch":
                    for submit in message.batch.submits:
                        self._submit(session, submit)
                case "cancel":
                    if request := session.handles.get(message.cancel.handle):
                        self._loop.cancel(request)
                    elif message.cancel.handle in session.recording:
                        session.recording[message.cancel.handle] = True
                case "finish":
                    if request := session.handles.get(message.finish.handle):
                        self._loop.finish(request, message.finish.choice, message.finish.offset)
                case "resume":
                    self._resume(session, message.resume)
                case other:
                    raise InvalidRequest(f"a session has no message {other!r} after Hello")

    async def _write(self, session: RouterSession, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            item = await session.outgoing.get()
            await context.write(item.message() if isinstance(item, Told) else item)

    # -- requests -------------------------------------------------------------------------------------------------------

    def _submit(self, session: RouterSession, message: scheduler_pb2.Submit) -> None:
        if self._ledger.wanted:
            task = asyncio.create_task(self._submit_durably(session, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (request := self._queue(session, message)) is not None:
            self._accept(session, request, durable=False)

    async def _submit_durably(self, session: RouterSession, message: scheduler_pb2.Submit) -> None:
        """Write the record, answer, and only then queue: a refusal never touches Redis, a token never comes first."""
        try:
            if message.handle in session.recording:
                raise InvalidRequest(f"handle {message.handle} is in use")
            prompt = read_prompt(message)
            self._loop.check(prompt, rpc.read_sampling(message.sampling), message.n, message.adapter)
        except LockstepError as error:
            self._refuse(session, message.handle, error)
            return
        draft = Request(
            message.request_id, session.number, message.handle, prompt, rpc.read_sampling(message.sampling), message.n,
            message.priority, 0, 0.0, 0,
        )  # fmt: skip
        session.recording[message.handle] = False
        durable = await self._ledger.open(draft, ACCEPT_SECONDS)
        if session.recording.pop(message.handle):
            self._refuse(session, message.handle, Cancelled("cancelled before it was queued"))
        elif session.number in self._sessions and (request := self._queue(session, message)) is not None:
            self._accept(session, request, durable)

    def _queue(self, session: RouterSession, message: scheduler_pb2.Submit) -> Request | None:
        try:
            if message.handle in session.handles:
                raise InvalidRequest(f"handle {message.handle} is in use")
            request = self._loop.submit(
                request_id=message.request_id,
                session=session.number,
                handle=message.handle,
                prompt=read_prompt(message),
                sampling=rpc.read_sampling(message.sampling),
                n=message.n,
                priority=message.priority,
                salt=message.cache_salt,
                deadline=self._clock.now() + message.deadline_ms / 1000 if message.deadline_ms else math.inf,
                adapter=message.adapter,
            )
        except LockstepError as error:
            self._refuse(session, message.handle, error)
            return None
        session.handles[message.handle] = request
        return request

    def _accept(self, session: RouterSession, request: Request, durable: bool) -> None:
        accepted = scheduler_pb2.Accepted(handle=request.handle, durable=durable)
        session.send(scheduler_pb2.FromScheduler(accepted=accepted))
        if not self._advance_scheduled:  # all requests that are here already go into one plan
            self._advance_scheduled = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _refuse(self, session: RouterSession, handle: int, error: LockstepError) -> None:
        refused = scheduler_pb2.Refused(handle=handle, error=rpc.detail(error))
        session.send(scheduler_pb2.FromScheduler(refused=refused))

    def _resume(self, session: RouterSession, message: scheduler_pb2.Resume) -> None:
        handles, choices, offsets = u64(message.handles), u32(message.choices), u32(message.offsets)
        if not len(message.request_ids) == len(handles) == len(choices) == len(offsets):
            raise InvalidRequest("Resume needs one request id, handle, choice and offset for each entry")
        wanted: dict[tuple[str, int], dict[int, int]] = {}
        for request_id, handle, choice, offset in zip(
            message.request_ids, handles.tolist(), choices.tolist(), offsets.tolist(), strict=True
        ):
            wanted.setdefault((request_id, handle), {})[choice] = offset
        for (request_id, handle), at in wanted.items():
            held = self._loop.find(request_id)
            if held is not None:
                session.handles[handle] = held
            try:
                self._loop.resume(request_id, session.number, handle, at)
            except LockstepError as error:
                session.handles.pop(handle, None)
                self._refuse(session, handle, error)

    def _advance(self) -> None:
        self._advance_scheduled = False
        self._loop.advance()

    # -- events, load ---------------------------------------------------------------------------------------------------

    def emit(self, batch: EventBatch) -> None:
        """The step loop's way out: one message for one session."""
        session = self._sessions.get(batch.session)
        if session is None:
            return
        if (group := self._loop.group) is not None:
            self._term = group.term
        session.send(Told(batch, self._term))
        if batch.ends.any():
            for handle in set(batch.handles[batch.ends != 0].tolist()):
                request = session.handles.get(handle)
                if request is not None and request.done:
                    del session.handles[handle]

    def group_changed(self) -> None:
        """Tells every router at once that the group has formed, or is lost."""
        for session in self._sessions.values():
            if self._loop.group is not None:
                session.send(scheduler_pb2.FromScheduler(facts=write_facts(self._loop.group)))
            session.send(scheduler_pb2.FromScheduler(load=self.load()))

    async def publish_load(self) -> None:
        """Sends the load to every router when it has changed, and as a heartbeat; until cancelled."""
        last, sent = None, 0.0
        while True:
            await asyncio.sleep(LOAD_SECONDS)
            load, now = self.load(), self._clock.now()
            if load != last or now - sent >= LOAD_HEARTBEAT:
                message = scheduler_pb2.FromScheduler(load=load)
                for session in self._sessions.values():
                    session.send(message)
                last, sent = load, now

    def load(self) -> common_pb2.Load:
        loop, stats = self._loop, self._loop.stats
        return common_pb2.Load(
            running=loop.running,
            waiting=len(loop.waiting),
            waiting_uncached_tokens=loop.waiting_uncached_tokens,
            kv_usage=loop.kv_usage,
            step=loop.step,
            silence_ms=int(1000 * loop.silence),
            ready=loop.ready,
            reforming=loop.reforming,
            draining=loop.draining,
            max_running=loop.group.max_rows * len(loop.group.ranks) if loop.group else 0,
            generation_tokens=stats.generation_tokens,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            preemptions=stats.preemptions,
            overrun_row_steps=stats.overrun_row_steps,
            durable=self._ledger.durable,
        )

    async def drain(self, timeout: float) -> None:
        """Takes nothing new, lets what runs end, then closes the sessions."""
        self._loop.draining = True
        self.group_changed()
        deadline = self._clock.now() + timeout
        while self._loop.unfinished and self._sessions and self._clock.now() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)  # the last events are on their way
        self._closing.set()

    def _welcome(self) -> scheduler_pb2.FromScheduler:
        group = self._loop.group
        welcome = scheduler_pb2.Welcome(
            shard_id=self._shard_id,
            term=group.term if group else 0,
            grace_ms=int(1000 * self._grace),
            facts=write_facts(group) if group else None,
            load=self.load(),
        )
        return scheduler_pb2.FromScheduler(welcome=welcome)


def read_prompt(message: scheduler_pb2.Submit) -> U32:
    if len(message.prompt) % 4:
        raise InvalidRequest(f"a prompt of {len(message.prompt)} bytes is not whole token ids", param="prompt")
    return u32(message.prompt)


def write_events(batch: EventBatch, term: int) -> scheduler_pb2.Events:
    message = scheduler_pb2.Events(
        term=term,
        handles=batch.handles.tobytes(),
        choices=batch.choices.tobytes(),
        offsets=batch.offsets.tobytes(),
        counts=batch.counts.tobytes(),
        ends=batch.ends.tobytes(),
        tokens=batch.tokens.tobytes(),
        logprobs=batch.logprobs.tobytes(),
        cached=batch.cached.tobytes(),
        errors=[scheduler_pb2.EntryError(entry=entry, error=rpc.detail(error)) for entry, error in batch.errors],
    )
    for handle, scores in batch.prompts:
        message.prompts.add(handle=handle, scores=rpc.write_scores(scores))
    if batch.top is not None:
        top = batch.top
        message.top.CopyFrom(
            common_pb2.TopLogprobs(
                index=top.index.tobytes(),
                counts=top.counts.tobytes(),
                ids=top.ids.tobytes(),
                values=top.values.tobytes(),
            )
        )
    return message


def write_facts(group: Group) -> scheduler_pb2.GroupFacts:
    return scheduler_pb2.GroupFacts(
        model=group.facts.model,
        epoch=group.epoch,
        max_model_len=group.max_model_len,
        vocab_size=group.facts.vocab_size,
        block_size=group.facts.groups[0].block_size,
        max_choices=group.max_rows,
        dp=group.dp,
        cp=group.cp,
        device=group.facts.device,
        dtype=group.facts.dtype,
    )
