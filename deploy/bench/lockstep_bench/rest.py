"""Streamed completions of any OpenAI-compatible server, over as many connections as there are requests in flight."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Self

from lockstep_bench.backends import Generation
from lockstep_bench.sse import DONE, Connection, Url
from lockstep_bench.stats import Served
from lockstep_common.errors import LockstepError, Unavailable


class RestBackend:
    def __init__(self, url: Url, headers: Mapping[str, str], model: str, generation: Generation) -> None:
        self._url = url
        self._headers = headers
        self._model = model
        self._generation = generation
        self._idle: list[Connection] = []

    @classmethod
    async def connect(cls, address: str, generation: Generation, api_key: str) -> Self:
        url = Url.parse(address)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        return cls(url, headers, generation.model or await first_model(url, headers), generation)

    def prepare(self, prompt: Sequence[int]) -> bytes:
        request = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": self._generation.output_len,
            "temperature": self._generation.temperature,
            "ignore_eos": self._generation.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(request).encode()

    async def complete(self, request: bytes) -> Served:
        connection = self._idle.pop() if self._idle else Connection(self._url, self._headers)
        try:
            return await complete(connection, request, self._generation.input_len)
        except BaseException:
            connection.close()
            raise
        finally:
            self._idle.append(connection)

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()


async def first_model(url: Url, headers: Mapping[str, str]) -> str:
    connection = Connection(url, headers)
    try:
        status, body = await connection.fetch("GET", "/v1/models")
    finally:
        connection.close()
    models = json.loads(body)["data"] if status == 200 else []
    if not models:
        raise Unavailable(f"{url.host}:{url.port}/v1/models names no model (HTTP {status}); give --model")
    name: str = models[0]["id"]
    return name


async def complete(connection: Connection, body: bytes, input_tokens: int) -> Served:
    """Sends one streamed completion and times its chunks. LockstepError if it fails or ends without usage or finish.

    `input_tokens` stands in where the server's usage does not count the prompt.
    """
    chunks: list[float] = []
    finish = usage = None
    done = False
    sent = time.perf_counter()
    async for event in connection.stream("POST", "/v1/completions", body):
        if event.data == DONE:
            done = True
            continue
        message = json.loads(event.data)
        if "error" in message:
            raise LockstepError(f"in-band error: {str(message['error'])[:300]}")
        usage = message.get("usage") or usage
        for choice in message["choices"]:
            finish = choice.get("finish_reason") or finish
            if choice.get("text") or not choice.get("finish_reason"):
                chunks.append(event.at)
    finished = time.perf_counter()
    if not (done and finish and usage and chunks):
        raise LockstepError(
            f"the stream was incomplete: done={done}, finish={finish}, usage={usage}, chunks={len(chunks)}"
        )
    return Served(sent, tuple(chunks), finished, usage.get("prompt_tokens", input_tokens), usage["completion_tokens"])
