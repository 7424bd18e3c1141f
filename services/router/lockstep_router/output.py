"""What one choice has said: one state machine per choice, fed one to k tokens at a time.

It owns the choice's ids, text, stop strings, log probabilities and finish reason; nothing else in the router touches
them. A stream is the sequence of its deltas, a plain answer is their sum, so the two cannot differ. Feeding a token
stream in any pieces gives the same sum.

Laws:
- The earliest completed stop string ends the choice: the one whose last character comes first, the longest of those that
  end together. A stop string counts only if the token that completes it is at least number `min_tokens`. Tokens after
  that token never existed: they are in no ids, log probabilities or usage.
- Text that may become a stop string is held back; text that was emitted is never taken back.
- With log probabilities a delta holds whole tokens: the joined texts of its entries are its text (but for the tokens of
  a stop string, whose entries come last, with the text cut).
- There is exactly one finish.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep_router.text import Detokenizer


class End(enum.IntEnum):
    """How the scheduler says that a choice ended. The numbers are those of the wire."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


class TokenLogprob(NamedTuple):
    token: int
    logprob: float
    top: Sequence[tuple[int, float]]  # the n best (id, log probability), best first


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended: `reason` is "stop" or "length"; `stop` is the stop string or the user's stop id, if one did it."""

    reason: str
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in a choice since the last delta."""

    text: str
    tokens: list[int]
    entries: list[TokenLogprob]
    finish: Finish | None


@dataclass(frozen=True)
class OutputRules:
    """What all choices of a request have in common."""

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # the user's: named in the finish
    include_stop: bool = False
    min_tokens: int = 0
    logprobs: bool = False

    longest_stop: int = field(init=False)
    first_chars: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest_stop", max(map(len, self.stop), default=0))
        object.__setattr__(self, "first_chars", frozenset(s[0] for s in self.stop))

    def find(self, window: str, seen: int) -> tuple[int, int, str] | None:
        """(start, end, stop) of the first stop string in `window` that ends behind its first `seen` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self.stop:
            start = window.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = (start, start + len(stop), stop)
        return best

    def held(self, window: str) -> int:
        """How many characters at the end of `window` may be the beginning of a stop string."""
        for start in range(max(0, len(window) - self.longest_stop + 1), len(window)):
            if window[start] in self.first_chars:
                rest = window[start:]
                if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self.stop):
                    return len(rest)
        return 0


class ChoiceOutput:
    """One choice. `detokenizer` is None where only ids are wanted; stop strings need it."""

    __slots__ = (
        "_count",
        "_detokenizer",
        "_entries",
        "_held",
        "_marks",
        "_rules",
        "_text",
        "_tokens",
        "finish",
        "ids",
        "unread",
    )

    def __init__(self, rules: OutputRules, detokenizer: Detokenizer | None) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        self.ids: list[int] = []
        self.finish: Finish | None = None
        self.unread = 0  # tokens and log probability values that no delta has taken yet
        self._held = ""  # text that may become a stop string
        self._marks: list[
            tuple[int, TokenLogprob, bool]
        ] = []  # entries of held text: (end in it, entry, at a boundary)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._entries: list[TokenLogprob] = []

    @property
    def idle(self) -> bool:
        """True if there is nothing for a delta."""
        return not (self._text or self._tokens or self._entries)

    def feed(
        self,
        tokens: Sequence[int],
        end: End = End.NONE,
        logprobs: Sequence[float] = (),
        tops: Sequence[Sequence[tuple[int, float]]] = (),
    ) -> int | None:
        """Takes the choice's next tokens (and one log probability and n best for each, if they were asked for).

        Returns the number of tokens at which the choice ended if a stop string ended it now: the scheduler must be told.
        What comes after a finish is ignored.
        """
        if self.finish is not None:
            return None
        if self._detokenizer is None:
            self._take(tokens, logprobs, tops)
        elif self._rules.stop or self._rules.logprobs:
            stopped = self._feed_each(tokens, end, logprobs, tops)
            if stopped:
                return stopped
        else:
            self._take(tokens, logprobs, tops)
            text = self._detokenizer.feed(self._visible(tokens, end))
            if end:
                text += self._detokenizer.flush()
            if text:
                self._text.append(text)
        if end in (End.STOP, End.LENGTH):
            self.finish = self._device_finish(end)
        return None

    def take(self) -> Delta:
        """Everything since the last call."""
        delta = Delta("".join(self._text), self._tokens, self._entries, self.finish)
        self._text, self._tokens, self._entries = [], [], []
        self.unread = 0
        return delta

    def _take(
        self, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Sequence[tuple[int, float]]]
    ) -> None:
        self.ids.extend(tokens)
        self._tokens.extend(tokens)
        self.unread += len(tokens)
        if self._rules.logprobs:
            for i, token in enumerate(tokens):
                self._entries.append(_entry(token, i, logprobs, tops))
                self.unread += len(self._entries[-1].top)

    def _visible(self, tokens: Sequence[int], end: End) -> Sequence[int]:
        """The tokens that have text: a stop id has none, unless it was asked for."""
        return tokens[:-1] if end is End.STOP and not self._rules.include_stop else tokens

    def _feed_each(
        self,
        tokens: Sequence[int],
        end: End,
        logprobs: Sequence[float],
        tops: Sequence[Sequence[tuple[int, float]]],
    ) -> int | None:
        """Token by token, since a stop string's end must be found to the token."""
        assert self._detokenizer is not None
        visible = len(self._visible(tokens, end))
        for i, token in enumerate(tokens):
            self.ids.append(token)
            text = self._detokenizer.feed((token,)) if i < visible else ""
            if end and i == len(tokens) - 1:
                text += self._detokenizer.flush()
            seen = len(self._held)
            self._held += text
            self.unread += 1
            if self._rules.logprobs:
                entry = _entry(token, i, logprobs, tops)
                self._marks.append((len(self._held), entry, not self._detokenizer.pending))
                self.unread += len(entry.top)
            else:
                self._tokens.append(token)
            if text and self._rules.stop and len(self.ids) >= self._rules.min_tokens:
                hit = self._rules.find(self._held, seen)
                if hit is not None:
                    return self._stop(*hit)
            self._release(self._rules.held(self._held))
        if end:
            if not tokens:
                self._held += self._detokenizer.flush()
            self._release_all()
        return None

    def _stop(self, start: int, end: int, stop: str) -> int:
        self._held = self._held[: end if self._rules.include_stop else start]
        self._release_all()
        self.finish = Finish("stop", stop)
        return len(self.ids)

    def _release(self, keep: int) -> None:
        """Emits the held text but its last `keep` characters; with log probabilities only up to a token's end."""
        safe = len(self._held) - keep
        if self._rules.logprobs:
            whole = 0
            for number, (end, _, boundary) in enumerate(self._marks, start=1):
                if boundary and end <= safe:
                    whole = number
            safe = self._marks[whole - 1][0] if whole else 0
            self._emit_marks(whole)
            self._marks = [(end - safe, entry, boundary) for end, entry, boundary in self._marks]
        if safe:
            self._text.append(self._held[:safe])
            self._held = self._held[safe:]

    def _release_all(self) -> None:
        self._emit_marks(len(self._marks))
        if self._held:
            self._text.append(self._held)
            self._held = ""

    def _emit_marks(self, count: int) -> None:
        for _, entry, _ in self._marks[:count]:
            self._entries.append(entry)
            self._tokens.append(entry.token)
        del self._marks[:count]

    def _device_finish(self, end: End) -> Finish:
        if end is End.LENGTH:
            return Finish("length")
        last = self.ids[-1] if self.ids else None
        return Finish("stop", last if last in self._rules.stop_token_ids else None)


def _entry(token: int, i: int, logprobs: Sequence[float], tops: Sequence[Sequence[tuple[int, float]]]) -> TokenLogprob:
    return TokenLogprob(token, logprobs[i] if i < len(logprobs) else float("nan"), tops[i] if i < len(tops) else ())
