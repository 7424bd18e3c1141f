"""Answers that take as long as their request lives: the generation is opened, consumed and closed in one place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep_common.errors import Cancelled, LockstepError
from lockstep_router.http.errors import error_event
from lockstep_router.http.schemas import DONE, PING, Shape, shape_of
from lockstep_router.request import Request
from lockstep_router.session import Generation, Sessions

log = logging.getLogger(__name__)

PING_SECONDS: Final = 5.0
STALL_SECONDS: Final = 60.0  # a client that takes nothing for so long has gone

_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """The answer to a valid request, streamed or whole.

    Headers are held until the schedulers have accepted the request, so a refusal is a real status code. If the client
    goes away, the request is cancelled. Errors before the headers are raised, for the app's handlers to answer.
    """

    def __init__(self, sessions: Sessions, request: Request, *, arrival: float) -> None:
        super().__init__()
        self._sessions = sessions
        self._request = request
        self._arrival = arrival

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._sessions.open(self._request, arrival=self._arrival)) as generation:
            watch = asyncio.create_task(_cancel_when_gone(receive, generation))
            try:
                await generation.start()
                shape = shape_of(self._request, self._sessions.vocabulary, generation.scores)
                if self._request.stream:
                    await self._stream(generation, shape, send)
                else:
                    deltas = await generation.finished()
                    body = await self._formatted(lambda: shape.answer(deltas, generation.usage()))
                    with contextlib.suppress(TimeoutError):
                        await _send_whole(send, body)
            finally:
                watch.cancel()

    async def _stream(self, generation: Generation, shape: Shape, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            await self._events(generation, shape, send)
        except TimeoutError:
            generation.fail(Cancelled("the client stopped reading"))
        except Exception:
            log.exception("request %s: writing its stream failed", self._request.id)
            error = LockstepError("the router failed on this request's output")
            generation.fail(error)
            await _send_part(send, error_event(error) + DONE, more=False)

    async def _events(self, generation: Generation, shape: Shape, send: Send) -> None:
        """Sends what comes until all is over; TimeoutError if the client takes nothing for STALL_SECONDS."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(STALL_SECONDS) as stall:
            renewed = loop.time()
            while True:
                news = await generation.changed(PING_SECONDS)
                over = generation.over
                data = await self._news(generation, shape)
                if over:
                    await _send_part(send, data + self._ending(generation, shape), more=False)
                    return
                if data or not news:
                    await _send_part(send, data or PING)
                now = loop.time()
                if now - renewed > STALL_SECONDS / 4:  # not each time: it costs more than a chunk
                    renewed = now
                    stall.reschedule(now + STALL_SECONDS)

    async def _news(self, generation: Generation, shape: Shape) -> bytes:
        """The events of what has come since the last call."""
        usage = generation.usage() if self._request.continuous_usage else None
        news = generation.take()
        return await self._formatted(lambda: b"".join([shape.events(index, delta, usage) for index, delta in news]))

    async def _formatted(self, form: Callable[[], bytes]) -> bytes:
        """Log probabilities of long prompts take a while to write down: beside the event loop."""
        return await asyncio.to_thread(form) if self._request.scored else form()

    def _ending(self, generation: Generation, shape: Shape) -> bytes:
        if generation.error is not None:
            return error_event(generation.error) + DONE
        if self._request.include_usage:
            return shape.usage_event(generation.usage()) + DONE
        return DONE


async def _send_part(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def _send_whole(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    async with asyncio.timeout(STALL_SECONDS):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _cancel_when_gone(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.fail(Cancelled("the client went away"))
