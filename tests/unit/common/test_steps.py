"""Outcome words and packed arrays survive the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_common import steps
from lockstep_common.steps import Flag, Sampling

word = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(0, steps.MAX_ROWS - 1),
    st.sampled_from([Flag(0), Flag.FIRST, Flag.STOP, Flag.LENGTH, Flag.FAULT, Flag.FIRST | Flag.STOP]),
)


@given(st.lists(word, max_size=50))
def test_words_round_trip(words: list[tuple[int, int, Flag]]) -> None:
    tokens, rows, flags = (np.array([w[i] for w in words], np.int64) for i in range(3))
    packed = steps.pack_words(tokens, rows, flags)
    assert packed.dtype == np.uint64
    wire = steps.u64(packed.tobytes())
    for back, sent in zip(steps.unpack_words(wire), (tokens, rows, flags), strict=True):
        assert back.dtype == np.uint32 and (back == sent).all()


@given(st.lists(word, min_size=1, max_size=50))
def test_ends_are_found_by_the_end_mask(words: list[tuple[int, int, Flag]]) -> None:
    flags = steps.unpack_words(steps.pack_words(*(np.array([w[i] for w in words]) for i in range(3))))[2]
    ended = (flags & np.uint32(Flag.END)) != 0
    assert ended.tolist() == [bool(flag & (Flag.STOP | Flag.LENGTH | Flag.FAULT)) for _, _, flag in words]


def test_words_broadcast() -> None:
    tokens, rows, flags = steps.unpack_words(steps.pack_words([7, 8], np.arange(2), Flag.FIRST))
    assert tokens.tolist() == [7, 8] and rows.tolist() == [0, 1] and flags.tolist() == [1, 1]


def test_the_layout_of_a_word_is_the_one_of_the_contract() -> None:
    packed = steps.pack_words([0x11223344], [0xABCDE], [0x802])
    assert packed.tobytes() == (0x802_ABCDE_11223344).to_bytes(8, "little")


@given(st.binary(max_size=64).map(lambda b: b[: len(b) // 8 * 8]))
def test_packed_arrays_are_read_without_a_copy(data: bytes) -> None:
    for read in (steps.u32, steps.u64, steps.f32):
        array = read(data)
        assert array.tobytes() == data and not array.flags.writeable


def test_shared_empty_arrays_cannot_be_written() -> None:
    for empty in (steps.NO_U32, steps.NO_U64, steps.NO_F32):
        assert empty.size == 0 and not empty.flags.writeable


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
        {"bias": ((3, 1.0),)},
    ],
)
def test_sampling_is_plain_only_if_logits_are_used_as_they_are(change: dict[str, object]) -> None:
    assert Sampling(temperature=1.0, top_p=0.9, top_k=5, seed=3, stop_ids=(2,)).plain
    assert not Sampling(**change).plain  # type: ignore[arg-type]
