"""`lockstep chat`: a conversation in the terminal with any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from lockstep_common.errors import LockstepError, Unavailable

_CONNECT_TIMEOUT_S = 5.0
Message = dict[str, str]


def run(argv: Sequence[str]) -> int:
    """One answer if a message is given, else a conversation; the exit status."""
    args = _parse(argv)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)  # a first token may take long; Ctrl-C ends the wait
    with httpx.Client(base_url=args.url, headers=headers, timeout=timeout) as http:
        model = args.model or _first_model(http)
        history: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
        chat = Conversation(http, model, args.temperature, args.max_tokens, history)
        if args.message:
            return 0 if chat.ask(" ".join(args.message)) else 1
        return _converse(chat)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lockstep chat",
        description="Talks to a model. Without MESSAGE: a conversation; Ctrl-C ends an answer, Ctrl-D the conversation.",
    )
    parser.add_argument("message", metavar="MESSAGE", nargs="*", help="ask this, print the answer, end")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the server (default: %(default)s)")
    parser.add_argument("--model", default="", help="default: the first one that the server names")
    parser.add_argument(
        "--api-key", default=os.environ.get("LOCKSTEP_API_KEY", ""), metavar="KEY", help="[LOCKSTEP_API_KEY]"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message to begin with")
    parser.add_argument("--temperature", type=float, default=None, metavar="T", help="default: the server's")
    parser.add_argument("--max-tokens", type=int, default=None, metavar="N", help="of an answer; default: the server's")
    return parser.parse_args(argv)


@dataclass
class Answer:
    """An answer as it comes in."""

    asked: float
    text: str = ""
    first: float = 0.0  # time of the first text; 0: none yet
    tokens: int = 0  # as the server counts them; 0: it did not say
    finish: str = ""

    def add(self, text: str) -> None:
        self.first = self.first or time.monotonic()
        self.text += text

    def summary(self) -> str:
        """Like `42 tokens, 38.1 tok/s, first after 61 ms`; the rate is that of the tokens after the first."""
        if not self.first:
            return "no text"
        parts = [f"first after {1000 * (self.first - self.asked):.0f} ms"]
        took = time.monotonic() - self.first
        if self.tokens:
            parts.insert(0, f"{self.tokens} tokens")
        if self.tokens > 1 and took > 0:
            parts.insert(1, f"{(self.tokens - 1) / took:.1f} tok/s")
        if self.finish not in ("", "stop"):
            parts.append(f"ended by {self.finish}")
        return ", ".join(parts)


@dataclass
class Conversation:
    http: httpx.Client
    model: str
    temperature: float | None
    max_tokens: int | None
    messages: list[Message] = field(default_factory=list)

    def ask(self, text: str) -> bool:
        """Prints the answer as it comes and keeps both in the history. False if there was an error (shown)."""
        self.messages.append({"role": "user", "content": text})
        answer = Answer(asked=time.monotonic())
        try:
            self._stream(answer)
        except KeyboardInterrupt:  # leaving the stream tells the server to stop
            answer.finish = "Ctrl-C"
        except (httpx.HTTPError, LockstepError) as error:
            print(file=sys.stdout, flush=True)
            print(f"error: {error or type(error).__name__}", file=sys.stderr)
            self.messages.pop()
            return False
        self.messages.append({"role": "assistant", "content": answer.text})
        print(flush=True)
        print(f"[{answer.summary()}]", file=sys.stderr)
        return True

    def _stream(self, answer: Answer) -> None:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        with self.http.stream("POST", "chat/completions", json=body) as response:
            _check(response)
            for event in _events(response):
                _take(event, answer)


def _take(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        raise LockstepError(event["error"].get("message", "the server reported an error"))
    if usage := event.get("usage"):
        answer.tokens = usage["completion_tokens"]
    for choice in event.get("choices", ()):
        if text := choice["delta"].get("content"):
            answer.add(text)
            print(text, end="", flush=True)
        answer.finish = choice.get("finish_reason") or answer.finish


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event; an error if the stream breaks off before [DONE]."""
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)
    raise Unavailable("the connection ended before the answer did")


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text.strip() or response.reason_phrase
    raise LockstepError(f"{response.status_code}: {message}")


def _first_model(http: httpx.Client) -> str:
    try:
        response = http.get("models")
        _check(response)
        models = response.json()["data"]
    except httpx.HTTPError as error:
        raise Unavailable(f"no server at {_shown_url(http)} ({error}); start one with `lockstep up`") from error
    if not models:
        raise Unavailable(f"{_shown_url(http)} serves no model")
    return str(models[0]["id"])


def _shown_url(http: httpx.Client) -> str:
    return str(http.base_url).rstrip("/")  # httpx adds a slash


def _converse(chat: Conversation) -> int:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives `input` line editing and a history)

        print(
            f"{chat.model} at {_shown_url(chat.http)}. Ctrl-C ends an answer, Ctrl-D the conversation.", file=sys.stderr
        )
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if line.strip():
            chat.ask(line)
