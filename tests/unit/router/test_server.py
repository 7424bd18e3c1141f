"""The gRPC front without a socket: the same door, tokens, text and errors as the REST one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from lockstep_common import rpc
from lockstep_common.errors import Overloaded, Unavailable
from lockstep_common.steps import f32, u32
from lockstep_proto.v1 import common_pb2, inference_pb2
from lockstep_router.output import End
from lockstep_router.server import InferenceService
from tests.unit.router.build import LIMIT, Router, Say, ScriptedLink, make_router, saying, words


class Aborted(Exception):
    pass


class Context:
    """What a handler needs of a call."""

    def __init__(self) -> None:
        self.status: Any = None
        self.detail = common_pb2.ErrorDetail()
        self.metadata: Any = ()

    async def abort(self, status: Any, message: str, trailers: Any) -> None:
        self.status = status
        self.detail = common_pb2.ErrorDetail.FromString(dict(trailers)[rpc.ERROR_TRAILER])
        raise Aborted(message)

    async def send_initial_metadata(self, metadata: Any) -> None:
        self.metadata = metadata


def service(router: Router) -> Any:
    return InferenceService(router.door, router.sessions)


async def generate(router: Router, **fields: Any) -> list[Any]:
    if not fields.keys() & {"tokens", "chat"}:
        fields["text"] = "one two"
    stream: AsyncIterator[Any] = service(router).Generate(inference_pb2.GenerateRequest(**fields), Context())
    return [getattr(response, response.WhichOneof("event")) async for response in stream]


async def refused(router: Router, **fields: Any) -> Context:
    context = Context()
    with pytest.raises(Aborted):
        async for _ in service(router).Generate(inference_pb2.GenerateRequest(**fields), context):
            pass
    return context


async def test_a_generation() -> None:
    router = make_router(ScriptedLink(saying(Say(words("Hello"), cached=1), Say(words(" there"), End.LENGTH))))
    started, first, second, finish, usage = await generate(router, request_id="mine")
    assert started.request_id.startswith("cmpl-") and started.prompt_tokens == len(router.tokenizer.encode("one two"))
    assert (first.text, first.offset, u32(first.tokens).tolist()) == ("Hello", 0, words("Hello"))
    assert second.offset == len(words("Hello")) and finish.reason == "length"
    assert first.text + second.text + finish.text == "Hello there"
    assert usage.completion_tokens == len(words("Hello")) + len(words(" there")) and usage.cached_tokens == 1
    assert router.sessions.active == 0


async def test_a_stop_string_holds_text_not_tokens() -> None:
    router = make_router(
        ScriptedLink(saying(Say(words("so E")), Say(words("ND"), End.NONE), Say(words("x"), End.LENGTH)))
    )
    *chunks, finish, usage = (await generate(router, sampling={"stop": ["END"], "max_tokens": 50}))[1:]
    assert finish.stop_string == "END" and finish.reason == "stop"
    assert [i for c in chunks for i in u32(c.tokens).tolist()] == [*words("so E"), *words("ND")]
    assert "".join(c.text for c in chunks) + finish.text == "so " and usage.completion_tokens == len(
        words("so E")
    ) + len(words("ND"))


async def test_logprobs_and_ids_alone() -> None:
    event = Say([10, 11], End.LENGTH, logprobs=[-1.0, -2.0], tops=[[(10, -1.0)], [(12, -0.5), (11, -2.0)]])
    router = make_router(ScriptedLink(saying(event)))
    for omit in (True, False):
        found = await generate(router, sampling={"logprobs": 2}, omit_text=omit)
        [chunk] = [m for m in found if isinstance(m, inference_pb2.Chunk)]
        assert f32(chunk.logprobs).tolist() == [-1.0, -2.0] and u32(chunk.top.counts).tolist() == [1, 2]
        assert u32(chunk.top.ids).tolist() == [10, 12, 11]
    assert chunk.text == "" and found[2].text != "", "the last text comes with the finish"


async def test_every_input_and_the_rests_defaults() -> None:
    router = make_router(ScriptedLink(saying(Say([10], End.STOP))))
    await generate(router, tokens=inference_pb2.TokenIds(ids=np.array([5, 6, 7], "<u4").tobytes()))
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="hello")])
    await generate(router, chat=chat, sampling={"logprobs": 0, "temperature": 0, "seed": 5, "logit_bias": {7: 1.5}})
    tokens, talk = router.links[0].submissions.values()
    assert tokens.prompt == [5, 6, 7] and tokens.sampling.max_tokens == 16 and tokens.sampling.temperature == 1
    request = await router.door.chat({"messages": [{"role": "user", "content": "hello"}]})
    assert talk.prompt == request.prompts[0].ids and talk.sampling.max_tokens == LIMIT - len(talk.prompt)
    assert (talk.sampling.temperature, talk.sampling.seed, talk.sampling.bias) == (0, 5, ((7, 1.5),))
    assert talk.sampling.logprobs == 0


async def test_errors_have_status_and_detail() -> None:
    router = make_router(ScriptedLink(lambda _: Overloaded("full", retry_after_ms=900)))
    full = await refused(router, text="x")
    assert full.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (full.detail.code, full.detail.retry_after_ms) == ("overloaded", 900)
    for fields, param in (
        ({"text": "x", "sampling": {"top_p": 2}}, "top_p"),
        ({"tokens": inference_pb2.TokenIds(ids=b"abc")}, "tokens"),
        ({"tokens": inference_pb2.TokenIds(ids=np.array([10**6], "<u4").tobytes())}, "prompt"),
        ({}, "input"),
        ({"text": "x", "omit_text": True, "sampling": {"stop": ["a"]}}, "stop"),
        ({"text": "x", "n": 10**6}, "n"),
    ):
        context = await refused(router, **fields)
        assert context.status is grpc.StatusCode.INVALID_ARGUMENT and context.detail.param == param
    assert (await refused(router, text="x", model="nobody")).status is grpc.StatusCode.NOT_FOUND


async def test_a_failure_in_the_middle_is_a_status() -> None:
    router = make_router(ScriptedLink(saying(Say([10]), Say([], End.ERROR, error=Unavailable("the worker died")))))
    assert (await refused(router, text="x")).status is grpc.StatusCode.UNAVAILABLE


async def test_a_caller_that_goes_away_gives_everything_back() -> None:
    router = make_router(ScriptedLink(lambda _: [Say([10])]))
    stream = service(router).Generate(inference_pb2.GenerateRequest(text="x"), Context())
    await anext(stream)
    await anext(stream)
    assert router.links[0].in_flight == 1
    await stream.aclose()
    assert router.links[0].in_flight == 0 and router.sessions.active == 0


async def test_cancel_models_tokenize() -> None:
    router = make_router(ScriptedLink(lambda _: [Say([10])]))
    front, context = service(router), Context()
    stream = front.Generate(inference_pb2.GenerateRequest(text="x"), context)
    started = (await anext(stream)).started
    assert (await front.Cancel(inference_pb2.CancelRequest(request_id=started.request_id), context)).found
    assert not (await front.Cancel(inference_pb2.CancelRequest(request_id="nobody"), context)).found
    with pytest.raises(Aborted):
        async for _ in stream:
            pass
    assert context.status is grpc.StatusCode.CANCELLED
    [model] = (await front.ListModels(inference_pb2.ListModelsRequest(), context)).models
    assert (model.id, model.max_model_len) == ("tiny", LIMIT)
    found = await front.Tokenize(inference_pb2.TokenizeRequest(text="one", add_special_tokens=False), context)
    assert u32(found.ids).tolist() == words("one") and found.max_model_len == LIMIT
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="hello")])
    found = await front.Tokenize(inference_pb2.TokenizeRequest(chat=chat), context)
    assert u32(found.ids).tolist()[0] == 0
    with pytest.raises(Aborted):
        await front.Tokenize(inference_pb2.TokenizeRequest(), context)


async def test_the_clients_id_is_echoed_safely() -> None:
    router, context = make_router(ScriptedLink(saying(Say([10], End.STOP)))), Context()
    request = inference_pb2.GenerateRequest(text="x", request_id="mine\r\n" + "y" * 500)
    async for _ in service(router).Generate(request, context):
        pass
    assert context.metadata == (("x-request-id", "mine" + "y" * 122),)
