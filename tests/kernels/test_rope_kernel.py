"""Norm, rotation and store in one kernel against the three operations in float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels import rope
from lockstep_kernels.rms_norm import Norm
from tests.kernels.device import DEVICE, ON_GPU, poisoned, randn, requires_gpu

from lockstep_kernels.rope import kernel  # isort: skip  (after tests.kernels.device)

POSITIONS, EPS = 3000, 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}  # of values up to about 4


def angles(rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = 10000.0 ** -(torch.arange(0, rotated, 2).double() / rotated)
    at = torch.arange(POSITIONS).double()[:, None] * turns
    return at.cos() * 1.25, at.sin() * 1.25


def in_float32(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotated: int,
    norm: Norm | None,
) -> torch.Tensor:
    """What the operations one by one make of `qkv` on CPU; the cache is written."""
    out, host = qkv.cpu().to(torch.float32, copy=True), cache.cpu()
    tables = rope.tables(*angles(rotated), torch.float32, out.device)
    prepared = rope.prepare(
        tables, positions.cpu(), slots.cpu(), kv_heads=cache.shape[2], block_size=cache.shape[3], dtype=torch.float32
    )
    rope.rotate_and_store_(out, host, prepared, None if norm is None else Norm(norm.gain.cpu(), norm.eps))
    cache.copy_(host)
    return out.to(qkv.device)


@settings(max_examples=15, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    tokens=st.integers(0, 300 if ON_GPU else 4),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 4), (12, 1)]),
    widths=st.sampled_from([(16, 16), (64, 64), (128, 64), (80, 80), (96, 24), (128, 128)]),
    block_size=st.sampled_from([16, 64]),
    normed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_the_operations_one_by_one(
    dtype: torch.dtype,
    tokens: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    block_size: int,
    normed: bool,
    seed: int,
) -> None:
    (queries, keys), (width, rotated) = heads, widths
    generator = torch.Generator().manual_seed(seed)
    blocks = 1 + -(-max(tokens, 1) // block_size) * 2
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator).to(DEVICE)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens].to(DEVICE)
    norm = Norm(randn(queries + keys, width, seed=1), EPS) if normed else None
    qkv = randn(tokens, queries + 2 * keys, width, dtype=dtype, seed=seed)
    cache = poisoned(blocks, 2, keys, block_size, width, dtype=dtype)
    want_cache = cache.clone()
    want = in_float32(qkv, want_cache, positions, slots, rotated, norm)
    cos, sin = (table.float().to(DEVICE) for table in angles(rotated))
    gain, eps = (None, 0.0) if norm is None else norm
    kernel.rotate_and_store_(qkv, cache, cos, sin, positions, slots, gain, eps)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        qkv[:, : queries + keys].float(), want[:, : queries + keys], rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(cache, want_cache, rtol=tolerance, atol=tolerance, equal_nan=True)


@requires_gpu
@pytest.mark.gpu
def test_slots_beyond_two_to_the_31_elements() -> None:
    cache = torch.zeros(20_000, 2, 8, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.tensor([20_000 * 64 - 1, 64], device=DEVICE)
    qkv = randn(2, 48, 128, dtype=torch.bfloat16)
    cos, sin = (table.float().to(DEVICE) for table in angles(128))
    kernel.rotate_and_store_(qkv, cache, cos, sin, torch.zeros_like(slots), slots, None, 0.0)
    assert torch.equal(cache[-1, 1, :, -1], qkv[0, 40:])
    assert torch.equal(cache[1, 1, :, 0], qkv[1, 40:])
    assert int((cache != 0).any(-1).sum()) == 2 * 2 * 8


def test_what_a_cache_of_8_bits_keeps_is_divided_by_its_scale() -> None:
    queries, keys, width = 3, 2, 16
    qkv = randn(2, queries + 2 * keys, width, dtype=torch.bfloat16)
    plain = poisoned(3, 2, keys, 16, width)
    cache = torch.zeros(3, 2, keys, 16, width, dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.tensor([[0.02, 0.5], [0.1, 0.03]], device=DEVICE)
    slots, positions = torch.tensor([17, 40], device=DEVICE), torch.tensor([5, 6], device=DEVICE)
    cos, sin = (table.float().to(DEVICE) for table in angles(width))
    kernel.rotate_and_store_(qkv.clone(), plain, cos, sin, positions, slots, None, 0.0)
    kernel.rotate_and_store_(qkv, cache, cos, sin, positions, slots, None, 0.0, kv_scale=scale)
    for slot in slots.tolist():
        block, offset = divmod(slot, 16)
        got = cache[block, :, :, offset].float() * scale[..., None]
        torch.testing.assert_close(got, plain[block, :, :, offset], rtol=2**-4, atol=2**-9)


@settings(max_examples=10, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    tokens=st.integers(1, 300 if ON_GPU else 4),
    heads=st.sampled_from([1, 3, 9]),
    widths=st.sampled_from([(16, 16), (80, 80), (96, 24)]),
    values=st.booleans(),
    normed=st.booleans(),
)
def test_heads_alone_become_what_they_become_among_others(
    dtype: torch.dtype, tokens: int, heads: int, widths: tuple[int, int], values: bool, normed: bool
) -> None:
    width, rotated = widths
    positions = (torch.arange(tokens) * 7).to(DEVICE)
    norm = Norm(randn(2 * heads, width, seed=1), EPS) if normed else None
    qkv = randn(tokens, 3 * heads, width, dtype=dtype, seed=2)  # as many of each kind
    cache = poisoned(tokens, 2, heads, 16, width, dtype=dtype)
    want = in_float32(qkv, cache, positions, positions * 0, rotated, norm)
    first = heads if values else 0  # keys and values, or queries
    x = qkv[:, first : first + 2 * heads if values else heads].clone()
    cos, sin = (table.float().to(DEVICE) for table in angles(rotated))
    own = None if norm is None else norm.gain[first : first + heads]
    kernel.rotate_heads_(x, heads, cos, sin, positions, positions * 0, own, EPS)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(x.float(), want[:, first : first + x.shape[1]], rtol=tolerance, atol=tolerance)
    if dtype == torch.float32:  # the same on CPU
        y = torch.empty_like(x, device="cpu").copy_(qkv[:, first : first + x.shape[1]])
        tables = rope.tables(*angles(rotated), dtype, y.device)
        prepared = rope.prepare(tables, positions.cpu(), positions.cpu() * 0, kv_heads=heads, block_size=1, dtype=dtype)
        rope.rotate_heads_(y, heads, prepared, None if own is None else Norm(own.cpu(), EPS))
        torch.testing.assert_close(y, x.cpu(), rtol=tolerance, atol=tolerance)
