"""What only several processes show: the gRPC door, routers and schedulers that find each other, overload, drain, long silence."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from lockstep_bench.client import serving
from lockstep_bench.processes import HOST, free_port, http_get, wait_http
from lockstep_common import rpc
from lockstep_common.errors import ContextLengthExceeded, InvalidRequest, LockstepError, NotFound
from lockstep_common.steps import u32
from lockstep_proto.v1 import common_pb2, inference_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from lockstep_proto.v1 import inference_pb2 as pb
from tests.system.harness import Rest, Stack, flag_words, gather_in_order, scripted, stack, valkey
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("fleet") / "tiny")


def completion(s: Stack, prompt: str | list[int] = "hello", max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"model": s.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


# --- the gRPC door --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def inference(s: Stack) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(s.inference) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def refusal(call: Any) -> LockstepError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return rpc.from_rpc_error(caught.value, "router")


async def test_grpc_door(model: Path) -> None:
    """The same models, tokens, text and errors as REST; Usage comes last; cancelling ends the work."""
    async with stack(model) as s, inference(s) as door, s.session() as session:
        assert await serving(s.inference)
        async with asyncio.timeout(2):  # health follows readiness at an interval
            while not await serving(s.inference, "lockstep.v1.Inference"):
                await asyncio.sleep(0.02)
        [card] = (await door.ListModels(pb.ListModelsRequest())).models
        assert (card.id, card.max_model_len) == (s.model, 1024)
        ids = u32((await door.Tokenize(pb.TokenizeRequest(text="hello there"))).ids).tolist()
        assert ids == (await s.rest.post("/tokenize", {"model": s.model, "prompt": "hello there"})).body["tokens"]

        chat = [{"role": "user", "content": "hello there"}]
        options = pb.SamplingOptions(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
        messages = pb.ChatMessages(messages=[pb.ChatMessage(**m) for m in chat])
        events = [
            e
            async for e in door.Generate(
                pb.GenerateRequest(model=s.model, chat=messages, sampling=options, n=1, request_id="mine")
            )
        ]
        assert events[0].WhichOneof("event") == "started" and events[-1].WhichOneof("event") == "usage"
        assert [e.WhichOneof("event") for e in events].count("finish") == 1
        text = "".join(
            e.chunk.text if e.HasField("chunk") else e.finish.text if e.HasField("finish") else "" for e in events
        )
        body = {"model": s.model, "messages": chat, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
        rest = (await s.rest.post("/v1/chat/completions", body)).body
        assert text == rest["choices"][0]["message"]["content"]
        assert (
            events[-1].usage.completion_tokens == 20
            and events[-1].usage.prompt_tokens == rest["usage"]["prompt_tokens"]
        )

        unknown = await refusal(door.Generate(pb.GenerateRequest(model="nobody", text="x")))
        assert isinstance(unknown, NotFound) and unknown.param == "model"
        hot = await refusal(door.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingOptions(temperature=9))))
        assert isinstance(hot, InvalidRequest) and "temperature" in hot.message
        assert isinstance(await refusal(door.Generate(pb.GenerateRequest())), InvalidRequest)
        ragged = await refusal(door.Generate(pb.GenerateRequest(tokens=pb.TokenIds(ids=b"\x01\x02\x03"))))
        assert isinstance(ragged, InvalidRequest)
        long = await refusal(door.Generate(pb.GenerateRequest(tokens=pb.TokenIds(ids=b"\x05\0\0\0" * 1024))))
        assert isinstance(long, ContextLengthExceeded)

        endless = pb.GenerateRequest(
            text="x", sampling=pb.SamplingOptions(temperature=0, max_tokens=1000, ignore_eos=True)
        )
        call = door.Generate(endless)
        async for event in call:
            if event.HasField("chunk"):
                break
        call.cancel()
        await session.until(lambda load: load.running == 0)
        call = door.Generate(endless)
        started = await anext(aiter(call))
        assert (await door.Cancel(pb.CancelRequest(request_id=started.started.request_id))).found
        assert (await refusal(call)).code == "cancelled"
        assert not (await door.Cancel(pb.CancelRequest(request_id="no such request"))).found
        await s.idle()


# --- finding each other ---------------------------------------------------------------------------------------------------


async def test_several_routers_and_schedulers_find_each_other_in_redis(model: Path) -> None:
    """Two routers that know no address serve from two schedulers that registered; one scheduler leaves, both go on."""
    async with (
        valkey() as (_, url),
        scripted(model, groups=2, scheduler={"redis_url": url}, worker={"step_ms": 1.0}) as s,
    ):
        ports = [free_port(), free_port()]
        flags = {"grpc_port": 0, "redis_url": url, "model": model, "served_model_name": s.model}
        routers = [
            s.fleet.python(f"finder{p}", "-m", "lockstep_router", "--port", p, *flag_words(flags)) for p in ports
        ]
        doors = [Rest(p) for p in ports]
        for port in ports:
            await wait_http(HOST, port, "/readyz", timeout=30, processes=routers)
        async with s.session(0) as first, s.session(1) as second:
            bodies = [completion(s, f"question {i}", 60) for i in range(16)]
            replies = await gather_in_order(
                *(doors[i % 2].post("/v1/completions", body) for i, body in enumerate(bodies))
            )
            assert all(r.status == 200 for r in replies)
            loads = [await first.next_load(), await second.next_load()]
            assert all(load.generation_tokens >= 120 for load in loads), f"one group did all the work: {loads}"
        s.schedulers[0].running.stop()
        await asyncio.sleep(0.5)
        for door in doors:
            for i in range(4):
                reply = await door.post("/v1/completions", completion(s, f"more {i}"))
                assert reply.status == 200, reply.body
            await door.close()


# --- overload, silence, drain -----------------------------------------------------------------------------------------------


async def test_overload_is_a_429_with_a_hint(model: Path) -> None:
    """Beyond the queue's bound requests are refused before any byte of a stream, and those accepted are served."""
    async with scripted(model, scheduler={"max_num_seqs": 2, "max_waiting": 4}) as s:
        bodies = [completion(s, f"q{i}", 100) for i in range(24)]
        streams = await gather_in_order(*(s.rest.stream("/v1/completions", body) for body in bodies))
        served = [f for f in streams if f.status == 200]
        refused = [f for f in streams if f.status != 200]
        assert len(served) >= 4 and refused and {f.status for f in refused} == {429}
        assert all(f.done and f.finishes() == ["length"] and not f.errors for f in served)
        held = [asyncio.create_task(s.rest.post("/v1/completions", body)) for body in bodies[:12]]
        await asyncio.sleep(0.2)
        reply = await s.rest.post("/v1/completions", completion(s))
        assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1 and reply.error["code"]
        await asyncio.gather(*held)
        assert (await s.rest.post("/v1/completions", completion(s))).status == 200
        await s.idle()


async def test_a_long_first_token_is_bridged_by_comments(model: Path) -> None:
    """While nothing comes, comments keep proxies from closing the stream; they are neither tokens nor events."""
    slow = [{"match": [1, 2, 3], "delay_ms": 6000}]
    async with scripted(model, slow) as s, httpx.AsyncClient(timeout=30, trust_env=False) as http:
        raw = b""
        times = []
        body = {**completion(s, [1, 2, 3], 1), "stream": True}
        async with http.stream("POST", f"{s.rest.url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for piece in response.aiter_bytes():
                raw += piece
                times.append(time.monotonic())
        before_first = raw[: raw.index(b"data:")]
        assert before_first and all(not line or line.startswith(b":") for line in before_first.splitlines())
        assert raw.rstrip().endswith(b"data: [DONE]")


async def test_router_drains(model: Path) -> None:
    """SIGTERM: not ready at once, the running stream ends as ever, then exit code 0."""
    async with scripted(model) as s:
        alone = await s.rest.stream("/v1/completions", completion(s, max_tokens=200))
        started = asyncio.Event()
        stream = asyncio.create_task(s.rest.stream("/v1/completions", completion(s, max_tokens=200), started=started))
        await started.wait()
        assert s.router is not None
        s.router.running.signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert not await s.rest.ready()
        found = await stream
        assert found.done and found.text() == alone.text() and found.finishes() == ["length"]
        for _ in range(100):
            if s.router.running.returncode is not None:
                break
            await asyncio.sleep(0.05)
        assert s.router.running.returncode == 0, s.router.running.tail()
        for service in (*s.schedulers, *s.workers):
            service.running.signal(signal.SIGTERM)
        for service in (*s.schedulers, *s.workers):
            while service.running.returncode is None:
                await asyncio.sleep(0.05)
            assert service.running.returncode == 0, service.running.tail()


async def test_what_each_door_says_about_itself(model: Path) -> None:
    """Liveness, readiness, version and metrics that count; no secret in any of them."""
    async with scripted(model, router={"api_key": "open-sesame"}) as s:
        key = {"authorization": "Bearer open-sesame"}
        assert s.rest_client is not None
        for path in ("/livez", "/readyz", "/health"):
            assert (await s.rest.get(path)).status == 200
        version = await s.rest.get("/version", key)
        assert version.status == 200 and version.body["version"] and "sesame" not in str(version.body)
        reply = await s.rest.post("/v1/completions", completion(s), headers=key)
        assert reply.status == 200
        page = await s.rest.get("/metrics", key)
        status, _ = await http_get(HOST, s.rest.port, "/metrics")
        assert status in (200, 401)
        for name in (
            'lockstep_num_requests_running{group="',
            'lockstep_kv_cache_usage_ratio{group="',
            'lockstep_choices_total{finished_reason="length"} 1.0',
            "lockstep_generation_tokens_total 16.0",
            "lockstep_time_to_first_token_seconds_count 1.0",
            "lockstep_e2e_request_latency_seconds_count 1.0",
        ):
            assert name in str(page.body), f"{name} is missing from /metrics"


async def test_messages_that_cannot_be_read_refuse_their_request_only(tmp_path: Path) -> None:
    async with scripted(make_tiny_model(tmp_path / "tiny"), with_router=False) as s:
        channel = grpc.aio.insecure_channel(s.schedulers[0].address)
        call = scheduler_pb2_grpc.SchedulerStub(channel).Session()
        await call.write(scheduler_pb2.ToScheduler(hello=scheduler_pb2.Hello(router_id="odd")))
        whole = common_pb2.Sampling(max_tokens=2, top_p=1, repetition_penalty=1, logprobs=-1)
        odd = common_pb2.Sampling(max_tokens=2, bias_ids=b"1234", bias_values=b"")
        for handle, prompt, sampling in ((1, b"12345", whole), (2, b"1\0\0\0", odd), (3, b"1\0\0\0", whole)):
            submit = scheduler_pb2.Submit(handle=handle, request_id=f"r{handle}", prompt=prompt, sampling=sampling, n=1)
            await call.write(scheduler_pb2.ToScheduler(submit=submit))
        refused, ended = {}, False
        while not ended:
            message = await asyncio.wait_for(call.read(), 20)
            if message.WhichOneof("message") == "refused":
                refused[message.refused.handle] = message.refused.error.param
            ended = message.WhichOneof("message") == "events" and any(message.events.ends)
        assert refused == {1: "prompt", 2: "sampling"}
        call.cancel()
        await channel.close()
