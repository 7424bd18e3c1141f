"""The load generator against a scripted SSE server with known delays, over a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from lockstep_bench import serve
from lockstep_bench.sse import HttpError
from lockstep_common.errors import LockstepError, Unavailable

FIRST_S, GAP_S, TOKENS = 0.03, 0.01, 5
Script = Callable[[int, dict[str, object]], AsyncIterator[bytes]]


def event(value: object) -> bytes:
    data = value if isinstance(value, str) else json.dumps(value)
    return f"data: {data}\r\n\r\n".encode()


def text_chunk(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


async def good(number: int, request: dict[str, object]) -> AsyncIterator[bytes]:
    await asyncio.sleep(FIRST_S)
    yield text_chunk("a")
    for _ in range(TOKENS - 1):
        await asyncio.sleep(GAP_S)
        yield b": heartbeat\r\n\r\n" + text_chunk("b")
    yield text_chunk("", "length")
    prompt = request["prompt"]
    assert isinstance(prompt, list)
    yield event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": TOKENS}})
    yield event("[DONE]")


async def third_is_cut(number: int, request: dict[str, object]) -> AsyncIterator[bytes]:
    async for piece in good(number, request):
        yield piece
        if number == 3:
            raise ConnectionAbortedError


async def third_fails_in_band(number: int, request: dict[str, object]) -> AsyncIterator[bytes]:
    yield text_chunk("a")
    if number == 3:
        yield event({"error": {"message": "worker died", "code": 503}})
    else:
        yield text_chunk("b", "stop") + event({"choices": [], "usage": {"completion_tokens": 2}})
    yield event("[DONE]")


async def without_usage(number: int, request: dict[str, object]) -> AsyncIterator[bytes]:
    yield text_chunk("a", "stop") + event("[DONE]")


@asynccontextmanager
async def server(script: Script) -> AsyncIterator[tuple[str, list[int]]]:
    """(URL, largest number of requests in flight so far in a list of one)."""
    count, flying, peak = 0, 0, [0]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count, flying
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                if head.startswith(b"GET /v1/models"):
                    reply = json.dumps({"data": [{"id": "scripted"}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(reply), reply))
                    continue
                request = json.loads(body)
                if request["model"] != "scripted":
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 7\r\n\r\nunknown")
                    continue
                count, flying = count + 1, flying + 1
                peak[0] = max(peak[0], flying)
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                try:
                    async for piece in script(count, request):
                        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                finally:
                    flying -= 1
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", peak


def work(url: str, **changes: object) -> serve.Workload:
    base = {"num_prompts": 8, "concurrency": 2, "input_len": 7, "output_len": TOKENS, "warmups": 0}
    return serve.Workload(url=url, **(base | changes))  # type: ignore[arg-type]


async def test_closed_loop_measures_what_the_server_does() -> None:
    async with server(good) as (url, peak):
        outcome = await serve.run(work(url, warmups=1))
    row = serve.summary(work(url), outcome, {"ttft": 10.0})
    assert row["completed"] == 8 and row["failed"] == 0 and peak == [2]
    assert row["input_tokens"] == 8 * 7 and row["output_tokens"] == 8 * TOKENS
    assert FIRST_S * 1e3 <= row["ttft_p50_ms"] < FIRST_S * 1e3 + 50
    assert GAP_S * 1e3 <= row["tpot_p50_ms"] < GAP_S * 1e3 + 20
    assert row["e2el_p50_ms"] >= row["ttft_p50_ms"] + (TOKENS - 1) * GAP_S * 1e3
    assert row["output_tok_per_s"] == pytest.approx(8 * TOKENS / outcome.duration)
    assert row["goodput_per_s"] == pytest.approx(8 / outcome.duration)
    assert all(len(r.chunks) == TOKENS for r in outcome.served)  # heartbeats and the finish chunk are no tokens


async def test_open_loop_sends_at_its_rate_whatever_the_server_does() -> None:
    async with server(good) as (url, peak):
        outcome = await serve.run(work(url, num_prompts=20, concurrency=0, request_rate=200.0))
    assert len(outcome.served) == 20
    assert peak[0] > 2  # 70 ms each at 5 ms between arrivals: a closed loop of one would take 1.4 s
    assert outcome.duration < 1.0


async def test_open_loop_with_a_cap() -> None:
    async with server(good) as (url, peak):
        await serve.run(work(url, num_prompts=12, concurrency=3, request_rate=500.0))
    assert peak == [3]


@pytest.mark.parametrize(("script", "message"), [(third_is_cut, "Unavailable"), (third_fails_in_band, "worker died")])
async def test_failures_are_counted_and_the_others_go_on(script: Script, message: str) -> None:
    async with server(script) as (url, _):
        outcome = await serve.run(work(url))
    assert len(outcome.served) == 7 and len(outcome.errors) == 1
    assert message in outcome.errors[0]


async def test_a_stream_without_usage_is_no_success() -> None:
    async with server(without_usage) as (url, _):
        outcome = await serve.run(work(url))
        assert len(outcome.errors) == 8
        with pytest.raises(LockstepError, match="incomplete"):
            await serve.run(work(url, warmups=1))


async def test_a_failing_warm_up_says_why() -> None:
    async with server(good) as (url, _):
        with pytest.raises(HttpError, match="HTTP 404: unknown"):
            await serve.run(work(url, model="other", warmups=1))
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
        await serve.run(work(url))
