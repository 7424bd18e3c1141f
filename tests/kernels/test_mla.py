"""Latent attention on CPU against its reference, with NaN in every slot that must not be read, and its checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels import mla
from lockstep_kernels.mla import Expansion, LatentBatch, Prepared, attention, cpu, pack, prepare, reference
from lockstep_kernels.rms_norm import Norm

HEADS, NOPE, ROPE, VALUE, RANK = 3, 20, 6, 12, 16
WIDTH = RANK + ROPE
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}

Pass = tuple[torch.Tensor, torch.Tensor, torch.Tensor, LatentBatch, Prepared, Expansion]


def make(spans: list[tuple[int, int]], block_size: int, dtype: torch.dtype, interleaved: bool) -> Pass:
    """q, latents, cache, batch, prepared and expansion of a pass over (first new position, length) of sequences."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    widths = [-(-end // block_size) for _, end in spans]
    ids = (torch.randperm(sum(widths), generator=generator) + 1).tolist()
    cache = torch.full((sum(widths) + 1, 1, 1, block_size, WIDTH), torch.nan, dtype=dtype)
    table = torch.zeros(len(spans), max(widths), dtype=torch.int64)
    slots = []
    for row, blocks, (start, end) in zip(table, widths, spans, strict=True):
        row[:blocks] = torch.tensor([ids.pop() for _ in range(blocks)])
        positions = torch.arange(end)
        at = row[positions // block_size] * block_size + positions % block_size
        cache.view(-1, WIDTH)[at[:start]] = randn(start, WIDTH)
        slots.append(at[start:])
    new, lens = tuple(end - start for start, end in spans), tuple(end for _, end in spans)
    batch = LatentBatch(False, new, lens, torch.tensor(lens), table, block_size)
    expansion = pack(randn(HEADS * (NOPE + VALUE), RANK) * RANK**-0.5, HEADS, NOPE)
    angles = torch.rand(sum(new), ROPE // 2, generator=generator) * 6
    prepared = prepare(
        batch, expansion, angles.cos(), angles.sin(), torch.cat(slots), interleaved=interleaved, dtype=dtype
    )
    return randn(sum(new), HEADS, NOPE + ROPE), randn(sum(new), WIDTH), cache, batch, prepared, expansion


@settings(max_examples=40, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 140)), min_size=1, max_size=4),
    block_size=st.sampled_from([4, 16, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    interleaved=st.booleans(),
)
def test_against_the_reference(
    spans: list[tuple[int, int]], block_size: int, dtype: torch.dtype, interleaved: bool
) -> None:
    operands = make([(start, start + new) for start, new in spans], block_size, dtype, interleaved)
    q, latents, cache, batch, p, expansion = operands
    norm = Norm(1 + 0.1 * torch.randn(RANK, generator=torch.Generator().manual_seed(1)), 1e-6)
    wanted = q1, latents1, cache1 = q.clone(), latents.clone(), cache.clone()
    reference.store(q1, latents1, norm.gain, norm.eps, p.cos, p.sin, cache1, p.slots, p.interleaved)
    expected = torch.empty(len(q), HEADS * VALUE)
    reference.attention(q1, cache1, batch, expansion, 0.2, expected)
    out = torch.full((len(q) + 1, HEADS * VALUE), torch.nan, dtype=dtype)
    attention(q, latents, norm, cache, p, expansion, scale=0.2, out=out)
    for got, want in zip((q, latents, cache), wanted, strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    torch.testing.assert_close(out[:-1].float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert out[-1].isnan().all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_one_by_one_it_is_what_it_is_as_a_whole(dtype: torch.dtype) -> None:
    """Latents, queries, cache and result, to the bit; both give the same log-sum-exp."""
    q, latents, cache, batch, p, expansion = make([(0, 70), (20, 21), (64, 130)], 16, dtype, True)
    norm = Norm(1 + 0.1 * torch.randn(RANK, generator=torch.Generator().manual_seed(1)), 1e-6)
    whole = q.clone(), latents.clone(), cache.clone()
    outs, lses = torch.full((2, len(q), HEADS * VALUE), torch.nan), torch.full((2, len(q), HEADS), torch.nan)
    attention(whole[0], whole[1], norm, whole[2], p, expansion, scale=0.2, out=outs[0], lse=lses[0])
    assert mla.finish_latents_(latents, norm, p.cos, p.sin, interleaved=True) is latents
    assert mla.rotate_queries_(q, p.cos, p.sin, interleaved=True) is q
    mla.store(latents, cache, p.slots)
    plan = mla.plan(batch, expansion, rope=ROPE, dtype=dtype)
    mla.attend(q, cache, plan, expansion, scale=0.2, out=outs[1], lse=lses[1])
    for one, other in zip((q, latents, cache.nan_to_num(7.0)), (*whole[:2], whole[2].nan_to_num(7.0)), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(outs[0], outs[1]) and torch.equal(lses[0], lses[1])
    want = torch.empty(len(q), HEADS)
    reference.attention(q, cache, batch, expansion, 0.2, torch.empty_like(outs[0]), want)
    torch.testing.assert_close(lses[0], want, rtol=1e-5, atol=1e-5)


def test_the_reference_turns_pairs_by_their_angles() -> None:
    """Against complex numbers: values 2i and 2i + 1 of a key, or i and i + rope / 2, are the parts of one."""
    for interleaved in (True, False):
        _, latents, cache, _, p, _ = make([(0, 5)], 4, torch.float32, interleaved)
        q = torch.zeros(5, HEADS, ROPE)
        pairs = latents[:, RANK:].view(5, ROPE // 2, 2) if interleaved else latents[:, RANK:].view(5, 2, -1).mT
        turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(p.cos, p.sin)
        reference.store(q, latents, torch.ones(RANK), 1e-6, p.cos, p.sin, cache, p.slots, interleaved)
        flat = torch.view_as_real(turned) if interleaved else torch.view_as_real(turned).mT
        torch.testing.assert_close(latents[:, RANK:], flat.reshape(5, ROPE))


def test_a_batch_is_checked() -> None:
    lens, table = torch.tensor([5]), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="does not fit"):
        LatentBatch(False, (6,), (5,), lens, table, 4)
    with pytest.raises(ValueError, match="does not fit"):
        LatentBatch(False, (1,), (9,), lens, table, 4)
    with pytest.raises(ValueError, match="needs the lengths"):
        LatentBatch(False, (), (), lens, table, 4)
    with pytest.raises(ValueError, match="one new token"):
        LatentBatch(True, (2,), (5,), lens, table, 4)
    with pytest.raises(ValueError, match="on the host"):
        cpu.prepare(LatentBatch(True, (), (), lens, table, 4))
    with pytest.raises(ValueError, match="number of sequences"):
        LatentBatch(True, (), (), lens, table.repeat(2, 1), 4)


def test_an_expansion_is_checked() -> None:
    with pytest.raises(ValueError, match="does not give"):
        pack(torch.zeros(60, 16), 3, 20)
