"""A router's gRPC door (inference.proto): token ids in and out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

import grpc
import grpc.aio
import numpy as np

from lockstep_bench.backends import Generation
from lockstep_bench.stats import Served
from lockstep_common import rpc
from lockstep_common.errors import LockstepError, Unavailable
from lockstep_proto.v1 import inference_pb2, inference_pb2_grpc


class InferenceBackend:
    def __init__(self, address: str, generation: Generation, api_key: str) -> None:
        self._address = address
        self._generation = generation
        self._metadata = rpc.call_metadata(rpc.Security(token=api_key))
        self._channel = rpc.open_channel(address)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._model = generation.model

    @classmethod
    async def connect(cls, address: str, generation: Generation, api_key: str) -> Self:
        backend = cls(address, generation, api_key)
        if not backend._model:
            try:
                found = await backend._stub.ListModels(inference_pb2.ListModelsRequest(), metadata=backend._metadata)
            except grpc.RpcError as error:
                await backend.close()
                raise rpc.from_rpc_error(error, f"router {address}") from None
            if not found.models:
                await backend.close()
                raise Unavailable(f"router {address} names no model; give --model")
            backend._model = found.models[0].id
        return backend

    def prepare(self, prompt: Sequence[int]) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(
            model=self._model,
            tokens=inference_pb2.TokenIds(ids=np.asarray(prompt, "<u4").tobytes()),
            sampling=inference_pb2.SamplingOptions(
                temperature=self._generation.temperature,
                max_tokens=self._generation.output_len,
                ignore_eos=self._generation.ignore_eos,
            ),
            omit_text=True,
        )

    async def complete(self, request: inference_pb2.GenerateRequest) -> Served:
        chunks: list[float] = []
        finish, usage = "", None
        sent = time.perf_counter()
        try:
            async for message in self._stub.Generate(request, metadata=self._metadata):
                match message.WhichOneof("event"):
                    case "chunk" if message.chunk.tokens:
                        chunks.append(time.perf_counter())
                    case "finish":
                        finish = message.finish.reason
                    case "usage":
                        usage = message.usage
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error, f"router {self._address}") from None
        finished = time.perf_counter()
        if usage is None or not finish or not chunks:
            raise LockstepError(f"the stream was incomplete: finish={finish}, usage={usage}, chunks={len(chunks)}")
        return Served(sent, tuple(chunks), finished, usage.prompt_tokens, usage.completion_tokens)

    async def close(self) -> None:
        await self._channel.close()
