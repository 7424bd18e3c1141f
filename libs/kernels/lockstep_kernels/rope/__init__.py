"""Rotary position embedding (half-split), and the way of new keys and values into the paged cache."""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.rope import reference


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the heads of x [T, h, d] in place by its positions' angles.

    cos and sin [T, 1, d] have x's dtype and hold each angle twice, `sin` with its first half negated, so that
    x * cos + halves_swapped(x) * sin is the rotation. A token's bits do not depend on T.
    """
    check_shape("cos", cos, (x.shape[0], 1, x.shape[2]))
    check_shape("sin", sin, (x.shape[0], 1, x.shape[2]))
    reference.rotate_(x, cos, sin)


def kv_rows(slots: torch.Tensor, kv_heads: int, block_size: int) -> torch.Tensor:
    """Where the keys and values of T tokens lie: rows of head_dim values in a layer's cache, [T * 2 * h] int64.

    slots [T] int64: block * block_size + offset. Token by token; of each its h keys, then its h values.
    """
    heads = torch.arange(2 * kv_heads, device=slots.device)
    blocks = slots.div(block_size, rounding_mode="floor").unsqueeze(1)
    return ((blocks * (2 * kv_heads) + heads) * block_size + (slots % block_size).unsqueeze(1)).flatten()


def store_kv(kv: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes T new keys and values into one layer's cache.

    kv [T, 2 * h, d]: h key heads, then h value heads; cache [blocks, 2, h, block_size, d] contiguous; rows of `kv_rows`.
    Values are rounded to the cache's dtype. Slots of rows that must not write lie in the null block and may repeat: what stands there afterwards is never read.
    """
    tokens, heads, width = kv.shape
    check_shape("cache", cache, (cache.shape[0], 2, heads // 2, cache.shape[3], width))
    check_shape("rows", rows, (tokens * heads,))
    reference.store_kv(kv, cache, rows)
