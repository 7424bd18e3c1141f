"""The REST front over scripted schedulers: shapes and order of answers, errors, the key, disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import prometheus_client
import pytest
from starlette.routing import Route

from lockstep_common.errors import LockstepError, Overloaded, Unavailable
from lockstep_router.fleet import Load, Submission
from lockstep_router.http import answers
from lockstep_router.http.app import OPEN_PATHS
from lockstep_router.http.routes import MAX_BODY_BYTES
from lockstep_router.output import End
from tests.unit.router.build import (
    EOS,
    LIMIT,
    TURN_END,
    Router,
    Say,
    ScriptedLink,
    make_router,
    saying,
    stream_events,
    words,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def talking(*texts: str, end: End = End.LENGTH, cached: int = 0) -> ScriptedLink:
    """A scheduler whose every choice says the texts, one event each."""

    def script(submission: Submission) -> list[Say]:
        last = len(texts) - 1
        return [
            Say(words(text), end if i == last else End.NONE, choice, cached=cached)
            for i, text in enumerate(texts)
            for choice in range(submission.n)
        ]

    return ScriptedLink(script)


async def post(router: Router, path: str, **body: Any) -> httpx.Response:
    async with router.client() as client:
        return await client.post(path, json=body)


async def ok(router: Router, path: str, **body: Any) -> Any:
    response = await post(router, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(router: Router, path: str, **body: Any) -> list[Any]:
    response = await post(router, path, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return stream_events(response.text)


# --- plain answers ------------------------------------------------------------------------------------------------------


async def test_a_plain_chat() -> None:
    body = await ok(make_router(talking("Hello", " there", cached=3)), CHAT, messages=HELLO, model="tiny")
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "tiny"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == (
        0,
        "length",
        None,
        None,
    )
    usage = body["usage"]
    assert usage["completion_tokens"] == len(words("Hello")) + len(words(" there"))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_plain_completions_of_several_prompts() -> None:
    router = make_router(talking("x"))
    body = await ok(router, COMPLETIONS, prompt=["one", "two"], n=2, echo=True, return_token_ids=True)
    assert body["object"] == "text_completion" and [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in body["choices"]] == ["onex", "onex", "twox", "twox"]
    assert body["choices"][3]["token_ids"] == words("x")
    assert body["choices"][3]["prompt_token_ids"] == router.tokenizer.encode("two")
    assert body["usage"]["completion_tokens"] == 4 * len(words("x"))
    assert body["usage"]["prompt_tokens"] == sum(len(router.tokenizer.encode(p)) for p in ("one", "two"))


async def test_choices_count_and_their_metrics_count_once_per_request() -> None:
    router = make_router(talking("x"))
    await ok(router, CHAT, messages=HELLO, n=3)
    assert router.metric("lockstep_requests_total", outcome="completed") == 1
    assert router.metric("lockstep_choices_total", finished_reason="length") == 3
    assert router.metric("lockstep_generation_tokens_total") == 3 * len(words("x"))


# --- streams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 1}, {"n": 2}, {"return_token_ids": True}])
async def test_order_and_keys_of_chat_chunks(extra: dict[str, Any]) -> None:
    router = make_router(talking("Hello", " there", "!"))
    events = await streamed(router, CHAT, messages=HELLO, stream_options={"include_usage": True}, **extra)
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    for i in range(extra.get("n", 1)):
        choices = [c for e in events for c in e["choices"] if c["index"] == i]
        assert all({"index", "delta", "finish_reason", "logprobs"} <= set(c) for c in choices)
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
        assert choices[-1]["delta"] == {} and choices[-1]["stop_reason"] is None
        assert "".join(c["delta"].get("content", "") for c in choices) == "Hello there!"
        assert all("role" not in c["delta"] for c in choices[1:])
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] > 0
    assert [e for e in events if "usage" in e] == [events[-1]]


@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_the_last_text_does_not_ride_on_the_finish(max_tokens: int) -> None:
    texts = ["a", "b", "c", "d", "e"][:max_tokens]
    events = await streamed(make_router(talking(*texts)), COMPLETIONS, prompt="x")
    assert "".join(e["choices"][0]["text"] for e in events) == "".join(texts)
    assert events[-1]["choices"][0]["text"] == "" and events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_usage_only_if_asked(options: dict[str, Any] | None) -> None:
    more = {} if options is None else {"stream_options": options}
    events = await streamed(make_router(talking("x")), CHAT, messages=HELLO, n=2, **more)
    usages = [e for e in events if e.get("usage")]
    assert len(usages) == bool(options and options.get("include_usage"))
    assert all(e["choices"] == [] and e is events[-1] for e in usages)


async def test_usage_on_every_chunk_if_asked() -> None:
    router = make_router(ScriptedLink(saying(Say([10]), Say([11]), Say([12], End.LENGTH))))
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await streamed(router, COMPLETIONS, prompt="x", stream_options=options)
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 3


async def test_a_stream_and_a_plain_answer_are_the_same() -> None:
    rows = [(text, -0.5 * i) for i, text in enumerate(["so ", "E", "N", "D", " more"])]

    def script(submission: Submission) -> list[Say]:
        return [
            Say(words(text), logprobs=[value] * len(words(text)), tops=[[(10, value), (11, -9.0)]] * len(words(text)))
            for text, value in rows
        ]

    for extra in ({}, {"stop": "END"}, {"stop": "END", "include_stop_str_in_output": True}, {"stop": ["o E", "xyz"]}):
        body = {"prompt": "x", "max_tokens": 99, "logprobs": 2, "stop": "more", "return_token_ids": True} | extra
        plain = (await ok(make_router(ScriptedLink(script)), COMPLETIONS, **body))["choices"][0]
        events = await streamed(make_router(ScriptedLink(script)), COMPLETIONS, **body)
        parts = [e["choices"][0] for e in events]
        assert "".join(p["text"] for p in parts) == plain["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for p in parts if p["logprobs"] for x in p["logprobs"][name]] == plain["logprobs"][name]
        assert [i for p in parts for i in p.get("token_ids", ())] == plain["token_ids"]
        assert parts[-1]["finish_reason"] == plain["finish_reason"] == "stop"
        assert parts[-1]["stop_reason"] == plain["stop_reason"]
        assert len(plain["token_ids"]) == len(plain["logprobs"]["tokens"])


async def test_tokens_without_text_make_no_chunk() -> None:
    """Held-back text and half characters: a client sees no empty chunk before the finish."""
    router = make_router(ScriptedLink(saying(Say(words("ST")), Say(words("O")), Say(words("ck"), End.LENGTH))))
    events = await streamed(router, COMPLETIONS, prompt="x", stop="STOP")
    assert [e["choices"][0]["text"] for e in events] == ["STOck", ""]


async def test_echo_comes_first_in_a_stream() -> None:
    events = await streamed(make_router(talking("x", "y")), COMPLETIONS, prompt="one", echo=True)
    assert [e["choices"][0]["text"] for e in events] == ["one", "x", "y", ""]


async def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PING_SECONDS", 0.01)
    router = make_router(ScriptedLink(saying(Say(words("a"), seconds=0.05), Say(words("b"), End.LENGTH))))
    response = await post(router, COMPLETIONS, prompt="x", stream=True)
    assert response.text.count(": ping\n\n") >= 2
    assert [e["choices"][0]["text"] for e in stream_events(response.text)] == ["a", "b", ""]


# --- log probabilities --------------------------------------------------------------------------------------------------


async def test_chat_logprobs() -> None:
    tokens = [*words("é"), TURN_END]
    tops = [[(tokens[0], -0.5), (11, float("-inf"))], *[[(11, -1.0)]] * (len(tokens) - 1)]
    event = Say(tokens, End.STOP, logprobs=[-0.5, float("nan"), *[-1.0] * (len(tokens) - 2)], tops=tops)
    body = await ok(make_router(ScriptedLink(saying(event))), CHAT, messages=HELLO, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == len(tokens) == body["usage"]["completion_tokens"]
    assert bytes(b for entry in content for b in entry["bytes"] or ()) == "é".encode()
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0 and content[1]["logprob"] is None
    assert content[-1]["token"] == "<|im_end|>" and content[-1]["bytes"] is None


async def test_completion_logprobs() -> None:
    tokens = [*words("Hello"), *words(" there")]
    script = saying(Say(tokens, End.LENGTH, logprobs=[-1.0] * len(tokens), tops=[[(20, -0.1)]] * len(tokens)))
    for count in (0, 1):
        body = await ok(make_router(ScriptedLink(script)), COMPLETIONS, prompt="x", logprobs=count)
        found = body["choices"][0]["logprobs"]
        assert "".join(found["tokens"]) == "Hello there"
        starts = [len("".join(found["tokens"][:i])) for i in range(len(tokens))]
        assert found["text_offset"] == starts and found["token_logprobs"] == [-1.0] * len(tokens)
        assert all(top is None if not count else len(top) == 2 for top in found["top_logprobs"])


# --- errors ---------------------------------------------------------------------------------------------------------------


def assert_error(response: httpx.Response, status: int, code: str | None, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and (error["code"], error["param"]) == (code, param)
    return error


async def test_errors_before_the_first_byte_are_real_statuses() -> None:
    router = make_router(talking("x"))
    for stream in (True, False):
        assert_error(
            await post(router, CHAT, messages=HELLO, model="nobody", stream=stream), 404, "model_not_found", "model"
        )
        assert_error(await post(router, CHAT, messages=HELLO, top_p=2, stream=stream), 400, "invalid_request", "top_p")
        full = await post(router, COMPLETIONS, prompt=[5] * LIMIT, stream=stream)
        assert str(LIMIT) in assert_error(full, 400, "context_length_exceeded", "prompt")["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_late_refusal_is_still_a_status(stream: bool) -> None:
    """The headers wait for admission, so a refusal after a while is a 429 with a hint."""

    class Slow(ScriptedLink):
        async def _play(self, handle: int, script: Sequence[Say] | LockstepError) -> None:
            await asyncio.sleep(0.05)
            await super()._play(handle, script)

    router = make_router(Slow(lambda _: Overloaded("the queue is full", retry_after_ms=2500)))
    response = await post(router, CHAT, messages=HELLO, stream=stream)
    assert assert_error(response, 429, "overloaded")["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "3"


async def test_no_group_is_503_with_a_hint() -> None:
    router = make_router(ScriptedLink(load=Load(ready=False)))
    response = await post(router, CHAT, messages=HELLO)
    assert_error(response, 503, "unavailable")
    assert response.headers["retry-after"] == "1"


async def test_an_error_after_the_first_byte_is_in_band_and_no_finish() -> None:
    failing = ScriptedLink(
        saying(Say(words("a")), Say(words("b")), Say([], End.ERROR, error=Unavailable("the worker died")))
    )
    router = make_router(failing)
    response = await post(router, CHAT, messages=HELLO, stream=True)
    events = stream_events(response.text)
    assert events[-1] == {
        "error": {
            "message": "the worker died",
            "type": "service_unavailable_error",
            "param": None,
            "code": "unavailable",
        }
    }
    assert not any(c["finish_reason"] for e in events[:-1] for c in e["choices"])
    assert router.metric("lockstep_requests_total", outcome="failed") == 1
    assert router.metric("lockstep_requests_total", outcome="completed") == 0
    assert_error(await post(make_router(failing), CHAT, messages=HELLO), 503, "unavailable")


async def test_a_fault_in_the_router_is_told_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    router = make_router(talking("x"))

    def broken(*_: Any) -> None:
        raise RuntimeError("/secret/path at 0xdeadbeef")

    monkeypatch.setattr(answers, "shape_of", broken)
    response = await post(router, CHAT, messages=HELLO)
    assert assert_error(response, 500, "internal")["message"] == "internal error"
    assert router.metric("lockstep_http_requests_total", route=CHAT, code="500") == 1


async def test_bodies_at_fault() -> None:
    router = make_router(talking("x"))
    raws: dict[bytes, str] = {
        b"": "JSON",
        b"{": "JSON",
        b"[1]": "object",
        b"null": "object",
        b'{"prompt": "x", "temperature": NaN}': "JSON",
        b'{"prompt": "x", "temperature": Infinity}': "JSON",
        b'{"prompt": ' + b"[" * 5000: "JSON",
        b'{"prompt": "\xff"}': "JSON",
        b'{"prompt": "\\ud83d"}': "prompt holds a lone surrogate",
        b'{"messages": [{"role": "user", "content": "a\\udc00b"}]}': "messages[0].content holds",
        b'{"stop": ["\\ud83d"], "prompt": "x"}': "stop[0]",
        b'{"prompt": "x", "max_tokens": 99999999999999999999999999}': "max_tokens",
    }
    async with router.client() as client:
        for raw, word in raws.items():
            response = await client.post(COMPLETIONS, content=raw)
            assert response.status_code == 400 and word in response.json()["error"]["message"], raw[:60]
        large = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
        assert (
            "larger"
            in assert_error(await client.post(COMPLETIONS, content=large), 400, "invalid_request", None)["message"]
        )

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(MAX_BODY_BYTES // (1 << 20) + 1):
                yield b"x" * (1 << 20)

        assert (await client.post(COMPLETIONS, content=parts())).status_code == 400
        assert_error(await client.get("/v1/nothing"), 404, None)
        assert_error(await client.get(COMPLETIONS), 405, None)


# --- the key, ids, headers ----------------------------------------------------------------------------------------------


def paths_of(router: Router) -> set[str]:
    """Every path that the application has a route for."""
    found, pending = set(router.app.openapi()["paths"]), list[Any](router.app.routes)
    while pending:
        route = pending.pop()
        found |= {route.path} if isinstance(route, Route) else set()
        pending += list(getattr(route, "routes", None) or ())
    return {path.replace("{name:path}", "tiny").replace("{name}", "tiny") for path in found}


async def test_every_route_needs_the_key_but_the_probes() -> None:
    router = make_router(talking("x"), api_key="sesame")
    paths = paths_of(router) | {"/unknown", "/v1/", "//health", "/health/"}
    assert {CHAT, COMPLETIONS, "/tokenize", "/version", "/metrics", "/openapi.json", "/v1/models/tiny"} <= paths
    async with router.client() as client:
        for path in paths:
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
                response = await client.request(method, path)
                assert (response.status_code == 401) == (path not in OPEN_PATHS), (method, path, response.status_code)
        for wrong in ("sesame", "Bearer", "Bearer sesam", "Bearer sesamee", "Basic sesame", "bearer sesame"):
            assert (await client.get("/v1/models", headers={"authorization": wrong})).status_code == 401
        right = await client.get("/v1/models", headers={"authorization": "Bearer sesame"})
        assert right.status_code == 200
        assert_error(await client.get("/v1/models"), 401, "invalid_api_key")
    assert {"/livez", "/readyz", "/health", "/metrics"} == OPEN_PATHS


async def test_a_clients_request_id_is_echoed_and_nothing_else() -> None:
    router = make_router(talking("x"))
    async with router.client() as client:
        answers_ = await asyncio.gather(
            *(client.post(CHAT, json={"messages": HELLO}, headers={"x-request-id": "same"}) for _ in range(2))
        )
        assert [r.headers["x-request-id"] for r in answers_] == ["same", "same"]
        assert len({r.json()["id"] for r in answers_}) == 2
        for hostile in ("x" * 129, "a b", "<script>"):
            response = await client.post(CHAT, json={"messages": HELLO}, headers={"x-request-id": hostile})
            assert response.status_code == 200 and "x-request-id" not in response.headers


async def test_headers_are_bounded() -> None:
    router = make_router(talking("x"))
    async with router.client() as client:
        many = {f"x-{i}": "y" for i in range(500)}
        assert_error(await client.get("/v1/models", headers=many), 431, "internal")
        assert (await client.get("/v1/models", headers={"x-long": "y" * 70_000})).status_code == 431


# --- clients that go away -------------------------------------------------------------------------------------------------


@dataclass
class Caller:
    """Drives the application by hand: a client that can hang up, or not read."""

    router: Router
    sent: list[dict[str, Any]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    reads: asyncio.Event = field(default_factory=asyncio.Event)

    def call(self, path: str, body: dict[str, Any]) -> asyncio.Task[None]:
        request = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Any:
            if request:
                return request.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await self.reads.wait()
            self.sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "headers": [], "root_path": "", "scheme": "http",
            "server": ("x", 1), "client": ("y", 2),
        }  # fmt: skip
        return asyncio.ensure_future(self.router.app(scope, receive, send))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_hangs_up_gives_everything_back(stream: bool, n: int) -> None:
    link = ScriptedLink(lambda _: [Say(words("a"), choice=c) for _ in range(3) for c in range(n)])
    router = make_router(link)
    caller = Caller(router)
    caller.reads.set()
    task = caller.call(CHAT, {"messages": HELLO, "stream": stream, "n": n})
    for _ in range(200):
        await asyncio.sleep(0)
    assert link.in_flight == 1 and router.sessions.active == 1
    caller.gone.set()
    await asyncio.wait_for(task, 1)
    assert (link.in_flight, router.sessions.active, link.cancelled) == (0, 0, [1])
    assert router.metric("lockstep_requests_total", outcome="cancelled") == 1


async def test_a_client_that_hangs_up_before_admission_gives_everything_back() -> None:
    link = ScriptedLink()
    router = make_router(link)
    callers = [Caller(router) for _ in range(50)]
    tasks = [caller.call(COMPLETIONS, {"prompt": "x", "stream": True}) for caller in callers]
    for _ in range(20):
        await asyncio.sleep(0)
    assert link.in_flight == 50
    for caller in callers:
        caller.gone.set()
        caller.reads.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 2)
    assert link.in_flight == 0 and router.sessions.active == 0 and link.view().sent_tokens == 0


async def test_a_client_that_does_not_read_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "STALL_SECONDS", 0.05)
    link = ScriptedLink(lambda _: [Say(words("a")) for _ in range(3)])
    router = make_router(link)
    caller = Caller(router)
    caller.reads.set()
    task = caller.call(COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 100})
    while not caller.sent:
        await asyncio.sleep(0)
    caller.reads.clear()
    await asyncio.wait_for(task, 2)
    assert link.in_flight == 0 and router.sessions.active == 0


# --- the other pages --------------------------------------------------------------------------------------------------------


async def test_models() -> None:
    router = make_router(talking("x"))
    async with router.client() as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["tiny"]
        assert listed["data"][0]["max_model_len"] == LIMIT and listed["data"][0]["object"] == "model"
        assert (await client.get("/v1/models/tiny")).json() == listed["data"][0]
        assert_error(await client.get("/v1/models/nobody"), 404, "model_not_found", "model")


async def test_tokenize_and_back() -> None:
    router = make_router(talking("x"))
    found = await ok(router, "/tokenize", prompt="one <|im_end|>", return_token_strs=True)
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == LIMIT
    assert "".join(found["token_strs"]) == "<s>one <|im_end|>"
    assert (await ok(router, "/detokenize", tokens=found["tokens"]))["prompt"] == "<s>one <|im_end|>"
    chat = await ok(router, "/tokenize", messages=HELLO)
    assert chat["count"] == (await ok(router, CHAT, messages=HELLO))["usage"]["prompt_tokens"]


async def test_probes() -> None:
    link = talking("x")
    router = make_router(link, api_key="sesame")
    async with router.client() as client:

        async def statuses() -> list[int]:
            return [(await client.get(path)).status_code for path in ("/livez", "/readyz", "/health")]

        assert await statuses() == [200, 200, 200]
        link.load = Load(ready=False)
        assert await statuses() == [200, 503, 503]
        link.load = Load(ready=True, max_running=8)
        router.sessions.draining = True
        assert await statuses() == [200, 503, 503]
        assert (await client.get("/readyz")).json()["status"] == "draining"


async def test_version_and_metrics() -> None:
    router = make_router(talking("x"))
    await ok(router, CHAT, messages=HELLO)
    async with router.client() as client:
        version = (await client.get("/version")).json()
        assert version["groups"][0]["facts"]["max_model_len"] == LIMIT and version["groups"][0]["load"]["ready"]
        page = (await client.get("/metrics")).text
    for name in (
        "lockstep_time_to_first_token_seconds_bucket",
        "lockstep_num_requests_running",
        "lockstep_kv_cache_usage_ratio",
    ):
        assert name in page


async def test_random_names_make_no_series() -> None:
    router = make_router(talking("x"))

    async def series() -> int:
        return len([line for line in router.metrics.page().splitlines() if not line.startswith(b"#")])

    async with router.client() as client:

        async def round_(number: int) -> None:
            await client.post(CHAT, json={"messages": HELLO, "model": f"random-{number}"})
            await client.get(f"/random/{number}")
            await client.get(f"/v1/models/random-{number}")

        await round_(0)
        before = await series()
        for number in range(1, 100):
            await round_(number)
        assert await series() == before
    assert router.metric("lockstep_http_requests_total", route="other", code="404") == 100


async def test_a_fault_in_counting_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("counters only go up")

    router = make_router(talking("x"))
    monkeypatch.setattr(prometheus_client.Histogram, "observe", broken)
    await ok(router, CHAT, messages=HELLO)
    assert router.metric("lockstep_metric_faults_total") > 0


async def test_an_end_of_sequence_is_counted_but_has_no_text() -> None:
    router = make_router(ScriptedLink(saying(Say([*words("Hi"), EOS], End.STOP))))
    body = await ok(router, CHAT, messages=HELLO)
    assert body["choices"][0]["message"]["content"] == "Hi" and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(words("Hi")) + 1
