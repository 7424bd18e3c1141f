"""A lean HTTP/1.1 client for streamed answers: one connection, one request at a time, no copies of what is not needed.

The load generator shares cores with the server that it measures, so it must cost little: asyncio protocol, httptools
parser (C), and events handed over as they arrive with the time of the read that brought them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from lockstep_common.errors import ConfigError, LockstepError, Unavailable

DONE = b"[DONE]"


class SseReader:
    """Cuts a byte stream into the data of its events, whatever the borders of the pieces. Comments are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` completed, several data lines of one event joined by newlines."""
        events: list[bytes] = []
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events


@dataclass(frozen=True, slots=True)
class Url:
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Url:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{url!r}: give an http:// address (TLS is not measured here)")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/"))


@dataclass(frozen=True, slots=True)
class Event:
    at: float  # time.perf_counter() of the read that completed it
    data: bytes


class HttpError(LockstepError):
    """The server answered with another status than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.body = body

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """A keep-alive connection. Opens itself when needed; a broken one is opened again by the next request."""

    def __init__(self, url: Url, headers: Mapping[str, str] | None = None) -> None:
        self._url = url
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._protocol: _Protocol | None = None

    async def stream(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Event]:
        """The events of the answer. HttpError for a status other than 200, Unavailable for a connection cut short."""
        protocol = await self._send(method, path, body)
        try:
            if (status := await protocol.status()) != 200:
                raise HttpError(status, b"".join([e.data async for e in protocol.pieces()]))
            reader = SseReader()
            async for piece in protocol.pieces():
                for data in reader.feed(piece.data):
                    yield Event(piece.at, data)
        finally:
            if not protocol.complete:
                self.close()  # the caller turned away in the middle of an answer

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """(status, body) of a plain answer."""
        protocol = await self._send(method, path, body)
        status = await protocol.status()
        return status, b"".join([e.data async for e in protocol.pieces()])

    def close(self) -> None:
        if self._protocol is not None:
            self._protocol.close()
            self._protocol = None

    async def _send(self, method: str, path: str, body: bytes) -> _Protocol:
        if self._protocol is None or not self._protocol.reusable:
            self.close()
            self._protocol = await self._open()
        head = (
            f"{method} {self._url.path}{path} HTTP/1.1\r\nhost: {self._url.host}:{self._url.port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{self._headers}\r\n"
        )
        self._protocol.start(head.encode() + body)
        return self._protocol

    async def _open(self) -> _Protocol:
        loop = asyncio.get_running_loop()
        try:
            _, protocol = await loop.create_connection(_Protocol, self._url.host, self._url.port)
        except OSError as error:
            raise Unavailable(f"{self._url.host}:{self._url.port}: {error.strerror or error}") from error
        return protocol


class _Protocol(asyncio.Protocol):
    """One connection's bytes to the pieces of one answer at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._ready = asyncio.Event()
        self._pieces: deque[Event] = deque()
        self._headers_done = False
        self._lost: Exception | None = None
        self._keep_alive = True
        self.complete = True

    @property
    def reusable(self) -> bool:
        return self.complete and self._keep_alive and self._lost is None

    def start(self, request: bytes) -> None:
        assert self._transport is not None and self.complete
        self._parser = httptools.HttpResponseParser(self)
        self._pieces.clear()
        self._headers_done = self.complete = False
        self._ready.clear()
        self._transport.write(request)

    async def status(self) -> int:
        while not self._headers_done:
            self._check()
            await self._wait()
        status: int = self._parser.get_status_code()
        return status

    async def pieces(self) -> AsyncIterator[Event]:
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self.complete:
                return
            self._check()
            await self._wait()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        self._ready.clear()
        await self._ready.wait()

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost = Unavailable(f"malformed answer: {error}")
            self.close()
        self._ready.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._lost or Unavailable(
            f"connection lost in the middle of an answer: {exc or 'closed by the server'}"
        )
        self._ready.set()

    # httptools
    def on_headers_complete(self) -> None:
        self._headers_done = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(Event(self._now, body))

    def on_message_complete(self) -> None:
        self._keep_alive = self._parser.should_keep_alive()
        self.complete = True
