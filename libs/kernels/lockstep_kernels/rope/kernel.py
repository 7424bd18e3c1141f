"""Norm, rotation and store in one launch: some heads of one token a program.

A head lies in registers as its rotated halves and the rest, so that an element and its partner belong to the same thread and
queries and keys can be turned in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait

BLOCK_HEADS = 8


@triton.jit
def _gain(gain_ptr, head, rotated, WIDTH: tl.constexpr, first, d, inside):
    """1 for value heads, which have none."""
    return tl.load(gain_ptr + head * WIDTH + first + d, mask=inside & rotated, other=1.0)


@triton.jit
def _put(qkv_head, cache_head, d, y, is_rotated, is_stored, kv_scale):
    """Queries and keys go back where they came from, keys and values to their token's place in the cache."""
    tl.store(qkv_head + d, y.to(qkv_head.dtype.element_ty), mask=is_rotated)
    tl.store(cache_head + d, (y / kv_scale).to(cache_head.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["block_size"])
def _rotate_and_store(
    qkv_ptr,
    cache_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    gain_ptr,
    kv_scale_ptr,
    eps,
    block_size,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    HEADS: tl.constexpr = QUERIES + 2 * KEYS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_HALF)[None, :]
    rotated = head < QUERIES + KEYS
    inside = (head < HEADS) & (d < HALF)
    wait(PDL)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    qkv_row = qkv_ptr + token * (HEADS * WIDTH)
    low = tl.load(qkv_row + head * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv_row + head * WIDTH + HALF + d, mask=inside, other=0.0).to(tl.float32)
    turn = inside & rotated
    cos = tl.load(cos_ptr + position * HALF + d, mask=turn, other=1.0)
    sin = tl.load(sin_ptr + position * HALF + d, mask=turn, other=0.0)
    if BLOCK_REST:
        e = tl.arange(0, BLOCK_REST)[None, :]
        inside_rest = (head < HEADS) & (e < WIDTH - 2 * HALF)
        rest = tl.load(qkv_row + head * WIDTH + 2 * HALF + e, mask=inside_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low + high * high, axis=1)[:, None]
        if BLOCK_REST:
            squares += tl.sum(rest * rest, axis=1)[:, None]
        scale = tl.where(rotated, tl.rsqrt(squares / WIDTH + eps), 1.0)
        low = low * scale * _gain(gain_ptr, head, rotated, WIDTH, 0, d, inside)
        high = high * scale * _gain(gain_ptr, head, rotated, WIDTH, HALF, d, inside)
        if BLOCK_REST:
            rest = rest * scale * _gain(gain_ptr, head, rotated, WIDTH, 2 * HALF, e, inside_rest)
    stride = block_size.to(tl.int64) * WIDTH
    stored = head >= QUERIES
    kv_scale = 1.0
    if SCALED:
        kv_scale = tl.load(kv_scale_ptr + head - QUERIES, mask=stored & (head < HEADS), other=1.0)
    qkv_head = qkv_row + head * WIDTH
    cache_head = cache_ptr + (slot // block_size * (2 * KEYS) + head - QUERIES) * stride + slot % block_size * WIDTH
    _put(qkv_head, cache_head, d, low * cos - high * sin, inside & rotated, inside & stored, kv_scale)
    _put(qkv_head + HALF, cache_head + HALF, d, high * cos + low * sin, inside & rotated, inside & stored, kv_scale)
    if BLOCK_REST:
        at = 2 * HALF
        _put(qkv_head + at, cache_head + at, e, rest, inside_rest & rotated & NORM, inside_rest & stored, kv_scale)


def rotate_and_store_(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    gain: torch.Tensor | None,
    eps: float,
    *,
    kv_scale: torch.Tensor | None = None,
    pdl: bool | None = None,
) -> None:
    """See the public function; cos and sin float32 [all positions, r / 2]. Queries and keys change in place."""
    tokens, heads, width = qkv.shape
    kv_heads, block_size = cache.shape[2:4]
    if tokens == 0:
        return
    half = cos.shape[1]
    rest = width - 2 * half
    block_half = triton.next_power_of_2(half)
    pdl = dependent.supported(qkv.device) if pdl is None else pdl
    _rotate_and_store[(tokens, triton.cdiv(heads, BLOCK_HEADS))](
        qkv,
        cache,
        cos,
        sin,
        positions,
        slots,
        cos if gain is None else gain,
        cos if kv_scale is None else kv_scale,
        eps,
        block_size,
        QUERIES=heads - 2 * kv_heads,
        KEYS=kv_heads,
        WIDTH=width,
        HALF=half,
        BLOCK_H=BLOCK_HEADS,
        BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
        NORM=gain is not None,
        SCALED=kv_scale is not None,
        PDL=pdl,
        num_warps=max(1, min(4, BLOCK_HEADS * block_half // 256)),
        launch_pdl=pdl,
    )


def rotate_heads_(
    x: torch.Tensor,
    heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    gain: torch.Tensor | None,
    eps: float,
    *,
    pdl: bool | None = None,
) -> None:
    """See the public function; slots are 0. The same kernel: what it stores of keys and values is one token, which nobody reads."""
    kv_heads = x.shape[1] - heads
    stored = x.new_empty(1, 2, kv_heads, 1, x.shape[2])
    rotate_and_store_(x, stored, cos, sin, positions, slots, gain, eps, pdl=pdl)
