"""worker.proto over an `Engine`: converts messages to plans and outcomes to messages; everything else is in `protocol`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from lockstep_common import rpc
from lockstep_common.errors import Conflict, DeadlineExceeded, InvalidRequest, LockstepError, Unavailable
from lockstep_common.steps import (
    NO_U32,
    U32,
    AddRow,
    Body,
    GroupConfig,
    Header,
    Kind,
    Plan,
    PlanOutcome,
    PrefillPass,
    RowState,
    TableWrite,
    u32,
)
from lockstep_proto.v1 import worker_pb2, worker_pb2_grpc
from lockstep_worker.driver import Driver, State
from lockstep_worker.profile import RECEIVED, SENT, Recording

log = logging.getLogger(__name__)

SERVICE = "lockstep.v1.Worker"
_GOODBYE_S = 1.0  # how long a stopping worker goes on sending outcomes
_DEFAULT_INTERVAL_MS = 1000
_DEFAULT_PROFILE_MS = 60_000
_PROFILE_POLL_S = 0.01
_PIECE_BYTES = 1 << 20

Context = grpc.aio.ServicerContext[Any, Any]


class _Stream:
    """One Steps call. `ended` takes the error that ends it from outside; `news` wakes its sender."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[LockstepError] = asyncio.get_running_loop().create_future()
        self.news = asyncio.Event()

    def end(self, error: LockstepError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


class WorkerServer(worker_pb2_grpc.WorkerServicer):
    """The servicer. One Steps stream owns the worker, the one whose plan was accepted last; outcomes go there.

    A plan with a stale epoch or term is refused, so only the scheduler with the highest term can own the worker. The first
    plan of a stream claims it, also if it is a repeat. Attach ends the owning stream: what is recorded after the reply
    waits for the next owner.
    """

    def __init__(self, driver: Driver) -> None:
        """Must be made inside a running event loop, before `driver.start`."""
        self._driver = driver
        self._plans = driver.plans
        self._owner: _Stream | None = None
        self._watchers: set[asyncio.Event] = set()  # one a Status call
        self._recording = asyncio.Lock()
        self._seen = (driver.state, driver.message)
        self.on_state: Callable[[State], None] = lambda state: None
        loop = asyncio.get_running_loop()
        driver.changed = lambda: _call_soon(loop, self._changed)
        driver.read_plan = read_plan

    def _changed(self) -> None:
        if self._owner is not None:
            self._owner.news.set()
        now = (self._driver.state, self._driver.message)
        if now != self._seen:
            self._seen = now
            for watcher in self._watchers:
                watcher.set()
            if now[0] == State.FAILED:
                self._end_owner(self._failure())
            elif now[0] == State.WAITING:
                self._end_owner(Unavailable(f"this worker left its group: {now[1]}"))
            self.on_state(now[0])

    def _failure(self) -> LockstepError:
        return Unavailable(f"this worker has failed: {self._driver.message}")

    async def Configure(self, request: worker_pb2.ConfigureRequest, context: Context) -> worker_pb2.ConfigureReply:
        try:
            self._plans.check(request.epoch, request.term)
            await asyncio.to_thread(self._driver.interrupt, request.epoch)
            facts = await asyncio.wrap_future(self._driver.configure(_group_config(request)))
        except LockstepError as error:
            await rpc.abort(context, error)
        return worker_pb2.ConfigureReply(facts=rpc.write_facts(facts))

    async def Expel(self, request: worker_pb2.ExpelRequest, context: Context) -> worker_pb2.ExpelReply:
        try:
            self._plans.check(request.epoch, request.term)
        except LockstepError as error:
            await rpc.abort(context, error)
        self._driver.expel(request.reason)
        return worker_pb2.ExpelReply()

    async def Attach(self, request: worker_pb2.AttachRequest, context: Context) -> worker_pb2.AttachReply:
        try:
            found = self._plans.attach(request.epoch, request.term)
        except LockstepError as error:
            await rpc.abort(context, error)
        self._end_owner(Conflict(f"a scheduler attached with term {request.term}"))
        return worker_pb2.AttachReply(
            accepted=found.accepted,
            started=found.started,
            finished=found.finished,
            headers=found.headers,
            rows=[_row_state(state) for state in found.rows],
            outcomes=[outcome_message(outcome) for outcome in found.outcomes],
        )

    async def Status(
        self, request: worker_pb2.StatusRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerStatus]:
        interval_s = (request.interval_ms or _DEFAULT_INTERVAL_MS) / 1000
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                yield self._status()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), interval_s)
        finally:
            self._watchers.discard(changed)

    def _status(self) -> worker_pb2.WorkerStatus:
        driver, plans = self._driver, self._plans
        return worker_pb2.WorkerStatus(
            state=worker_pb2.WorkerStatus.State.ValueType(driver.state),
            epoch=plans.epoch,
            term=plans.term,
            accepted=plans.accepted,
            started=plans.started,
            finished=plans.finished,
            message=driver.message,
            facts=rpc.write_facts(driver.facts) if driver.facts is not None else None,
            loaded=driver.loaded,
            nonfinite_rows=driver.nonfinite_rows,
        )

    async def Profile(
        self, request: worker_pb2.ProfileRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ProfilePiece]:
        if self._recording.locked():
            await rpc.abort(context, Conflict("a profile is being recorded already; wait until it is done"))
        async with self._recording:
            recording = Recording(self._driver.timeline)
            timeout_s = (request.timeout_ms or _DEFAULT_PROFILE_MS) / 1000
            try:
                steps = await self._record(recording, max(1, request.steps), timeout_s)
            except LockstepError as error:
                await rpc.abort(context, error)
            yield worker_pb2.ProfilePiece(steps=steps)
            trace = await asyncio.to_thread(recording.trace)
            for start in range(0, len(trace), _PIECE_BYTES):
                yield worker_pb2.ProfilePiece(steps=steps, data=trace[start : start + _PIECE_BYTES])

    async def _record(self, recording: Recording, steps: int, timeout_s: float) -> int:
        """The steps that ran meanwhile. The profiler is switched on and off by the thread that runs the steps."""
        driver = self._driver
        if driver.state != State.READY:
            raise Unavailable("this worker is in no group, so it runs no steps to record")
        try:
            await asyncio.wrap_future(driver.between_plans(recording.start, "starting a profile"))
            before, deadline = driver.steps, time.monotonic() + timeout_s
            while driver.steps - before < steps and driver.state == State.READY and time.monotonic() < deadline:
                await asyncio.sleep(_PROFILE_POLL_S)
        finally:
            await asyncio.shield(asyncio.wrap_future(driver.between_plans(recording.stop, "stopping a profile")))
        if driver.steps == before:
            raise DeadlineExceeded(f"no step ran within {timeout_s:g} s: profile while requests run")
        return driver.steps - before

    async def Steps(self, request_iterator: AsyncIterator[worker_pb2.Plan], context: Context) -> None:  # type: ignore[override]
        stream = _Stream()
        receiving = asyncio.create_task(self._receive(context, stream))
        sending = asyncio.create_task(self._send(context, stream))
        try:
            await asyncio.wait((receiving, sending, stream.ended), return_when=asyncio.FIRST_COMPLETED)
            error = stream.ended.result() if stream.ended.done() else _fault_of(receiving) or _fault_of(sending)
            if error is not None:
                await rpc.abort(context, error)
        finally:
            if self._owner is stream:
                self._owner = None
            receiving.cancel()
            sending.cancel()
            await asyncio.gather(receiving, sending, return_exceptions=True)

    async def _receive(self, context: Context, stream: _Stream) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            now_ns = time.perf_counter_ns()
            if self._driver.state == State.FAILED:
                raise self._failure()
            plan = plan_from(message, whole=self._driver.followed)
            self._driver.timeline.mark(RECEIVED, plan.header.seq)
            fresh = self._plans.accept(plan, now_ns)
            if self._owner is not stream:
                self._end_owner(Conflict(f"another stream took over with term {plan.body.term}"))
                self._owner = stream
                stream.news.set()
            if fresh:
                self._driver.submit(plan)

    async def _send(self, context: Context, stream: _Stream) -> None:
        while True:
            await stream.news.wait()
            stream.news.clear()
            if self._owner is stream and (outcomes := self._plans.take()):
                await context.write(worker_pb2.Outcomes(plans=[outcome_message(outcome) for outcome in outcomes]))
                for outcome in outcomes:
                    self._driver.timeline.mark(SENT, outcome.seq, outcome.first + outcome.steps - 1)

    def _end_owner(self, error: LockstepError) -> None:
        if self._owner is not None:
            self._owner.end(error)
            self._owner = None


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)


def _fault_of(task: asyncio.Task[None]) -> LockstepError | None:
    """Why a half of a stream ended, if that was an error. A caller that went away is none."""
    if not task.done() or task.cancelled() or (error := task.exception()) is None:
        return None
    if isinstance(error, LockstepError):
        return error
    if isinstance(error, grpc.aio.BaseError | grpc.RpcError | asyncio.InvalidStateError):
        return None
    log.error("a steps stream failed", exc_info=error)
    return LockstepError(f"the worker could not handle a message: {error!r}")


async def serve(driver: Driver, address: str, security: rpc.Security = rpc.PLAIN) -> int:
    """Serves until SIGTERM or SIGINT (returns 0) or until the engine has failed (returns 1). A second signal exits at once."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()

    def finish(code: int) -> None:
        if not stop.done():
            stop.set_result(code)

    def on_signal() -> None:
        if stop.done():
            os._exit(130)
        finish(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = rpc.make_server(security)
    servicer = WorkerServer(driver)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    health = rpc.Health(server, SERVICE)
    port = rpc.bind(server, address, security)
    pending: set[asyncio.Task[None]] = set()

    def on_state(state: State) -> None:
        task = asyncio.ensure_future(health.ready(state == State.READY))
        pending.add(task)
        task.add_done_callback(pending.discard)
        if state == State.FAILED:
            loop.call_later(_GOODBYE_S, finish, 1)

    servicer.on_state = on_state
    await server.start()
    await health.start()
    log.info("listening on %s:%d", address.rpartition(":")[0], port)
    driver.start()
    code = await stop
    await health.draining()
    stopped = await asyncio.to_thread(driver.stop, _GOODBYE_S)
    await server.stop(_GOODBYE_S if code == 0 else 0)
    if not stopped:
        log.warning("the engine is still busy (%s); leaving it", driver.message or driver.state.name)
        logging.shutdown()
        os._exit(code)
    return code


def plan_from(message: worker_pb2.Plan, *, whole: bool = False) -> Plan:
    """`whole`: with its bytes. InvalidRequest if an array is not whole."""
    try:
        data = message.SerializeToString() if whole else b""
        return Plan(_header(message.header), _body(message.body), message.header, data)
    except (DecodeError, ValueError) as error:
        raise InvalidRequest(f"a plan cannot be read: {error}") from error


def read_plan(data: bytes) -> Plan:
    """A plan of its bytes. InvalidRequest if they are none."""
    try:
        return plan_from(worker_pb2.Plan.FromString(data))
    except DecodeError as error:
        raise InvalidRequest(f"a plan cannot be read: {error}") from error


def _header(data: bytes) -> Header:
    message = worker_pb2.Header.FromString(data)
    return Header(
        epoch=message.epoch,
        seq=message.seq,
        kind=Kind(message.kind),
        first_step=message.first_step,
        k=message.k,
        row_bucket=message.row_bucket,
        micro_chunks=tuple(u32(message.micro_chunks).tolist()),
        placement_version=message.placement_version,
        moved_layer=message.moved_layer,
        capture_bucket=message.capture_bucket,
        report_loads=message.report_loads,
        moved_experts=tuple(u32(message.moved_experts).tolist()),
        dual_batch=message.dual_batch,
    )


def _body(message: worker_pb2.Body) -> Body:
    return Body(
        term=message.term,
        ack=message.ack,
        notice=message.notice,
        removes=u32(message.removes),
        adds=tuple(_add_row(add) for add in message.adds),
        table_writes=tuple(
            TableWrite(w.group, u32(w.rows), u32(w.starts), u32(w.counts), u32(w.blocks)) for w in message.table_writes
        ),
        zeroes=_by_group(message.zeroes),
        copies=_copies(message.copies),
        rows=u32(message.rows),
        passes=tuple(PrefillPass(u32(p.rows), u32(p.starts), u32(p.counts)) for p in message.passes),
    )


def _by_group(lists: Any) -> tuple[U32, ...]:
    """One array a KV group, up to the highest group named."""
    arrays = [NO_U32] * max((blocks.group + 1 for blocks in lists), default=0)
    for blocks in lists:
        arrays[blocks.group] = u32(blocks.blocks)
    return tuple(arrays)


def _copies(messages: Any) -> tuple[tuple[U32, U32], ...]:
    pairs = [(NO_U32, NO_U32)] * max((copies.group + 1 for copies in messages), default=0)
    for copies in messages:
        pairs[copies.group] = (u32(copies.sources), u32(copies.destinations))
    return tuple(pairs)


def _add_row(message: worker_pb2.AddRow) -> AddRow:
    return AddRow(
        row=message.row,
        request_id=message.request_id,
        choice=message.choice,
        prompt_len=message.prompt_len,
        tokens=u32(message.tokens),
        computed=message.computed,
        blocks=_by_group(message.blocks),
        sampling=rpc.read_sampling(message.sampling),
        limit=message.limit,
    )


def _group_config(message: worker_pb2.ConfigureRequest) -> GroupConfig:
    return GroupConfig(
        epoch=message.epoch,
        term=message.term,
        rank=message.rank,
        dp_rank=message.dp_rank,
        cp_rank=message.cp_rank,
        dp=message.dp,
        cp=message.cp,
        store_host=message.store_host,
        store_port=message.store_port,
        max_rows=message.max_rows,
        max_model_len=message.max_model_len,
        max_batched_tokens=message.max_batched_tokens,
        max_window=message.max_window,
        num_blocks=message.num_blocks,
        peers=tuple(message.peers),
        capture_by_use=message.capture_by_use,
    )


def outcome_message(outcome: PlanOutcome) -> worker_pb2.PlanOutcome:
    message = worker_pb2.PlanOutcome(
        epoch=outcome.epoch,
        seq=outcome.seq,
        dp_rank=outcome.dp_rank,
        first=outcome.first,
        steps=outcome.steps,
        last=outcome.last,
        counts=outcome.counts.tobytes(),
        words=outcome.words.tobytes(),
        logprobs=outcome.logprobs.tobytes(),
        step_ns=outcome.step_ns,
        turnaround_ns=outcome.turnaround_ns,
        idle_ns=outcome.idle_ns,
    )
    if outcome.top is not None:
        message.top.index = outcome.top.index.tobytes()
        message.top.counts = outcome.top.counts.tobytes()
        message.top.ids = outcome.top.ids.tobytes()
        message.top.values = outcome.top.values.tobytes()
    for chunk in outcome.prompts:
        message.prompts.add(row=chunk.row, start=chunk.start, scores=rpc.write_scores(chunk.scores))
    for row, why in outcome.faults:
        message.faults.add(row=row, message=why)
    if (loads := outcome.expert_loads) is not None:
        message.expert_loads.layers, message.expert_loads.experts = loads.prefill.shape
        message.expert_loads.prefill = loads.prefill.astype("<u4", copy=False).tobytes()
        message.expert_loads.decode = loads.decode.astype("<u4", copy=False).tobytes()
        message.expert_loads.steps = loads.steps
    return message


def _row_state(state: RowState) -> worker_pb2.RowState:
    return worker_pb2.RowState(
        row=state.row,
        request_id=state.request_id,
        choice=state.choice,
        offset=state.offset,
        blocks=[worker_pb2.BlockList(group=g, blocks=blocks.tobytes()) for g, blocks in enumerate(state.blocks)],
    )
