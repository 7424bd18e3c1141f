"""The mirrored order against brute force, and the pieces of a cached prefix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_worker import mirror

lengths = st.lists(st.integers(1, 60), max_size=4)
rank_counts = st.sampled_from([1, 2, 3, 4, 8])


def brute_force(lens: list[int], ranks: int) -> list[list[tuple[int, int]]]:
    """(prompt, position) of the rows of each rank, chunk by chunk."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for prompt, n in enumerate(lens):
        size = 1
        while size * 2 * ranks < n:
            size += 1
        chunks = [[(prompt, q * size + j) for j in range(size)] for q in range(2 * ranks)]
        for rank in range(ranks):
            rows[rank] += chunks[rank] + chunks[2 * ranks - 1 - rank]
    return rows


@given(lens=lengths, ranks=rank_counts)
def test_rows_are_those_of_brute_force(lens: list[int], ranks: int) -> None:
    expected = brute_force(lens, ranks)
    for rank in range(ranks):
        prompts, positions = mirror.local_rows(np.array(lens, np.int64), ranks, rank)
        assert list(zip(prompts.tolist(), positions.tolist(), strict=True)) == expected[rank]


@given(lens=lengths, ranks=rank_counts)
def test_all_rows_together_are_a_permutation_of_the_padded_prompts(lens: list[int], ranks: int) -> None:
    prompts, positions = mirror.gathered_rows(np.array(lens, np.int64), ranks)
    sizes = mirror.chunk_sizes(np.array(lens, np.int64), ranks).tolist()
    padded = [(i, p) for i, size in enumerate(sizes) for p in range(2 * ranks * size)]
    assert sorted(zip(prompts.tolist(), positions.tolist(), strict=True)) == padded


@given(lens=lengths, ranks=rank_counts)
def test_reversing_the_mirror_gives_the_natural_order(lens: list[int], ranks: int) -> None:
    prompts, positions = mirror.gathered_rows(np.array(lens, np.int64), ranks)
    index = mirror.gathered_index(np.array(lens, np.int64), ranks)
    natural = [(i, p) for i, n in enumerate(lens) for p in range(n)]
    assert list(zip(prompts[index].tolist(), positions[index].tolist(), strict=True)) == natural


@given(lens=st.lists(st.integers(1, 300), min_size=1, max_size=4), ranks=rank_counts)
def test_work_is_within_one_chunk_of_equal(lens: list[int], ranks: int) -> None:
    array = np.array(lens, np.int64)
    work = mirror.causal_work(array, ranks)
    assert work.sum() == sum(n * (n + 1) // 2 for n in lens)
    size = mirror.chunk_sizes(array, ranks)
    assert work.max() - work.min() <= (size * (2 * ranks * size)).sum()  # queries of a chunk times all keys
    whole = array * 2 * ranks  # without padding all ranks have the same
    assert len(set(mirror.causal_work(whole, ranks).tolist())) == 1


@given(
    prefixes=st.lists(st.integers(0, 70), max_size=5), block_size=st.sampled_from([4, 8, 24]), most=st.integers(1, 6)
)
def test_pieces_have_each_token_of_the_prefixes_once_in_order(prefixes: list[int], block_size: int, most: int) -> None:
    pieces = mirror.prefix_pieces(np.array(prefixes, np.int64), block_size, most)
    found: list[tuple[int, int]] = []
    for piece in pieces:
        for i, (start, count, tokens) in enumerate(zip(piece.starts, piece.counts, piece.tokens, strict=True)):
            assert (count - 1) * block_size < tokens <= count * block_size or tokens == count == 0
            found += [(piece.first + i, p) for p in range(start * block_size, start * block_size + tokens)]
        assert piece.counts[0] > 0 and piece.counts[-1] > 0 and sum(piece.counts) <= most
    assert all(sum(piece.counts) == most for piece in pieces[:-1])
    assert found == [(i, p) for i, n in enumerate(prefixes) for p in range(n)]


@pytest.mark.parametrize(
    ("ranks", "rank", "expected"), [(1, 0, [0, 1, 2, 3, 4]), (2, 0, [0, 1, 6, 7]), (2, 1, [2, 3, 4, 5])]
)
def test_a_prompt_of_five_tokens(ranks: int, rank: int, expected: list[int]) -> None:
    positions = mirror.local_rows(np.array([5]), ranks, rank)[1].tolist()
    assert positions == (expected if ranks > 1 else [0, 1, 2, 3, 4, 5])
