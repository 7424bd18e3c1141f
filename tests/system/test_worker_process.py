"""Real worker processes (null model) over gRPC: the plan protocol at the wire, coupled groups, shutdown."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from lockstep_bench.processes import HOST, free_port
from lockstep_common import rpc
from lockstep_common.errors import Conflict, LockstepError, Unavailable
from lockstep_common.steps import AddRow, Body, Flag, GroupConfig, Header, Kind, PlanOutcome, PrefillPass, Sampling
from lockstep_proto.v1 import worker_pb2, worker_pb2_grpc
from lockstep_scheduler.client import WorkerClient, read_outcome, write_body, write_header

NULL = ("lockstep_worker", "--null-step-ms", "0", "--max-model-len", "256", "--max-num-seqs", "4", "--threads", "1")
SCRIPTED = ("tests.scripted_worker",)
PROMPT = np.arange(10, dtype=np.uint32)
SHUTDOWN_S = 5.0


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


class Worker:
    """A worker process, its client for configure, and raw Steps streams."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.address = f"{HOST}:{port}"
        self.client = WorkerClient(self.address)
        self.channel = rpc.open_channel(self.address)
        self.stub: Any = worker_pb2_grpc.WorkerStub(self.channel)

    async def configure(self, **changes: Any) -> Any:
        config = GroupConfig(1, 1, 0, 0, 0, 1, 1, "", 0, 4, 256, 512, 8, 0)
        return await self.client.configure(replace(config, **changes), 30)

    async def attach(self, term: int = 1) -> Any:
        return await self.stub.Attach(worker_pb2.AttachRequest(epoch=1, term=term), timeout=5)

    async def ended(self) -> int:
        async with asyncio.timeout(SHUTDOWN_S):
            return await self.process.wait()

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await self.client.close()
        await self.channel.close()


@asynccontextmanager
async def workers(*commands: Sequence[str]) -> AsyncIterator[list[Worker]]:
    """One process a command (module, flags), loaded."""
    started = []
    try:
        for module, *flags in commands:
            port = free_port()
            words = ("-m", module, "--port", str(port), *flags)
            started.append(Worker(await asyncio.create_subprocess_exec(sys.executable, *words), port))
        for w in started:
            await w.client.loaded(60)
        yield started
    finally:
        for w in started:
            await w.close()


@asynccontextmanager
async def worker(*words: str) -> AsyncIterator[Worker]:
    async with workers(words or NULL) as (w,):
        yield w


class Stream:
    """One Steps stream; `read` returns the next outcome, or raises what ended the stream."""

    def __init__(self, worker: Worker) -> None:
        self._call = worker.stub.Steps()
        self._pending: list[PlanOutcome] = []

    async def send(self, header: Header, body: Body) -> None:
        try:
            await self._call.write(worker_pb2.Plan(header=write_header(header), body=write_body(body)))
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error, "worker") from None

    async def read(self, timeout: float = 10.0) -> PlanOutcome:
        async with asyncio.timeout(timeout):
            if not self._pending:
                try:
                    message = await self._call.read()
                except grpc.aio.AioRpcError as error:
                    raise rpc.from_rpc_error(error, "worker") from None
                if message is grpc.aio.EOF:
                    raise rpc.from_rpc_error(await _error_of(self._call), "worker")
                self._pending = [read_outcome(plan) for plan in message.plans]
            return self._pending.pop(0)

    async def finish(self, seq: int) -> list[PlanOutcome]:
        """Reads until plan `seq` is complete."""
        outcomes = [await self.read()]
        while not (outcomes[-1].seq == seq and outcomes[-1].last):
            outcomes.append(await self.read())
        return outcomes


async def _error_of(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(), grpc.aio.Metadata(), await call.trailing_metadata(), details=await call.details()
    )


def prefill(
    seq: int, row: int = 0, *, epoch: int = 1, term: int = 1, ack: int = 0, limit: int = 100
) -> tuple[Header, Body]:
    blocks = np.arange(1 + row * 10, 11 + row * 10, dtype=np.uint32)
    add = AddRow(row, f"request-{row}", 0, len(PROMPT), PROMPT, 0, (blocks,), Sampling(stop_ids=(0,)), limit)
    chunk = PrefillPass(u32(row), u32(0), u32(len(PROMPT)))
    return Header(epoch, seq, Kind.PREFILL, 0, 1, micro_chunks=(len(PROMPT),)), Body(
        term, ack, adds=(add,), passes=(chunk,)
    )


def decode(seq: int, *rows: int, k: int = 8, term: int = 1, ack: int = 0, epoch: int = 1) -> tuple[Header, Body]:
    return Header(epoch, seq, Kind.DECODE, 0, k), Body(term, ack, rows=u32(*rows))


def tokens_in(outcomes: Sequence[PlanOutcome]) -> int:
    return sum(len(outcome.words) for outcome in outcomes)


async def test_plans_gaps_repeats_attach_and_shutdown() -> None:
    async with worker() as w:
        facts = await w.configure()
        assert facts.max_rows == 4 and facts.groups[0].num_blocks > 1
        assert await w.configure() == facts, "the same request again gets the same answer"
        stream = Stream(w)
        await stream.send(*prefill(1))
        (first,) = await stream.finish(1)
        assert int(first.words[0] >> np.uint64(52)) == Flag.FIRST and first.seq == 1
        await stream.send(*decode(2, 0))
        assert tokens_in(await stream.finish(2)) == 8
        await stream.send(*decode(2, 0))  # a repeat is ignored
        await stream.send(*decode(3, 0, ack=1))
        assert tokens_in(await stream.finish(3)) == 8
        await stream.send(*decode(5, 0))
        with pytest.raises(Conflict, match="expected plan 4, got plan 5"):
            await stream.read()

        found = await w.attach(term=2)
        assert (found.accepted, found.started, found.finished) == (3, 3, 3)
        assert len(found.headers) == 2 and found.headers[1] == write_header(decode(3, 0)[0])
        assert {outcome.seq for outcome in found.outcomes} == {2, 3}
        (row,) = found.rows
        assert (row.request_id, row.offset) == ("request-0", 17)
        stale = Stream(w)
        await stale.send(*decode(4, 0, term=1))
        with pytest.raises(Conflict, match="stale"):
            await stale.read()

        taking_over = Stream(w)
        await taking_over.send(*decode(4, 0, term=2, ack=3))
        assert tokens_in(await taking_over.finish(4)) == 8
        newest = Stream(w)
        await newest.send(*decode(5, 0, term=3))
        with pytest.raises(Conflict, match="another stream took over with term 3"):
            await taking_over.read()
        assert tokens_in(await newest.finish(5)) == 8

        w.process.send_signal(signal.SIGTERM)
        assert await w.ended() == 0


async def test_a_row_ends_at_its_limit_and_the_rest_of_the_window_is_empty() -> None:
    async with worker() as w:
        await w.configure()
        stream = Stream(w)
        await stream.send(*prefill(1, limit=14))
        await stream.send(*decode(2, 0))
        outcomes = await stream.finish(2)
        counts = np.concatenate([outcome.counts for outcome in outcomes if outcome.seq == 2])
        assert counts.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
        flags = [int(word >> np.uint64(52)) for outcome in outcomes for word in outcome.words]
        assert flags == [Flag.FIRST, 0, 0, Flag.LENGTH]


async def test_a_broken_plan_fails_the_worker_loudly() -> None:
    async with worker() as w:
        await w.configure()
        stream = Stream(w)
        await stream.send(*decode(1, 3))
        with pytest.raises(Unavailable, match=r"rows \[3\] decode without a prefill"):
            await stream.read()
        assert await w.ended() == 1


async def test_unreadable_plans_and_unequal_settings_are_refused() -> None:
    async with worker() as w:
        with pytest.raises(Conflict, match="in no group"):
            stream = Stream(w)
            await stream.send(*decode(1))
            await stream.read()
        with pytest.raises(Conflict, match="max_num_seqs"):
            await w.configure(max_rows=5)
        await w.configure()
        with pytest.raises(Conflict, match="epoch 2 or higher"):
            await w.configure(max_rows=3)
        call = w.stub.Steps()
        await call.write(worker_pb2.Plan(header=write_header(decode(1)[0]), body=worker_pb2.Body(term=1, rows=b"abc")))
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be read"):
            await call.read()
            raise await _error_of(call)


async def test_two_coupled_workers_step_together() -> None:
    """Rank 1 has no rows and steps along; without its plan rank 0 waits, and says for whom."""
    quick = (*NULL, "--collective-deadline-s", "0.4")
    async with workers(quick, quick) as (one, two):
        await form(one, two)
        streams = Stream(one), Stream(two)
        await streams[0].send(*prefill(1))
        await streams[1].send(prefill(1)[0], Body(1, 0))
        for stream, tokens in zip(streams, (1, 0), strict=True):
            assert tokens_in(await stream.finish(1)) == tokens
        await streams[0].send(*decode(2, 0, k=4))
        status = await status_with_message(one)
        assert "plan 2, step 0, everybody 0) has waited" in status and status.endswith(f"missing: {two.address}")
        await streams[1].send(decode(2, k=4)[0], Body(1, 0))
        assert tokens_in(await streams[0].finish(2)) == 4
        placeholders = await streams[1].finish(2)
        assert sum(outcome.steps for outcome in placeholders) == 4 and tokens_in(placeholders) == 0


async def test_the_survivor_of_a_group_is_ready_for_the_next_one() -> None:
    async with workers(NULL, NULL) as (one, two):
        await form(one, two)
        stream = Stream(one)
        await stream.send(*prefill(1))
        two.process.kill()
        with pytest.raises(Unavailable, match="the group broke in step"):
            await stream.read()
        await one.configure(epoch=2)
        alone = Stream(one)
        await alone.send(*prefill(1, epoch=2))
        assert tokens_in(await alone.finish(1)) == 1


async def test_a_group_of_unequal_models_is_refused_by_all() -> None:
    async with workers(NULL, (*NULL, "--null-vocab-size", "999")) as (one, two):
        results = await asyncio.gather(*configure_all(one, two), return_exceptions=True)
        hashes = [result.message for result in results if isinstance(result, Conflict)]
        assert len(hashes) == 2, results
        for message in hashes:
            assert one.address in message and two.address in message and message.count("config hash") == 1


async def test_the_scripted_worker_speaks_the_same_protocol() -> None:
    async with worker(*SCRIPTED) as w:
        await w.configure()
        stream = Stream(w)
        await stream.send(*prefill(1))
        await stream.send(*decode(2, 0))
        assert tokens_in(await stream.finish(2)) == 9
        w.process.send_signal(signal.SIGTERM)
        assert await w.ended() == 0


async def test_a_hanging_engine_does_not_keep_the_process(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"match": "*", "tokens": [5], "hang_after": 1}]))
    async with worker(*SCRIPTED, "--script", str(script)) as w:
        await w.configure()
        stream = Stream(w)
        await stream.send(*prefill(1))
        await stream.finish(1)
        await stream.send(*decode(2, 0))
        assert (await w.attach()).finished == 1, "attach answers while a plan hangs"
        w.process.send_signal(signal.SIGTERM)
        assert await w.ended() == 0


async def test_metrics_and_a_second_signal() -> None:
    port = free_port()
    async with worker(*NULL, "--metrics-port", str(port)) as w:
        await w.configure()
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        assert "lockstep_worker_ready 1.0" in text
        stream = Stream(w)
        await stream.send(*prefill(1))
        started = time.monotonic()
        w.process.send_signal(signal.SIGTERM)
        w.process.send_signal(signal.SIGINT)
        assert await w.ended() in (0, 130) and time.monotonic() - started < SHUTDOWN_S


def configure_all(*workers: Worker) -> list[Any]:
    port = free_port()
    return [
        w.configure(
            rank=rank,
            dp_rank=rank,
            dp=len(workers),
            store_host=HOST,
            store_port=port,
            peers=tuple(w.address for w in workers),
        )
        for rank, w in enumerate(workers)
    ]


async def form(*workers: Worker) -> None:
    facts = await asyncio.gather(*configure_all(*workers))
    assert len({fact.config_hash for fact in facts}) == 1


async def status_with_message(worker: Worker) -> str:
    async with asyncio.timeout(10):
        async for status in worker.stub.Status(worker_pb2.StatusRequest(interval_ms=50)):
            if status.message:
                return str(status.message)
    raise LockstepError("the status stream ended")
