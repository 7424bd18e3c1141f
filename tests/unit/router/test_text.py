"""Ids to text: exact, a few at a time, whatever the bytes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from lockstep_common.errors import ConfigError, InvalidRequest
from lockstep_router.text import Detokenizer, Tokenizer, load_tokenizer, wrap
from tests.unit.router.build import BOS, TURN_END, byte_level, sentencepiece

TOKENIZERS = [byte_level, sentencepiece]


def pieces(tokenizer: Tokenizer, tokens: list[int], cuts: list[int], **options: Any) -> list[str]:
    """The deltas when `tokens` come in pieces of the given sizes (the last size repeats)."""
    detokenizer = Detokenizer(tokenizer.vocabulary, **options)
    out, start, number = [], 0, 0
    while start < len(tokens):
        size = cuts[min(number, len(cuts) - 1)]
        out.append(detokenizer.feed(tokens[start : start + size]))
        start, number = start + size, number + 1
    return [*out, detokenizer.flush()]


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_joined_deltas_equal_the_one_shot_decode_of_any_text(make: object, text: str, cuts: list[int]) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.hf.decode(tokens)
    assert tokenizer.vocabulary.decode(tokens) == whole
    joined = "".join(pieces(tokenizer, tokens, cuts))
    strips = tokenizer.vocabulary.strips_first_space and joined.startswith(" ")
    assert joined[strips:] == whole, "a stream continues a prompt, so a leading space stays"


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 430), max_size=30),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    skip=st.booleans(),
)
def test_any_ids_decode_like_the_library_however_they_are_cut(tokens: list[int], cuts: list[int], skip: bool) -> None:
    """Ids that are no valid UTF-8, special, or beyond the vocabulary included."""
    tokenizer = byte_level()
    whole = tokenizer.hf.decode(tokens, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, tokens, cuts, skip_special_tokens=skip)) == whole


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 420), max_size=30), cuts=st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_byte_fallback_pieces_give_one_text_however_they_are_cut(tokens: list[int], cuts: list[int]) -> None:
    tokenizer = sentencepiece()
    whole = tokenizer.vocabulary.render(tokens).decode("utf-8", "replace")
    assert "".join(pieces(tokenizer, tokens, cuts)) == whole


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_character_spread_over_tokens_comes_whole(make: object) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    tokens = tokenizer.encode("ß", add_special_tokens=False)
    assert len(tokens) >= 2
    deltas = pieces(tokenizer, tokens, [1])
    assert "\ufffd" not in "".join(deltas) and "".join(deltas).strip() == "ß"


def test_spaces_after_punctuation_survive_one_to_three_ids_at_a_time() -> None:
    tokenizer = sentencepiece()
    text = "Hello there. The dog, 42. And 3.14! So it goes."
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for size in (1, 2, 3):
        assert "".join(pieces(tokenizer, tokens, [size])).removeprefix(" ") == text


def byte_ids(data: bytes) -> list[int]:
    table = byte_level().vocabulary.raw
    return [table.index(bytes([byte])) for byte in data]


def test_a_prompt_that_ends_inside_a_character_is_not_repeated() -> None:
    vocabulary = byte_level().vocabulary
    lead, last = byte_ids("日".encode()[:2]), byte_ids("日".encode()[2:])
    for prompt in (lead, byte_level().encode("some text ") + lead):
        detokenizer = Detokenizer(vocabulary, prompt=prompt)
        assert detokenizer.feed(last) + detokenizer.feed(byte_ids(b"!")) == "日!"
        detokenizer = Detokenizer(vocabulary, prompt=prompt)
        assert detokenizer.feed(byte_ids(b"abc")) + detokenizer.flush() == "abc", "unfinished, it leaves no mark"
        assert Detokenizer(vocabulary, prompt=prompt).flush() == ""
    assert Detokenizer(vocabulary, prompt=byte_level().encode("whole 日")).feed(byte_ids(b"x")) == "x"


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    detokenizer = Detokenizer(byte_level().vocabulary)
    ids = byte_ids(b"\x80" + "é".encode() + b"\xff\xe6\x97")
    assert "".join(detokenizer.feed([i]) for i in ids) + detokenizer.flush() == "\ufffdé\ufffd\ufffd"


def test_a_token_alone_for_people() -> None:
    vocabulary = byte_level().vocabulary
    assert vocabulary.token_text(TURN_END) == "<|im_end|>"
    assert vocabulary.token_text(byte_ids(b"\xe6")[0]) == "bytes:\\xe6"
    assert vocabulary.token_text(10**6) == ""


def test_hopeless_texts_are_refused_by_their_length_alone() -> None:
    tokenizer = byte_level()
    longest = max(map(len, tokenizer.vocabulary.raw))
    assert tokenizer.max_token_chars == longest
    tokenizer.refuse_hopeless(100 * longest, 100, "prompt")
    with pytest.raises(InvalidRequest, match="prompt has"):
        tokenizer.refuse_hopeless(100 * longest + 1, 100, "prompt")


def test_special_texts_and_ids() -> None:
    tokenizer = byte_level()
    assert tokenizer.special_texts == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert tokenizer.encode("x")[0] == BOS and tokenizer.encode("x", add_special_tokens=False)[0] != BOS


def test_model_directories(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not found"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    byte_level().hf.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert load_tokenizer(tmp_path).eos_ids == (TURN_END,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert load_tokenizer(tmp_path).eos_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    assert load_tokenizer(tmp_path).eos_ids == (1, 3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match="eos_token_id"):
        load_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load_tokenizer(tmp_path)


def test_decoders_that_are_not_known_are_refused_by_name() -> None:
    hf = HfTokenizer(models.BPE())
    with pytest.raises(ConfigError, match="'decoder' is missing"):
        wrap(hf)
    hf.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        wrap(hf)
