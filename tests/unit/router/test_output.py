"""A choice's output: stop strings to the token, log probabilities with their text, one finish; however tokens come."""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_router.output import ChoiceOutput, Delta, End, Finish, OutputRules, TokenLogprob
from lockstep_router.text import Detokenizer, Vocabulary
from tests.unit.router.build import TURN_END, byte_level, words

LETTERS = "abcd"


def vocabulary(*texts: str) -> Vocabulary:
    """Token i is texts[i]."""
    raw = tuple(text.encode() for text in texts)
    return Vocabulary(raw, raw, frozenset())


def output(rules: OutputRules, *texts: str) -> ChoiceOutput:
    return ChoiceOutput(rules, Detokenizer(vocabulary(*texts)))


@dataclass
class Sum:
    """The fold of a choice's deltas."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    stopped: int | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.entries += delta.entries
        assert self.finish is None or (delta.finish is self.finish and not (delta.text or delta.tokens)), "one finish"
        self.finish = delta.finish


def run(choice: ChoiceOutput, tokens: list[int], end: End, cuts: list[int], *, logprobs: bool = False) -> Sum:
    """Feeds `tokens` in pieces of the given sizes (the last size repeats) and folds what comes out."""
    total = Sum()
    start, number = 0, 0
    while True:
        size = cuts[min(number, len(cuts) - 1)]
        piece = tokens[start : start + size]
        last = start + size >= len(tokens)
        values = [-float(i) for i in range(start, start + len(piece))] if logprobs else []
        tops = [[(i, -float(i))] for i in range(start, start + len(piece))] if logprobs else []
        stopped = choice.feed(piece, end if last else End.NONE, values, tops)
        total.stopped = stopped if total.stopped is None else total.stopped
        total.add(choice.take())
        start, number = start + size, number + 1
        if last:
            return total


def reference(
    vocab: Vocabulary, tokens: list[int], end: End, rules: OutputRules
) -> tuple[str, list[int], str | int | None]:
    """(text, ids, stop string) by decoding everything at once, prefix by prefix."""
    visible = tokens[:-1] if end is End.STOP and not rules.include_stop else tokens
    before = ""
    for count in range(1, len(tokens) + 1):
        data = vocab.render(visible[:count])
        final = bool(end) and count == len(tokens)
        text = data.decode("utf-8", "replace") if final else _complete(data)
        if count >= rules.min_tokens:
            hits = []
            for stop in rules.stop:
                start = text.find(stop, max(0, len(before) - len(stop) + 1))
                if start >= 0:
                    hits.append((start + len(stop), start, stop))
            if hits:
                stop_end, start, stop = min(hits)
                return text[: stop_end if rules.include_stop else start], tokens[:count], stop
        before = text
    return before, tokens, None


def _complete(data: bytes) -> str:
    """The text of whole characters; an incomplete one at the end does not show yet."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


PIECES = st.sampled_from(["a", "b", "c", "ab", "ba", "abc", "d", "", "é", "cab"])


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(PIECES, min_size=1, max_size=25),
    stops=st.lists(st.text(alphabet="abcdé", min_size=1, max_size=4), max_size=3, unique=True),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    end=st.sampled_from([End.STOP, End.LENGTH]),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    logprobs=st.booleans(),
)
def test_any_cut_of_the_stream_gives_what_the_reference_gives(
    texts: list[str],
    stops: list[str],
    cuts: list[int],
    end: End,
    min_tokens: int,
    include: bool,
    logprobs: bool,
) -> None:
    vocab = vocabulary(*texts)
    tokens = list(range(len(texts)))
    rules = OutputRules(stop=tuple(stops), min_tokens=min_tokens, include_stop=include, logprobs=logprobs)
    choice = ChoiceOutput(rules, Detokenizer(vocab))
    found = run(choice, tokens, end, cuts, logprobs=logprobs)
    text, ids, stop = reference(vocab, tokens, end, rules)
    assert (found.text, found.tokens, choice.ids) == (text, ids, ids)
    assert found.finish == (Finish("stop", stop) if stop else Finish("stop" if end is End.STOP else "length"))
    assert found.stopped == (len(ids) if stop else None)
    if logprobs:
        assert [(e.token, e.logprob) for e in found.entries] == [(i, -float(i)) for i in range(len(ids))]


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(4, 419), min_size=1, max_size=25),
    stop=st.text(alphabet="aeo \ufffdé", min_size=1, max_size=2),
    first=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    logprobs=st.booleans(),
)
def test_cuts_do_not_matter_for_bytes_that_are_no_text_either(
    tokens: list[int], stop: str, first: list[int], logprobs: bool
) -> None:
    rules = OutputRules(stop=(stop,), logprobs=logprobs)
    vocab = byte_level().vocabulary
    several = run(ChoiceOutput(rules, Detokenizer(vocab)), tokens, End.LENGTH, first, logprobs=logprobs)
    at_once = run(ChoiceOutput(rules, Detokenizer(vocab)), tokens, End.LENGTH, [len(tokens)], logprobs=logprobs)
    assert several == at_once


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(4, 419), min_size=1, max_size=25),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
)
def test_with_logprobs_each_delta_holds_the_bytes_of_its_own_tokens(tokens: list[int], cuts: list[int]) -> None:
    vocab = byte_level().vocabulary
    choice = ChoiceOutput(OutputRules(stop=("Hello there",), logprobs=True), Detokenizer(vocab))
    start, number = 0, 0
    while start < len(tokens):
        size = cuts[min(number, len(cuts) - 1)]
        last = start + size >= len(tokens)
        choice.feed(tokens[start : start + size], End.LENGTH if last else End.NONE, [0.0] * size, [])
        delta = choice.take()
        if delta.finish is not None and delta.finish.stop:
            return  # the tokens of a stop string have no text
        joined = vocab.render([entry.token for entry in delta.entries])
        assert joined.decode("utf-8", "replace") == delta.text
        assert delta.tokens == [entry.token for entry in delta.entries]
        start, number = start + size, number + 1


def feed_texts(rules: OutputRules, *texts: str) -> tuple[list[str], ChoiceOutput]:
    """The text of each delta when every text is one token, and the choice."""
    choice = output(rules, *texts)
    deltas = []
    for i in range(len(texts)):
        choice.feed([i], End.NONE, [0.0] if rules.logprobs else [], [])
        deltas.append(choice.take().text)
    return deltas, choice


def test_no_part_of_a_stop_string_is_sent_before_it_is_complete() -> None:
    deltas, choice = feed_texts(OutputRules(stop=("DEFGHIJ",)), "DEF", "G", "HI", "J")
    assert deltas == ["", "", "", ""] and choice.finish == Finish("stop", "DEFGHIJ")


def test_a_token_that_reaches_past_the_stop_string_still_stops() -> None:
    choice = output(OutputRules(stop=("DE",)), "ABC", "DEF", "GHI")
    assert choice.feed([0, 1, 2]) == 2
    delta = choice.take()
    assert (delta.text, delta.tokens, choice.ids) == ("ABC", [0, 1], [0, 1])
    assert choice.feed([2, 2, 2], End.LENGTH) is None and choice.take() == Delta("", [], [], delta.finish)


def test_the_earliest_completed_stop_wins_and_of_equals_the_longest() -> None:
    assert output(OutputRules(stop=("cd", "bc")), "abcd").feed([0]) == 1
    choice = output(OutputRules(stop=("cd", "bc")), "abcd")
    choice.feed([0])
    assert choice.finish == Finish("stop", "bc") and choice.take().text == "a"
    choice = output(OutputRules(stop=("c", "abc")), "xabc")
    choice.feed([0])
    assert choice.finish == Finish("stop", "abc") and choice.take().text == "x"


def test_text_that_turns_out_harmless_is_released_at_once() -> None:
    deltas, _ = feed_texts(OutputRules(stop=("Helloxxx",)), "Hello", "!", " there")
    assert deltas == ["", "Hello!", " there"]


def test_logprobs_wait_for_their_text_and_none_is_lost() -> None:
    choice = output(OutputRules(stop=("Helloxxx",), logprobs=True), "Hello", "!", " there")
    seen = []
    for i in range(3):
        choice.feed([i], End.LENGTH if i == 2 else End.NONE, [-1.0 * i], [[(i, -1.0 * i), (9, -5.0)]])
        delta = choice.take()
        seen.append((delta.text, [entry.token for entry in delta.entries]))
    assert seen == [("", []), ("Hello!", [0, 1]), (" there", [2])]


def test_a_stop_string_of_two_tokens_leaves_equal_lengths() -> None:
    choice = output(OutputRules(stop=("END",), logprobs=True), "text ", "EN", "D", "more")
    assert choice.feed([0, 1, 2, 3], End.LENGTH, [0.0] * 4, []) == 3
    delta = choice.take()
    assert delta.text == "text " and len(delta.tokens) == len(delta.entries) == len(choice.ids) == 3


def test_min_tokens_delays_stop_strings() -> None:
    texts = ("x", "STOP", "y", "STOP", "z")
    choice = output(OutputRules(stop=("STOP",), min_tokens=3), *texts)
    assert choice.feed([0, 1, 2, 3, 4]) == 4
    assert choice.take().text == "xSTOPy"


def test_stop_ids() -> None:
    rules = OutputRules(stop_token_ids=frozenset({1}))
    for include, text in ((False, "a"), (True, "ab")):
        choice = output(OutputRules(stop_token_ids=frozenset({1}), include_stop=include), "a", "b")
        choice.feed([0, 1], End.STOP)
        assert choice.take() == Delta(text, [0, 1], [], Finish("stop", 1))
    choice = output(rules, "a", "b", "</s>")
    choice.feed([0, 2], End.STOP)
    assert choice.take().finish == Finish("stop", None), "the model's own end has no name"


def test_a_stop_string_that_ends_with_the_last_token_is_a_stop() -> None:
    choice = output(OutputRules(stop=("b",)), "a", "b")
    assert choice.feed([0, 1], End.LENGTH) == 2
    assert choice.take() == Delta("a", [0, 1], [], Finish("stop", "b"))


def test_special_tokens_show_only_when_asked() -> None:
    tokens = [*words("one"), TURN_END]
    for skip, text in ((True, "one"), (False, "one<|im_end|>")):
        choice = ChoiceOutput(OutputRules(), Detokenizer(byte_level().vocabulary, skip_special_tokens=skip))
        choice.feed(tokens, End.LENGTH)
        assert choice.take().text == text


def test_ids_alone() -> None:
    choice = ChoiceOutput(OutputRules(logprobs=True), None)
    assert choice.feed([5, 6], End.LENGTH, [-1.0, -2.0], [(), [(6, -2.0)]]) is None
    delta = choice.take()
    assert (delta.text, delta.tokens) == ("", [5, 6])
    assert delta.entries == [TokenLogprob(5, -1.0, ()), TokenLogprob(6, -2.0, [(6, -2.0)])]


@pytest.mark.parametrize("rules", [OutputRules(), OutputRules(stop=("zz",)), OutputRules(logprobs=True)])
def test_what_is_unread_is_counted(rules: OutputRules) -> None:
    choice = output(rules, *LETTERS)
    choice.feed([0, 1, 2], End.NONE, [0.0] * 3, [[(1, 0.0)] * 5] * 3)
    assert choice.unread == (3 + 15 if rules.logprobs else 3)
    choice.take()
    assert choice.unread == 0


def test_a_long_hold_costs_little() -> None:
    rules = OutputRules(stop=tuple("a" * 255 + chr(98 + i) for i in range(16)))
    choice = output(rules, "a")
    began = time.monotonic()
    for _ in range(2000):
        choice.feed([0])
    assert time.monotonic() - began < 2
