"""A request's tokens and logprobs are the same bits whatever happens around it: deterministic mode, real processes, in
float32 and in bfloat16, where prompt tokens and generated ones are computed by different products.

One reference (each request alone, one step a plan, whole prompts, no prefix known) is compared with runs under every
circumstance that changes how the same tokens are computed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from tokenizers import Tokenizer

from lockstep_bench.client import Answer, SchedulerSession
from lockstep_common.steps import Sampling, f32, u32
from lockstep_proto.v1 import inference_pb2, inference_pb2_grpc
from tests.kernels.device import requires_equal_bits
from tests.system.harness import Stack, gather_in_order, stack
from tests.tiny_model import Shape, make_tiny_model, special_ids

pytestmark = requires_equal_bits

BLOCK = 16
GREEDY = Sampling(max_tokens=48, logprobs=0)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.9, top_k=60, seed=11)
LENGTHS_AND_SAMPLING = (
    (1, GREEDY),
    (BLOCK - 1, SEEDED),
    (BLOCK, GREEDY),
    (BLOCK + 1, replace(SEEDED, seed=12, min_p=0.02, top_k=0)),
    (2 * BLOCK - 1, replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2)),
    (2 * BLOCK + 1, replace(SEEDED, seed=13, min_tokens=20, stop_ids=tuple(special_ids().values()))),
    (50, replace(GREEDY, logprobs=3, bias=((5, 2.0), (9, -100.0)))),
    (100, replace(SEEDED, seed=14, repetition_penalty=1.3, logprobs=2)),
)
Job = tuple[list[int], Sampling]


def jobs() -> list[Job]:
    rng = random.Random(5)
    ordinary = Shape().vocab - 3
    return [([rng.randrange(ordinary) for _ in range(length)], sampling) for length, sampling in LENGTHS_AND_SAMPLING]


async def alone(session: SchedulerSession, salt: str = "") -> list[Answer]:
    """One after the other, each with a salt of its own, so that no prefix is known."""
    return [await session.submit(prompt, s, salt=f"{salt}{i}").answer() for i, (prompt, s) in enumerate(jobs())]


async def together(session: SchedulerSession, salt: str = "") -> list[Answer]:
    return await gather_in_order(
        *(session.submit(prompt, s, salt=f"{salt}{i}").answer() for i, (prompt, s) in enumerate(jobs()))
    )


def assert_same(found: list[Answer], expected: list[Answer], where: str) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.tokens == b.tokens, f"{where}: request {i} has other tokens"
        assert a.logprobs == b.logprobs, f"{where}: request {i} has other logprobs"
        assert a.ends == b.ends, f"{where}: request {i} ended otherwise"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bits") / "tiny")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(model: Path, dtype: str) -> Iterator[list[Answer]]:
    async def compute() -> list[Answer]:
        async with (
            stack(
                model,
                worker={"dtype": dtype},
                scheduler={"max_window": 1, "max_num_seqs": 8},
                with_router=False,
            ) as s,
            s.session() as session,
        ):
            answers = await alone(session)
            assert all(a.cached == 0 for a in answers)
            return answers

    answers = asyncio.run(compute())
    lengths = [len(a.tokens[0]) for a in answers]
    assert min(lengths) >= 20 and len({a.tokens[0] for a in answers}) == len(answers), (
        f"a reference that tests little: {lengths}"
    )
    yield answers


async def test_batch_prefix_hit_and_doors(model: Path, dtype: str, reference: list[Answer]) -> None:
    """Windows of 8; alone, in a batch of 8, with a known prefix; then REST and gRPC, streamed and plain."""
    flags = {"max_window": 8, "max_num_seqs": 8}
    async with stack(model, worker={"dtype": dtype}, scheduler=flags) as s, s.session() as session:
        assert_same(await alone(session, "alone"), reference, "window 8, alone")
        assert_same(await together(session, "batch"), reference, "window 8, batch of 8")
        again = await together(session, "batch")
        assert_same(again, reference, "window 8, prefix known")
        for (prompt, _), answer in zip(jobs(), again, strict=True):
            assert answer.cached == (len(prompt) - 1) // BLOCK * BLOCK, (
                "a full hit still computes the last prompt token"
            )
        await check_next_turns(session, reference)
        await check_doors(s, model, reference)
        await s.idle()


@pytest.mark.parametrize("budget", [BLOCK, 24])
async def test_chunked_prefill(model: Path, dtype: str, reference: list[Answer], budget: int) -> None:
    """Prompts in chunks of at most `budget` tokens, also across block borders, beside running rows."""
    async with (
        stack(
            model,
            worker={"max_num_batched_tokens": budget, "dtype": dtype},
            scheduler={"max_num_batched_tokens": budget, "max_window": 4, "max_num_seqs": 8},
            with_router=False,
        ) as s,
        s.session() as session,
    ):
        assert_same(await alone(session, "a"), reference, f"chunks of {budget}, alone")
        assert_same(await together(session, "b"), reference, f"chunks of {budget}, batch of 8")
        assert_same(await together(session, "b"), reference, f"chunks of {budget}, prefix known")


async def test_preemption(model: Path, dtype: str, reference: list[Answer]) -> None:
    """A pool that holds about half of what the batch grows to: rows are removed and added again."""
    shape = Shape()
    size = getattr(torch, dtype).itemsize
    block_bytes = 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads) * size * BLOCK
    pool = 26 * block_bytes / 2**30
    async with (
        stack(
            model,
            worker={"kv_cache_memory_gb": f"{pool:.9f}", "max_model_len": 256, "dtype": dtype},
            scheduler={"max_window": 8, "max_num_seqs": 8, "max_model_len": 256},
            with_router=False,
        ) as s,
        s.session() as session,
    ):
        for round_ in range(3):
            assert_same(await together(session, f"p{round_}"), reference, f"small pool, round {round_}")
        load = await session.until(lambda load: load.running == 0)
        assert load.preemptions > 0, "the pool was not small enough to preempt: the test compared nothing"
        await s.idle()


@pytest.mark.parametrize("window", [1, 8])
async def test_coupled_ranks(model: Path, dtype: str, reference: list[Answer], window: int) -> None:
    """Two ranks that take every step together, with placeholders where one has nothing to do."""
    flags = {"max_window": window, "max_num_seqs": 8}
    async with (
        stack(model, coupled=2, worker={"dtype": dtype}, scheduler=flags, with_router=False) as s,
        s.session() as session,
    ):
        assert_same(await alone(session, "a"), reference, f"dp 2, window {window}, alone")
        assert_same(await together(session, "b"), reference, f"dp 2, window {window}, batch of 8")
        assert_same(await together(session, "b"), reference, f"dp 2, window {window}, prefix known")
        await s.idle()


async def test_choices_of_one_request(model: Path, dtype: str) -> None:
    """n seeded choices differ from each other, and are the same set again, alone or beside others."""
    prompt = jobs()[6][0]
    sampling = replace(SEEDED, seed=7, temperature=1.0)
    async with (
        stack(model, worker={"dtype": dtype}, scheduler={"max_num_seqs": 8}, with_router=False) as s,
        s.session() as session,
    ):
        first = await session.submit(prompt, sampling, n=4).answer()
        assert len(set(first.tokens)) == 4
        noise = [session.submit(p, replace(o, seed=99), salt="noise") for p, o in jobs()[:4]]
        again = await session.submit(prompt, sampling, n=4, salt="x").answer()
        one = await session.submit(prompt, sampling, n=1, salt="y").answer()
        await gather_in_order(*(r.answer() for r in noise))
        assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)
        assert one.tokens[0] == first.tokens[0]


async def check_next_turns(session: SchedulerSession, reference: list[Answer]) -> None:
    """Prompts that begin with a conversation of before: its blocks, generated tokens among them, are known or they are not."""
    turns = [
        ([*prompt, *answer.tokens[0], 7, 8, 9], sampling)
        for (prompt, sampling), answer in zip(jobs(), reference, strict=True)
    ]
    known = [await session.submit(tokens, s, salt=f"batch{i}").answer() for i, (tokens, s) in enumerate(turns)]
    fresh = [await session.submit(tokens, s, salt=f"fresh{i}").answer() for i, (tokens, s) in enumerate(turns)]
    assert sum(a.cached for a in known) >= sum(len(p) // BLOCK * BLOCK for p, _ in jobs()) > 0
    assert sum(a.cached for a in fresh) == 0
    assert_same(known, fresh, "next turn, conversation known")


async def check_doors(s: Stack, model: Path, reference: list[Answer]) -> None:
    """REST and gRPC, streamed and plain, give the reference's tokens, text and logprobs."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    compared = 0
    for (prompt, sampling), expected in zip(jobs(), reference, strict=True):
        tokens, logprobs = expected.tokens[0], expected.logprobs[0]
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        body = rest_body(s.model, prompt, sampling)
        plain = await s.rest.post("/v1/completions", body)
        assert plain.status == 200, plain.body
        [choice] = plain.body["choices"]
        streamed = await s.rest.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        assert streamed.done and streamed.status == 200
        assert streamed.finishes() == [choice["finish_reason"]] == list(expected.ends)
        assert streamed.text() == choice["text"], "plain is the fold of the stream"
        if not tokenizer.decode(prompt).endswith("\ufffd"):  # else the first token may complete the prompt's character
            assert choice["text"] == text
            compared += 1
        assert streamed.usage["completion_tokens"] == plain.body["usage"]["completion_tokens"] == len(tokens)
        from_stream = [v for c in streamed.choices() if c.get("logprobs") for v in c["logprobs"]["token_logprobs"]]
        assert from_stream == choice["logprobs"]["token_logprobs"]
        assert from_stream == pytest.approx(logprobs, abs=1e-6)
        grpc_tokens, grpc_logprobs, reason = await generate(s, prompt, sampling)
        assert (tuple(grpc_tokens), tuple(grpc_logprobs), reason) == (tokens, logprobs, expected.ends[0])
    assert compared >= len(reference) // 2


def rest_body(model: str, prompt: list[int], s: Sampling) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": s.min_p,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "repetition_penalty": s.repetition_penalty,
        "seed": s.seed,
        "min_tokens": s.min_tokens,
        "stop_token_ids": list(s.stop_ids),
        "logit_bias": {str(i): v for i, v in s.bias},
        "ignore_eos": True,
        "logprobs": s.logprobs,
    }


async def generate(s: Stack, prompt: list[int], sampling: Sampling) -> tuple[list[int], list[float], str]:
    """(tokens, logprobs, finish reason) through the router's gRPC door."""
    options = inference_pb2.SamplingOptions(
        **{k: v for k, v in rest_body("", prompt, sampling).items() if k not in ("model", "prompt", "logit_bias")},
        logit_bias=dict(sampling.bias),
    )
    request = inference_pb2.GenerateRequest(
        model=s.model,
        tokens=inference_pb2.TokenIds(ids=b"".join(i.to_bytes(4, "little") for i in prompt)),
        sampling=options,
    )
    tokens: list[int] = []
    logprobs: list[float] = []
    reasons = []
    async with grpc.aio.insecure_channel(s.inference) as channel:
        async for message in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60):
            if message.HasField("chunk"):
                assert message.chunk.offset == len(tokens)
                tokens += u32(message.chunk.tokens).tolist()
                logprobs += f32(message.chunk.logprobs).tolist()
            elif message.HasField("finish"):
                reasons.append(message.finish.reason)
    [reason] = reasons
    return tokens, logprobs, reason
