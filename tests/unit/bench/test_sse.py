"""The event reader cuts events at any border of the pieces; the HTTP side is driven without a socket."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_bench.sse import HttpError, SseReader, Url, _Protocol
from lockstep_common.errors import ConfigError, Unavailable

line = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
event = st.lists(line, min_size=1, max_size=3)


@given(st.lists(event), st.data(), st.sampled_from(["\n", "\r\n"]))
def test_events_do_not_depend_on_how_the_bytes_are_cut(events: list[list[str]], data: Any, newline: str) -> None:
    raw = "".join(
        "".join(f"data: {text}{newline}" for text in lines) + f": ping{newline}{newline}" for lines in events
    ).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    reader = SseReader()
    found = [e for piece in pieces for e in reader.feed(piece)]
    assert found == ["\n".join(lines).encode() for lines in events]


def test_comments_other_fields_and_a_missing_space() -> None:
    reader = SseReader()
    assert reader.feed(b": keep-alive\n\nevent: x\nid: 7\ndata:{}\n\ndata: unfinished\n") == [b"{}"]
    assert reader.feed(b"\n") == [b"unfinished"]


def test_urls() -> None:
    assert Url.parse("http://host:81/base/") == Url("host", 81, "/base")
    assert Url.parse("localhost:8000") == Url("localhost", 8000, "")
    for bad in ("https://host", "http://", "ftp://x"):
        with pytest.raises(ConfigError, match="http://"):
            Url.parse(bad)


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.aborted = True


def started() -> tuple[_Protocol, FakeTransport]:
    protocol, transport = _Protocol(), FakeTransport()
    protocol.connection_made(transport)
    protocol.start(b"GET / HTTP/1.1\r\n\r\n")
    return protocol, transport


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_a_chunked_answer_in_pieces_and_reuse() -> None:
    protocol, _ = started()
    for piece in (HEAD[:9], HEAD[9:], b"5\r\nhel", b"lo\r\n", b"1\r\n!\r\n0\r\n\r\n"):
        assert not protocol.complete
        protocol.data_received(piece)
    assert await protocol.status() == 200
    assert b"".join([e.data async for e in protocol.pieces()]) == b"hello!"
    assert protocol.complete and protocol.reusable


async def test_a_cut_connection_is_an_error_after_what_came_before_it() -> None:
    protocol, _ = started()
    protocol.data_received(HEAD + b"5\r\nhello\r\n")
    protocol.connection_lost(None)
    pieces = protocol.pieces()
    assert (await anext(pieces)).data == b"hello"
    with pytest.raises(Unavailable, match="middle of an answer"):
        await anext(pieces)
    assert not protocol.reusable


async def test_garbage_is_an_error() -> None:
    protocol, transport = started()
    protocol.data_received(b"SSH-2.0-OpenSSH\r\n")
    assert transport.aborted
    with pytest.raises(Unavailable, match="malformed"):
        await protocol.status()


def test_an_error_answer_shows_a_bounded_body() -> None:
    error = HttpError(400, b'{"error": {"message": "' + b"x" * 9000 + b'"}}')
    assert error.status == 400 and len(error.message) < 600
    assert error.json()["error"]["message"].startswith("x")
