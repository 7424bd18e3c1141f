"""attention against float64; what lies in unused slots never shows; a token's bits depend on its sequence alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels.attention import PagedBatch, attention, prepare, reference
from lockstep_kernels.attention.cpu import TILE
from tests.kernels.device import requires_equal_bits

SCALE = 0.3


@dataclass(frozen=True)
class Heads:
    kv_heads: int
    group: int
    width: int


@dataclass(frozen=True)
class Sequence:
    """Queries, keys and values of every position of a sequence."""

    q: torch.Tensor  # [n, H, d]
    kv: torch.Tensor  # [n, 2, h, d]


def make(length: int, heads: Heads, dtype: torch.dtype, seed: int = 0) -> Sequence:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    q = torch.randn(length, heads.kv_heads * heads.group, heads.width, generator=generator)
    kv = torch.randn(length, 2, heads.kv_heads, heads.width, generator=generator)
    return Sequence((3 * q).to(dtype), kv.to(dtype))


def exact(sequence: Sequence, heads: Heads) -> torch.Tensor:
    """[n, H * d] in float64, a loop over positions and heads."""
    q, kv = sequence.q.double(), sequence.kv.double()
    out = torch.empty_like(q)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            keys, values = kv[: t + 1, :, h // heads.group].unbind(1)
            out[t, h] = torch.softmax(keys @ q[t, h] * SCALE, 0) @ values
    return out.flatten(1)


def run(
    parts: list[tuple[Sequence, int, int]], heads: Heads, block_size: int, *, spare: int = 0, plain: bool = False
) -> torch.Tensor:
    """Attention of positions [start, end) of each sequence in one pass, over a cache that is NaN wherever it may be."""
    dtype = parts[0][0].q.dtype
    widths = [-(-end // block_size) for _, _, end in parts]
    ids = (torch.randperm(sum(widths), generator=torch.Generator().manual_seed(3)) + 1).tolist()
    cache = torch.full((sum(widths) + 1, 2, heads.kv_heads, block_size, heads.width), torch.nan, dtype=dtype)
    table = torch.zeros(len(parts), max(widths) + spare, dtype=torch.int64)
    for row, width, (sequence, _, end) in zip(table, widths, parts, strict=True):
        row[:width] = torch.tensor([ids.pop() for _ in range(width)])
        positions = torch.arange(end)
        cache[row[positions // block_size], :, :, positions % block_size] = sequence.kv[:end]
    batch = PagedBatch(
        tuple(end - start for _, start, end in parts), tuple(end for _, _, end in parts), table, block_size
    )
    q = torch.cat([sequence.q[start:end] for sequence, start, end in parts])
    out = torch.zeros(len(q) + 1, heads.kv_heads * heads.group * heads.width, dtype=dtype)
    if plain:
        reference.attention(q, cache, batch, SCALE, out)
    else:
        prepared = prepare(
            batch,
            heads=heads.kv_heads * heads.group,
            kv_heads=heads.kv_heads,
            head_dim=heads.width,
            dtype=dtype,
            device=q.device,
        )
        attention(q, cache, prepared, scale=SCALE, out=out)
    assert not out[-1].any(), "wrote past the last token"
    return out[:-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("heads", [Heads(3, 3, 64), Heads(1, 1, 8), Heads(2, 4, 80)])
def test_matches_float64(heads: Heads, dtype: torch.dtype, plain: bool) -> None:
    lengths = (1, 5, TILE, TILE + 1, 2 * TILE + 9)
    parts = [(make(n, heads, dtype), start, n) for n, start in zip(lengths, (0, 0, TILE - 1, 3, 17), strict=True)]
    out = run(parts, heads, 16, spare=2, plain=plain)
    expected = torch.cat([exact(sequence, heads)[start:end] for sequence, start, end in parts])
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@requires_equal_bits
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bits_depend_on_the_sequence_alone(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from([Heads(3, 3, 64), Heads(1, 1, 16), Heads(2, 2, 48), Heads(1, 7, 32)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    borders = [1, 2, 15, 16, 17, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1, 3 * TILE + 5]
    length = st.one_of(st.sampled_from(borders), st.integers(1, 3 * TILE))
    parts = []
    for i in range(data.draw(st.integers(1, 9), label="sequences")):
        end = data.draw(length, label="end")
        new = data.draw(st.one_of(st.just(1), st.integers(1, end)), label="new")
        parts.append((make(end, heads, dtype, seed=i), end - new, end))
    before = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.sampled_from([1, 2, 5]), label="threads"))
    try:
        out = run(parts, heads, data.draw(st.sampled_from([1, 4, 16, 64])), spare=data.draw(st.integers(0, 3)))
        torch.set_num_threads(1)
        first = 0
        for sequence, start, end in parts:
            whole = run([(sequence, 0, end)], heads, 16)
            assert torch.equal(out[first : first + end - start], whole[start:])
            first += end - start
    finally:
        torch.set_num_threads(before)


@requires_equal_bits
def test_a_longer_prompt_does_not_change_what_came_before() -> None:
    heads = Heads(3, 3, 64)
    sequence = make(5 * TILE, heads, torch.bfloat16)
    whole = run([(sequence, 0, 5 * TILE)], heads, 16)
    for n in (1, 40, TILE, TILE + 1, 3 * TILE + 1):
        assert torch.equal(run([(sequence, n - 1, n)], heads, 16), whole[n - 1 : n])


def test_a_sequence_with_nan_spoils_no_other() -> None:
    heads = Heads(2, 2, 16)
    good, bad = make(70, heads, torch.float32), make(90, heads, torch.float32, seed=1)
    bad.kv[3] = torch.nan
    out = run([(bad, 89, 90), (good, 69, 70)], heads, 16)
    assert out[0].isnan().all()
    assert torch.equal(out[1:], run([(good, 69, 70)], heads, 16))


def test_batches_that_do_not_fit_are_refused() -> None:
    table = torch.ones(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="33 positions with 1 new ones does not fit"):
        PagedBatch((1,), (33,), table, 16)
    with pytest.raises(ValueError, match="disagree about the number of sequences"):
        PagedBatch((1, 1), (3, 3), table, 16)
    with pytest.raises(ValueError, match="3 query heads do not divide"):
        prepare(
            PagedBatch((1,), (3,), table, 16),
            heads=3,
            kv_heads=2,
            head_dim=8,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
