"""The scheduler's side of worker.proto: plans out, outcomes in, as the dataclasses of lockstep_common.steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np

from lockstep_common import rpc
from lockstep_common.errors import Conflict, DeadlineExceeded, LockstepError, Unavailable
from lockstep_common.steps import (
    AddRow,
    Attachment,
    Body,
    ExpertLoads,
    GroupConfig,
    Header,
    Kind,
    KvGroup,
    PlanOutcome,
    PromptChunk,
    RowState,
    TopLogprobs,
    WorkerFacts,
    f32,
    u32,
    u64,
)
from lockstep_proto.v1 import worker_pb2, worker_pb2_grpc

_STATE = worker_pb2.WorkerStatus


@dataclass(frozen=True, slots=True)
class Found:
    """A worker that has loaded its model: the highest epoch and term it accepted, whether it still is in that epoch's group."""

    epoch: int
    term: int
    in_group: bool
    facts: WorkerFacts


class WorkerClient:
    """One worker. Every wait is bounded by the caller; errors are LockstepErrors that name the worker's address."""

    def __init__(self, address: str, security: rpc.Security = rpc.PLAIN) -> None:
        self.address = address
        self._metadata = rpc.call_metadata(security)
        self._channel = rpc.open_channel(address, security)
        self._stub: Any = worker_pb2_grpc.WorkerStub(
            self._channel
        )  # the generated async stub types do not cover aio calls
        self._call: Any = None
        self._outgoing: asyncio.Queue[worker_pb2.Plan] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None

    async def loaded(self, timeout: float) -> Found:
        """Waits until the worker has loaded its model."""
        last = "no answer"
        try:
            async with asyncio.timeout(timeout):
                while True:
                    call = self._stub.Status(worker_pb2.StatusRequest(interval_ms=200), metadata=self._metadata)
                    try:
                        while (status := await call.read()) is not grpc.aio.EOF:
                            last = status.message or f"{status.loaded:.0%} loaded"
                            if status.state == _STATE.FAILED:
                                raise Unavailable(f"worker {self.address} failed: {status.message}")
                            if status.state in (_STATE.WAITING, _STATE.READY):
                                in_group = status.state == _STATE.READY
                                return Found(status.epoch, status.term, in_group, read_facts(status.facts))
                    except grpc.aio.AioRpcError as error:
                        last = error.details() or error.code().name
                    finally:
                        call.cancel()
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise DeadlineExceeded(f"worker {self.address} is not loaded after {timeout:.0f} s: {last}") from None

    async def configure(self, config: GroupConfig, timeout: float) -> WorkerFacts:
        request = worker_pb2.ConfigureRequest(
            epoch=config.epoch,
            term=config.term,
            rank=config.rank,
            dp_rank=config.dp_rank,
            cp_rank=config.cp_rank,
            dp=config.dp,
            cp=config.cp,
            store_host=config.store_host,
            store_port=config.store_port,
            max_rows=config.max_rows,
            max_model_len=config.max_model_len,
            max_batched_tokens=config.max_batched_tokens,
            max_window=config.max_window,
            num_blocks=config.num_blocks,
            peers=config.peers,
            capture_by_use=config.capture_by_use,
        )
        try:
            reply = await self._stub.Configure(request, metadata=self._metadata, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error, f"worker {self.address}") from None
        return read_facts(reply.facts)

    async def expel(self, epoch: int, term: int, reason: str, timeout: float) -> None:
        """The worker ends."""
        request = worker_pb2.ExpelRequest(epoch=epoch, term=term, reason=reason)
        try:
            await self._stub.Expel(request, metadata=self._metadata, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error, f"worker {self.address}") from None

    async def attach(self, epoch: int, term: int, timeout: float) -> Attachment:
        request = worker_pb2.AttachRequest(epoch=epoch, term=term)
        try:
            reply = await self._stub.Attach(request, metadata=self._metadata, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error, f"worker {self.address}") from None
        return Attachment(
            accepted=reply.accepted,
            started=reply.started,
            finished=reply.finished,
            headers=tuple(reply.headers),
            rows=tuple(
                RowState(r.row, r.request_id, r.choice, r.offset, tuple(u32(b.blocks) for b in r.blocks))
                for r in reply.rows
            ),
            outcomes=tuple(read_outcome(outcome) for outcome in reply.outcomes),
        )

    async def close_plans(self, term: int, headers: Sequence[bytes], upto: int, timeout: float) -> None:
        """Sends plans with empty bodies and waits until the worker has finished plan `upto` (P6)."""
        call = self._stub.Steps(metadata=self._metadata)
        try:
            async with asyncio.timeout(timeout):
                for header in headers:
                    await call.write(worker_pb2.Plan(header=header, body=worker_pb2.Body(term=term)))
                while (message := await call.read()) is not grpc.aio.EOF:
                    if any(outcome.seq == upto and outcome.last for outcome in message.plans):
                        return
            raise Unavailable(f"worker {self.address} closed its step stream before plan {upto} was finished")
        except TimeoutError:
            raise DeadlineExceeded(
                f"worker {self.address} has not finished plan {upto} within {timeout:.0f} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error, f"worker {self.address}") from None
        finally:
            call.cancel()

    def open_steps(self, on_outcome: Callable[[PlanOutcome], None], on_lost: Callable[[LockstepError], None]) -> None:
        """Opens the Steps stream; `on_lost` is called once if it ends."""
        self._outgoing = asyncio.Queue()
        self._call = self._stub.Steps(metadata=self._metadata)
        self._tasks = [
            asyncio.create_task(self._write(self._call, self._outgoing)),
            asyncio.create_task(self._read(self._call, on_outcome, on_lost)),
        ]

    def send(self, header: bytes, body: Body) -> None:
        self._outgoing.put_nowait(worker_pb2.Plan(header=header, body=write_body(body)))

    def watch(self, epoch: int, on_lost: Callable[[LockstepError], None]) -> None:
        """Follows the worker's Status; `on_lost` is called once if it is not ready in this epoch any more, or does not answer."""
        self._watching = asyncio.create_task(self._watch(epoch, on_lost))

    async def leave(self) -> None:
        """Ends `open_steps` and `watch`."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        await self.close_steps()

    async def _watch(self, epoch: int, on_lost: Callable[[LockstepError], None]) -> None:
        call = self._stub.Status(worker_pb2.StatusRequest(), metadata=self._metadata)
        why = "closed its status stream"
        try:
            while (status := await call.read()) is not grpc.aio.EOF:
                if status.state != _STATE.READY or status.epoch != epoch:
                    why = f"left epoch {epoch}: {status.message or 'no reason given'}"
                    break
        except grpc.aio.AioRpcError as error:
            why = f"does not answer: {error.details() or error.code().name}"
        finally:
            call.cancel()
        on_lost(Unavailable(f"worker {self.address} {why}"))

    async def close_steps(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if self._call is not None:
            self._call.cancel()
            self._call = None
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        await self.leave()
        await self._channel.close()

    async def _write(self, call: Any, outgoing: asyncio.Queue[worker_pb2.Plan]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader reports it
            while True:
                await call.write(await outgoing.get())

    async def _read(
        self, call: Any, on_outcome: Callable[[PlanOutcome], None], on_lost: Callable[[LockstepError], None]
    ) -> None:
        error: LockstepError = Unavailable(f"worker {self.address} closed its step stream")
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                for outcome in message.plans:
                    on_outcome(read_outcome(outcome))
            code, details = await call.code(), await call.details()
            if code is not grpc.StatusCode.OK:
                error = rpc.from_rpc_error(
                    grpc.aio.AioRpcError(code, grpc.aio.Metadata(), await call.trailing_metadata(), details=details),
                    f"worker {self.address}",
                )
        except grpc.aio.AioRpcError as failure:
            error = rpc.from_rpc_error(failure, f"worker {self.address}")
        except ValueError as failure:
            error = LockstepError(f"worker {self.address} sent an outcome that cannot be read: {failure}")
        on_lost(error)


class WorkerGroup:
    """The drivers of a shard's DP ranks in a formed group, as the step loop sends to them."""

    def __init__(self, clients: Sequence[WorkerClient]) -> None:
        self._clients = clients
        self._agreed: tuple[Header, bytes] | None = None

    def agreed(self, header: Header, data: bytes) -> None:
        """The bytes of a header that came from the coordinator: every rank gets the same ones."""
        self._agreed = (header, data)

    def send(self, header: Header, bodies: Sequence[Body]) -> None:
        data = self._agreed[1] if self._agreed is not None and self._agreed[0] is header else write_header(header)
        for client, body in zip(self._clients, bodies, strict=True):
            client.send(data, body)


def open_headers(attachments: Sequence[Attachment]) -> list[list[bytes]]:
    """The headers that each rank lacks of the plans that some rank of its group has accepted, by seq (P6).

    A scheduler that died between two sends of a fan-out leaves ranks inside a plan's collectives that the others never
    got. Each of these, sent with an empty body, lets every rank come out at the same plan.
    """
    known: dict[int, bytes] = {}
    for attachment in attachments:
        for data in attachment.headers:
            known[worker_pb2.Header.FromString(data).seq] = data
    highest = max(attachment.accepted for attachment in attachments)
    lacking = []
    for attachment in attachments:
        missing = range(attachment.accepted + 1, highest + 1)
        if absent := [seq for seq in missing if seq not in known]:
            raise Conflict(f"nobody has kept the headers of plans {absent}, which a rank lacks")
        lacking.append([known[seq] for seq in missing])
    return lacking


def write_header(header: Header) -> bytes:
    message = worker_pb2.Header(
        epoch=header.epoch,
        seq=header.seq,
        kind=worker_pb2.PlanKind.ValueType(int(header.kind)),
        first_step=header.first_step,
        k=header.k,
        row_bucket=header.row_bucket,
        micro_chunks=np.array(header.micro_chunks, "<u4").tobytes(),
        placement_version=header.placement_version,
        moved_layer=header.moved_layer,
        capture_bucket=header.capture_bucket,
        report_loads=header.report_loads,
        moved_experts=np.array(header.moved_experts, "<u4").tobytes(),
        dual_batch=header.dual_batch,
    )
    return message.SerializeToString(deterministic=True)


def read_header(data: bytes) -> Header:
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


def write_body(body: Body) -> worker_pb2.Body:
    return worker_pb2.Body(
        term=body.term,
        ack=body.ack,
        notice=body.notice,
        removes=body.removes.tobytes(),
        adds=[_add_row(add) for add in body.adds],
        table_writes=[
            worker_pb2.TableWrite(
                group=w.group,
                rows=w.rows.tobytes(),
                starts=w.starts.tobytes(),
                counts=w.counts.tobytes(),
                blocks=w.blocks.tobytes(),
            )
            for w in body.table_writes
        ],
        zeroes=[
            worker_pb2.BlockList(group=group, blocks=blocks.tobytes())
            for group, blocks in enumerate(body.zeroes)
            if len(blocks)
        ],
        copies=[
            worker_pb2.BlockCopies(group=group, sources=sources.tobytes(), destinations=destinations.tobytes())
            for group, (sources, destinations) in enumerate(body.copies)
            if len(sources)
        ],
        rows=body.rows.tobytes(),
        passes=[
            worker_pb2.PrefillPass(rows=p.rows.tobytes(), starts=p.starts.tobytes(), counts=p.counts.tobytes())
            for p in body.passes
        ],
    )


def _add_row(add: AddRow) -> worker_pb2.AddRow:
    return worker_pb2.AddRow(
        row=add.row,
        request_id=add.request_id,
        choice=add.choice,
        prompt_len=add.prompt_len,
        tokens=add.tokens.tobytes(),
        computed=add.computed,
        blocks=[worker_pb2.BlockList(group=group, blocks=blocks.tobytes()) for group, blocks in enumerate(add.blocks)],
        sampling=rpc.write_sampling(add.sampling),
        limit=add.limit,
    )


def read_outcome(message: worker_pb2.PlanOutcome) -> PlanOutcome:
    top = None
    if message.HasField("top"):
        top = TopLogprobs(
            index=u32(message.top.index),
            counts=u32(message.top.counts),
            ids=u32(message.top.ids),
            values=f32(message.top.values),
        )
    return PlanOutcome(
        epoch=message.epoch,
        seq=message.seq,
        dp_rank=message.dp_rank,
        first=message.first,
        steps=message.steps,
        last=message.last,
        counts=u32(message.counts),
        words=u64(message.words),
        logprobs=f32(message.logprobs),
        top=top,
        faults=tuple((fault.row, fault.message) for fault in message.faults),
        prompts=tuple(PromptChunk(p.row, p.start, rpc.read_scores(p.scores)) for p in message.prompts),
        step_ns=message.step_ns,
        turnaround_ns=message.turnaround_ns,
        idle_ns=message.idle_ns,
        expert_loads=read_loads(message.expert_loads) if message.HasField("expert_loads") else None,
    )


def write_loads(loads: ExpertLoads) -> worker_pb2.ExpertLoads:
    layers, experts = loads.prefill.shape
    return worker_pb2.ExpertLoads(
        layers=layers,
        experts=experts,
        prefill=loads.prefill.astype("<u4", copy=False).tobytes(),
        decode=loads.decode.astype("<u4", copy=False).tobytes(),
        steps=loads.steps,
    )


def read_loads(message: worker_pb2.ExpertLoads) -> ExpertLoads:
    shape = (message.layers, message.experts)
    return ExpertLoads(u32(message.prefill).reshape(shape), u32(message.decode).reshape(shape), message.steps)


def read_facts(message: worker_pb2.WorkerFacts) -> WorkerFacts:
    return WorkerFacts(
        model=message.model,
        config_hash=message.config_hash,
        device=message.device,
        dtype=message.dtype,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        max_rows=message.max_rows,
        weights_epoch=message.weights_epoch,
        groups=tuple(KvGroup(g.kind, g.block_size, g.num_blocks, g.dtype) for g in message.groups),
        deterministic=message.deterministic,
        routed_experts=message.routed_experts,
        generated_reusable=message.generated_reusable,
        moe_layers=message.moe_layers,
        routed_expert_count=message.routed_expert_count,
        expert_slots=message.expert_slots,
        expert_groups=message.expert_groups,
        dp=message.dp,
        cp=message.cp,
        rank=message.rank,
        kept_epoch=message.kept_epoch,
        max_batched_tokens=message.max_batched_tokens,
    )
