"""The JSON of answers: OpenAI's objects, whole or in chunks, for chats and completions.

A chunk differs from the one before it in a text only, so everything around the text is formatted once per choice.
Streams look the same for every request: a role chunk (chats), content chunks, one chunk with the finish reason and no
text for each choice, then a usage chunk without choices if it was asked for, then [DONE].
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson

from lockstep_common.steps import PromptScores
from lockstep_router.output import Delta, Finish, TokenLogprob
from lockstep_router.request import Request, Usage
from lockstep_router.text import Detokenizer, Vocabulary

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
LOWEST_LOGPROB: Final = -9999.0  # stands for minus infinity, which JSON cannot say

ScoresOf = Callable[[int], PromptScores | None]

_OPEN: Final = b',"logprobs":null,"finish_reason":null}]}\n\n'


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Shape(abc.ABC):
    """The answer to one request. One instance per request: it remembers which choices have begun."""

    object_name = ""
    chunk_name = ""

    def __init__(self, request: Request, vocabulary: Vocabulary, scores: ScoresOf) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._scores = scores
        head = orjson.dumps(
            {"id": request.id, "object": self.chunk_name, "created": request.created, "model": request.model}
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._heads = [self._head + b'{"index":%d,' % i for i in range(request.choices)]
        self._begun = [False] * request.choices
        self._offsets: dict[int, _Offsets] = {}
        self._plain = not (request.rules.logprobs or request.return_token_ids or request.continuous_usage)

    # --- streams

    def events(self, index: int, delta: Delta, usage: Usage | None) -> bytes:
        """The events for what is new in a choice; `usage` is put on each if it is given."""
        out = [] if self._begun[index] else self._begin(index, usage)
        if self._plain:
            if delta.text:
                out.append(self._heads[index] + self._content(orjson.dumps(delta.text)) + _OPEN)
        elif delta.text or delta.entries or (delta.tokens and self._request.return_token_ids):
            extra: dict[str, Any] = {"logprobs": self._logprobs(index, delta.entries), "finish_reason": None}
            if self._request.return_token_ids:
                extra["token_ids"] = delta.tokens
            out.append(self._event(index, self._content(orjson.dumps(delta.text)), extra, usage))
        if delta.finish is not None:
            finish = {"logprobs": None, **_finish_object(delta.finish)}
            out.append(self._event(index, self._nothing(), finish, usage))
        return b"".join(out)

    def usage_event(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n"

    def _event(self, index: int, content: bytes, extra: dict[str, Any], usage: Usage | None) -> bytes:
        tail = b'],"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n" if usage is not None else b"]}\n\n"
        return self._heads[index] + content + b"," + orjson.dumps(extra)[1:] + tail

    def _begin(self, index: int, usage: Usage | None) -> list[bytes]:
        """What comes before a choice's first content."""
        self._begun[index] = True
        return []

    @abc.abstractmethod
    def _content(self, text: bytes) -> bytes: ...

    @abc.abstractmethod
    def _nothing(self) -> bytes: ...

    # --- whole answers

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        """The body of a plain answer; one delta per choice."""
        body: dict[str, Any] = {
            "id": self._request.id,
            "object": self.object_name,
            "created": self._request.created,
            "model": self._request.model,
            "choices": [self._choice(index, delta) for index, delta in enumerate(deltas)],
            "usage": usage_object(usage),
            **self._extras(),
        }
        return orjson.dumps(body)

    def _extras(self) -> dict[str, Any]:
        """What an answer has beside what every answer has."""
        return {}

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        assert delta.finish is not None
        choice: dict[str, Any] = {
            "index": index,
            **self._body(index, delta.text),
            "logprobs": self._logprobs(index, [*self._echoed_entries(index), *delta.entries]),
            **_finish_object(delta.finish),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = delta.tokens
            choice["prompt_token_ids"] = self._prompt_ids(index)
        return choice

    @abc.abstractmethod
    def _body(self, index: int, text: str) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Any: ...

    def _prompt_ids(self, index: int) -> list[int]:
        return self._request.prompts[index // self._request.n].ids

    def _echoed_entries(self, index: int) -> list[TokenLogprob]:
        """The log probabilities of the prompt's tokens, if these are part of the choice."""
        return []

    def _prompt_entries(self, index: int) -> list[TokenLogprob]:
        """Of the prompt of a choice; the first token has none."""
        scores, ids = self._scores(index // self._request.n), self._prompt_ids(index)
        assert scores is not None  # they come before the first token
        tops = [list(zip(*pair, strict=True)) for pair in zip(scores.ids.tolist(), scores.values.tolist(), strict=True)]
        entries = map(TokenLogprob, ids[1:], scores.logprobs.tolist(), tops)
        return [TokenLogprob(ids[0], math.nan, ()), *entries]

    def _prompt_logprobs(self, index: int) -> list[dict[str, Any] | None]:
        """As vLLM answers `prompt_logprobs`: for each token an object of the n best tokens and itself, by id."""
        scores, name, count = (
            self._scores(index // self._request.n),
            self._vocabulary.token_text,
            self._request.prompt_logprobs,
        )
        assert scores is not None
        found: list[dict[str, Any] | None] = [None]
        for entry, rank in zip(self._prompt_entries(index)[1:], scores.ranks.tolist(), strict=True):
            best = [(token, value, place) for place, (token, value) in enumerate(entry.top[:count], start=1)]
            found.append(
                {
                    str(token): {"logprob": finite(value), "rank": place, "decoded_token": name(token)}
                    for token, value, place in [*best, (entry.token, entry.logprob, rank)]
                }
            )
        return found


class ChatShape(Shape):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _begin(self, index: int, usage: Usage | None) -> list[bytes]:
        super()._begin(index, usage)
        extra: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if self._request.return_token_ids:
            extra["prompt_token_ids"] = self._prompt_ids(index)
        return [self._event(index, b'"delta":{"role":"assistant","content":""}', extra, usage)]

    def _extras(self) -> dict[str, Any]:
        return {"prompt_logprobs": self._prompt_logprobs(0)} if self._request.prompt_logprobs >= 0 else {}

    def _content(self, text: bytes) -> bytes:
        return b'"delta":{"content":' + text + b"}"

    def _nothing(self) -> bytes:
        return b'"delta":{}'

    def _body(self, index: int, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Any:
        if not self._request.rules.logprobs:
            return None
        count = self._request.top_logprobs
        return {
            "content": [
                {
                    **self._token(entry.token, entry.logprob),
                    "top_logprobs": [self._token(token, value) for token, value in entry.top[:count]],
                }
                for entry in entries
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        """A token that has no text in the answer (an end-of-sequence id, mostly) has no bytes either."""
        data = self._vocabulary.render((token,), skip_special_tokens=self._request.skip_special_tokens)
        name = self._vocabulary.render((token,), skip_special_tokens=False).decode("utf-8", "replace")
        return {"token": name, "logprob": finite(logprob), "bytes": list(data) or None}


class CompletionShape(Shape):
    object_name = "text_completion"
    chunk_name = "text_completion"

    def _begin(self, index: int, usage: Usage | None) -> list[bytes]:
        super()._begin(index, usage)
        extra: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if self._request.return_token_ids:
            extra["prompt_token_ids"] = self._prompt_ids(index)
        if not (self._request.echo or self._request.return_token_ids):
            return []
        if self._request.echo:
            extra["logprobs"] = self._logprobs(index, self._echoed_entries(index))
        return [self._event(index, self._content(orjson.dumps(self._echoed(index))), extra, usage)]

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = super()._choice(index, delta)
        if self._request.prompt_logprobs >= 0:
            choice["prompt_logprobs"] = self._prompt_logprobs(index)
        return choice

    def _echoed_entries(self, index: int) -> list[TokenLogprob]:
        return self._prompt_entries(index) if self._request.echo and self._request.rules.logprobs else []

    def _content(self, text: bytes) -> bytes:
        return b'"text":' + text

    def _nothing(self) -> bytes:
        return b'"text":""'

    def _body(self, index: int, text: str) -> dict[str, Any]:
        return {"text": self._echoed(index) + text}

    def _echoed(self, index: int) -> str:
        return self._request.prompts[index // self._request.n].text if self._request.echo else ""

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Any:
        if not self._request.rules.logprobs:
            return None
        offsets = self._offsets.setdefault(index, _Offsets(self._vocabulary, self._request.skip_special_tokens))
        count, name = self._request.top_logprobs, self._vocabulary.token_text
        return {
            "tokens": [name(entry.token) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {name(token): finite(value) for token, value in [*entry.top[:count], (entry.token, entry.logprob)]}
                if count and not math.isnan(entry.logprob)
                else None
                for entry in entries
            ],
            "text_offset": [offsets.next(entry.token) for entry in entries],
        }


class _Offsets:
    """Where each token begins in its choice's text."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
        self._length = 0

    def next(self, token: int) -> int:
        offset = self._length
        self._length += len(self._detokenizer.feed((token,)))
        return offset


def shape_of(request: Request, vocabulary: Vocabulary, scores: ScoresOf) -> Shape:
    """`scores` gives those of a prompt by its number, once any of its choices has begun."""
    return (ChatShape if request.chat else CompletionShape)(request, vocabulary, scores)


def finite(logprob: float) -> float | None:
    """A number that JSON can say: minus infinity becomes -9999, and what is no number null."""
    if math.isnan(logprob):
        return None
    return max(logprob, LOWEST_LOGPROB)


def _finish_object(finish: Finish) -> dict[str, Any]:
    return {"finish_reason": finish.reason, "stop_reason": finish.stop}
