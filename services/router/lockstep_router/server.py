"""The public gRPC front, lockstep.v1.Inference: the same door, tokens and errors as the REST one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import grpc.aio
import numpy as np
from grpc_reflection.v1alpha import reflection

from lockstep_common import rpc
from lockstep_common.errors import InvalidRequest, LockstepError
from lockstep_common.steps import u32
from lockstep_proto.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from lockstep_router.output import Delta, TokenLogprob
from lockstep_router.session import Generation, Sessions
from lockstep_router.validate import Door

log = logging.getLogger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, door: Door, sessions: Sessions) -> None:
        self._door = door
        self._sessions = sessions

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        arrival = self._sessions.clock.now()
        try:  # a caller that goes away cancels this coroutine, and closing gives the rows back
            valid = await self._read(request)
            if request.request_id:
                await context.send_initial_metadata((("x-request-id", _safe(request.request_id)),))
            with contextlib.closing(self._sessions.open(valid, arrival=arrival)) as generation:
                await generation.start()
                yield _started(generation)
                async for response in _responses(generation):
                    yield response
        except LockstepError as error:
            await rpc.abort(context, error)

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.CancelResponse:
        return inference_pb2.CancelResponse(found=self._sessions.cancel(request.request_id))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        facts = [link.facts for link in self._sessions.fleet.links if link.facts is not None]
        limit = min((f.max_model_len for f in facts), default=0)
        root = facts[0].model if facts else ""
        models = [inference_pb2.Model(id=name, max_model_len=limit, root=root) for name in self._door.names]
        return inference_pb2.ListModelsResponse(models=models)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.TokenizeResponse:
        values: dict[str, Any] = {"model": request.model or None}
        if request.WhichOneof("input") == "chat":
            values["messages"] = _messages(request.chat)
        elif request.WhichOneof("input") == "text":
            values["prompt"] = request.text
        if request.HasField("add_special_tokens"):
            values["add_special_tokens"] = request.add_special_tokens
        try:
            ids, limit = await self._door.tokenize(values)
        except LockstepError as error:
            await rpc.abort(context, error)
        return inference_pb2.TokenizeResponse(ids=np.array(ids, "<u4").tobytes(), max_model_len=limit)

    async def _read(self, message: inference_pb2.GenerateRequest) -> Any:
        """The request through the door, in the shape that the REST front gives it."""
        values = _values(message)
        match message.WhichOneof("input"):
            case "text":
                return await self._door.completion(values | {"prompt": message.text}, omit_text=message.omit_text)
            case "tokens":
                if len(message.tokens.ids) % 4:
                    raise InvalidRequest("tokens.ids must be packed uint32", param="tokens")
                prompt = u32(message.tokens.ids).tolist()
                return await self._door.completion(values | {"prompt": prompt}, omit_text=message.omit_text)
            case "chat":
                values["messages"] = _messages(message.chat)
                if "logprobs" in values:
                    values["top_logprobs"], values["logprobs"] = values["logprobs"], True
                return await self._door.chat(values, omit_text=message.omit_text)
            case _:
                raise InvalidRequest("input is missing: set text, tokens or chat", param="input")


def add_inference(server: grpc.aio.Server, service: InferenceService) -> rpc.Health:
    """Registers the service with health and reflection."""
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    reflection.enable_server_reflection((SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
    return rpc.Health(server, SERVICE)


def _values(message: inference_pb2.GenerateRequest) -> dict[str, Any]:
    options = message.sampling
    values: dict[str, Any] = {name: getattr(options, name) for name in _OPTIONS if options.HasField(name)}  # type: ignore[arg-type]
    if options.HasField("logprobs"):
        values["logprobs"] = options.logprobs
    if options.HasField("prompt_logprobs"):
        values["prompt_logprobs"] = options.prompt_logprobs
    values |= {
        "model": message.model or None,
        "n": message.n or 1,
        "priority": message.priority,
        "cache_salt": message.cache_salt,
        "deadline_ms": message.deadline_ms,
        "min_tokens": options.min_tokens,
        "stop": list(options.stop) or None,
        "stop_token_ids": list(options.stop_token_ids) or None,
        "ignore_eos": options.ignore_eos,
        "include_stop_str_in_output": options.include_stop_str_in_output,
        "logit_bias": {str(token): value for token, value in options.logit_bias.items()} or None,
    }
    return values


def _messages(chat: inference_pb2.ChatMessages) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _safe(text: str) -> str:
    """A client's id as metadata can carry it."""
    return "".join(c for c in text[:128] if c.isascii() and c.isprintable())


def _started(generation: Generation) -> inference_pb2.GenerateResponse:
    request = generation.request
    started = inference_pb2.Started(request_id=request.id, model=request.model, prompt_tokens=request.prompt_tokens)
    return inference_pb2.GenerateResponse(started=started)


async def _responses(generation: Generation) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """Chunks, one finish per choice and the usage; raises the error that ended the request."""
    offsets = [0] * generation.request.choices
    scored = False
    while True:
        await generation.changed()
        over = generation.over
        if not scored and (scores := generation.scores(0)) is not None:
            scored = True
            yield inference_pb2.GenerateResponse(prompt_logprobs=rpc.write_scores(scores))
        for index, delta in generation.take():
            if delta.tokens or (delta.text and delta.finish is None):
                yield inference_pb2.GenerateResponse(chunk=_chunk(index, offsets[index], delta))
                offsets[index] += len(delta.tokens)
            if delta.finish is not None:
                yield inference_pb2.GenerateResponse(finish=_finish(index, delta))
        if over:
            break
    if generation.error is not None:
        raise generation.error
    usage = generation.usage()
    yield inference_pb2.GenerateResponse(
        usage=inference_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )
    )


def _chunk(index: int, offset: int, delta: Delta) -> inference_pb2.Chunk:
    chunk = inference_pb2.Chunk(
        choice=index,
        offset=offset,
        tokens=np.array(delta.tokens, "<u4").tobytes(),
        text=delta.text if delta.finish is None else "",
    )
    if delta.entries:
        chunk.logprobs = np.array([entry.logprob for entry in delta.entries], "<f4").tobytes()
        if any(entry.top for entry in delta.entries):
            chunk.top.CopyFrom(_tops(delta.entries))
    return chunk


def _tops(entries: Iterable[TokenLogprob]) -> common_pb2.TopLogprobs:
    asked = [(i, entry.top) for i, entry in enumerate(entries) if entry.top]
    pairs = [pair for _, top in asked for pair in top]
    return common_pb2.TopLogprobs(
        index=np.array([i for i, _ in asked], "<u4").tobytes(),
        counts=np.array([len(top) for _, top in asked], "<u4").tobytes(),
        ids=np.array([token for token, _ in pairs], "<u4").tobytes(),
        values=np.array([value for _, value in pairs], "<f4").tobytes(),
    )


def _finish(index: int, delta: Delta) -> inference_pb2.ChoiceFinish:
    assert delta.finish is not None
    finish = inference_pb2.ChoiceFinish(choice=index, reason=delta.finish.reason, text=delta.text)
    if isinstance(delta.finish.stop, str):
        finish.stop_string = delta.finish.stop
    elif delta.finish.stop is not None:
        finish.stop_token_id = delta.finish.stop
    return finish
