"""Log probabilities of prompts through the whole stack, and traces that are replayed: what a prefill says of a token is what
the decode step said that sampled it."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio

from lockstep_common.steps import f32, u32
from lockstep_proto.v1 import inference_pb2, inference_pb2_grpc
from tests.system.harness import Stack, stack
from tests.tiny_model import Shape, make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHAPE = Shape()
BATCHED = 32  # tokens of a prefill pass: prompts here take several
PROMPTS = [[random.Random(i).randrange(3, SHAPE.vocab) for _ in range(n)] for i, n in enumerate((70, 100, 9, 33))]
RECORDED = [[random.Random(-i).randrange(3, SHAPE.vocab) for _ in range(20)] for i in range(1, 5)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def s(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Whose worker replays; requests with other seeds than the trace's are sampled."""
    model = make_tiny_model(tmp_path_factory.mktemp("prompts") / "tiny")
    trace = model.parent / "trace.json"
    trace.write_text(
        json.dumps(
            [
                {"seed": 1000 + i, "choice": 0, "prompt": len(prompt), "tokens": tokens}
                for i, (prompt, tokens) in enumerate(zip(PROMPTS, RECORDED, strict=True))
            ]
        )
    )
    sizes = {"max_num_batched_tokens": BATCHED}
    async with stack(
        model, worker_module="tests.replay_worker", worker={"replay": trace, **sizes}, scheduler=sizes
    ) as found:
        yield found


async def complete(s: Stack, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"model": s.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **more}
    reply = await s.rest.post(COMPLETIONS, body)
    assert reply.status == 200, reply.body
    assert len(reply.body["choices"]) == 1
    found: dict[str, Any] = reply.body["choices"][0] | {"usage": reply.body["usage"]}
    return found


async def scored(s: Stack, ids: list[int], width: int = 0) -> list[Any]:
    found: list[Any] = (await complete(s, ids, prompt_logprobs=width))["prompt_logprobs"]
    assert len(found) == len(ids) and found[0] is None
    return found


def of_tokens(found: list[Any], ids: list[int]) -> list[float]:
    """The log probabilities of the prompt's own tokens but the first."""
    return [entry[str(token)]["logprob"] for entry, token in zip(found[1:], ids[1:], strict=True)]


async def test_a_replayed_trace_says_what_was_recorded_and_scores_as_a_prompt_does(s: Stack) -> None:
    answers = await asyncio.gather(
        *(
            complete(s, prompt, max_tokens=len(tokens), seed=1000 + i, logprobs=2, return_token_ids=True, temperature=1)
            for i, (prompt, tokens) in enumerate(zip(PROMPTS, RECORDED, strict=True))
        )
    )
    for answer, prompt, tokens in zip(answers, PROMPTS, RECORDED, strict=True):
        assert answer["token_ids"] == tokens
        whole = [*prompt, *tokens]
        assert answer["logprobs"]["token_logprobs"] == of_tokens(await scored(s, whole), whole)[-len(tokens) :]


async def test_where_a_recording_ends_the_model_goes_on(s: Stack) -> None:
    prompt, tokens = PROMPTS[0], RECORDED[0]
    replayed = await complete(s, prompt, max_tokens=26, seed=1000, return_token_ids=True)
    sampled = await complete(s, [*prompt, *tokens], max_tokens=6, return_token_ids=True)
    assert replayed["token_ids"] == tokens + sampled["token_ids"]


async def test_sampled_tokens_score_as_prompts_do_however_chunked(s: Stack) -> None:
    """Alone and beside others, which cut it elsewhere; cached or not."""
    prompt = PROMPTS[1]
    answer = await complete(s, prompt, max_tokens=24, seed=5, temperature=1, logprobs=3, return_token_ids=True)
    whole = [*prompt, *answer["token_ids"]]
    alone = await scored(s, whole, 3)
    assert of_tokens(alone, whole)[-24:] == answer["logprobs"]["token_logprobs"]
    beside = await asyncio.gather(scored(s, whole, 3), *(scored(s, other, 1) for other in PROMPTS), scored(s, whole, 3))
    assert beside[0] == beside[-1] == alone
    for entry in alone[1:]:
        ranks = sorted(value["rank"] for value in entry.values())
        assert ranks[:3] == [1, 2, 3] and len(entry) in (3, 4)
        best = sorted(entry.values(), key=lambda value: value["rank"])
        assert [v["logprob"] for v in best] == sorted((v["logprob"] for v in best), reverse=True)
        assert sum(math.exp(v["logprob"]) for v in best) < 1 + 1e-5
    cached = await complete(s, whole)
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    again = await complete(s, whole, prompt_logprobs=3)
    assert again["prompt_logprobs"] == alone and again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_echo_with_logprobs_is_the_same_in_a_stream(s: Stack) -> None:
    body = {"prompt": "the steady stream of tokens", "max_tokens": 5, "echo": True, "logprobs": 2}
    plain = await complete(s, **body)
    logprobs = plain["logprobs"]
    assert logprobs["token_logprobs"][0] is None and len(logprobs["tokens"]) == plain["usage"]["total_tokens"]
    assert plain["text"].startswith(body["prompt"])
    stream = await s.rest.stream(COMPLETIONS, {"model": s.model, "temperature": 0, "ignore_eos": True, **body})
    pieces = [c["logprobs"] for c in stream.choices() if c["logprobs"]]
    assert {name: [x for piece in pieces for x in piece[name]] for name in logprobs} == logprobs
    assert stream.text() == plain["text"]


async def test_a_chat_and_several_choices(s: Stack) -> None:
    body = {"model": s.model, "messages": [{"role": "user", "content": "hello " * 12}], "max_tokens": 3, "n": 3}
    reply = await s.rest.post(CHAT, body | {"prompt_logprobs": 1, "ignore_eos": True, "seed": 3})
    assert reply.status == 200 and len(reply.body["choices"]) == 3
    assert len(reply.body["prompt_logprobs"]) == reply.body["usage"]["prompt_tokens"] > BATCHED


async def test_the_grpc_door_gives_the_same(s: Stack) -> None:
    prompt = PROMPTS[0]
    async with grpc.aio.insecure_channel(s.inference) as channel:
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=np.array(prompt, "<u4").tobytes()),
            sampling=inference_pb2.SamplingOptions(prompt_logprobs=2, max_tokens=2),
            omit_text=True,
        )
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        found = [m.prompt_logprobs async for m in stub.Generate(request) if m.HasField("prompt_logprobs")]
    [scores] = found
    rest = await scored(s, prompt, 2)
    np.testing.assert_allclose(f32(scores.logprobs), of_tokens(rest, prompt), rtol=1e-6)
    ranks = [entry[str(token)]["rank"] for entry, token in zip(rest[1:], prompt[1:], strict=True)]
    assert u32(scores.ranks).tolist() == ranks and scores.width == 2


async def test_what_is_refused(s: Stack) -> None:
    for fields, param in (
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": [[5] * 100] * 100, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [[5] * 100] * 100, "logprobs": 20, "echo": True}, "echo"),
    ):
        reply = await s.rest.post(COMPLETIONS, {"model": s.model, "prompt": "x", "max_tokens": 1, **fields})
        assert reply.status == 400 and reply.error["param"] == param
