"""The chat client against scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from lockstep_cli.chat import Answer, Conversation


def conversation(answer: Callable[[httpx.Request], httpx.Response]) -> Conversation:
    http = httpx.Client(base_url="http://server/v1", transport=httpx.MockTransport(answer))
    return Conversation(http, "m", temperature=0.5, max_tokens=None)


def stream(*events: object, done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + (["data: [DONE]\n\n"] if done else [])
    return httpx.Response(200, text="".join(lines), headers={"content-type": "text/event-stream"})


def delta(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


def test_the_history_grows_by_question_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        usage = {"choices": [], "usage": {"completion_tokens": 2}}
        return stream(delta("Hel"), delta("lo"), delta("", "stop"), usage)

    chat = conversation(answer)
    assert chat.ask("hi") and chat.ask("again")
    assert [m["content"] for m in asked[1]["messages"]] == ["hi", "Hello", "again"]
    assert asked[0]["temperature"] == 0.5 and "max_tokens" not in asked[0]
    out, err = capsys.readouterr()
    assert out == "Hello\nHello\n" and "2 tokens" in err and "tok/s" in err


@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "400: too long"),
        (httpx.Response(502, text="bad gateway"), "502: bad gateway"),
        (stream(delta("par"), {"error": {"message": "worker lost"}}), "worker lost"),
        (stream(delta("par"), done=False), "ended before the answer"),
    ],
)
def test_an_error_is_shown_and_its_question_forgotten(
    response: httpx.Response, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = conversation(lambda request: response)
    assert not chat.ask("hi")
    assert chat.messages == [] and complaint in capsys.readouterr().err


def test_an_interrupted_answer_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(httpx.SyncByteStream):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield f"data: {json.dumps(delta('so far'))}\n\n".encode()
            raise KeyboardInterrupt

    chat = conversation(lambda request: httpx.Response(200, stream=Interrupted()))
    assert chat.ask("hi")
    assert chat.messages[-1] == {"role": "assistant", "content": "so far"}
    assert "Ctrl-C" in capsys.readouterr().err


def test_the_summary_of_nothing() -> None:
    assert Answer(asked=0.0).summary() == "no text"
