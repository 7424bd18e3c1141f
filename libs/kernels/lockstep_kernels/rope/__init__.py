"""Rotary position embedding (half-split), and the way of new keys and values into the paged cache."""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.rope import reference


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the heads of x [T, h, d] in place by its positions' angles.

    cos and sin [T, d] have x's dtype and hold each angle twice, `sin` with its first half negated, so that
    x * cos + halves_swapped(x) * sin is the rotation. A token's bits do not depend on T.
    """
    tokens, _, width = x.shape
    check_shape("cos", cos, (tokens, width))
    check_shape("sin", sin, (tokens, width))
    reference.rotate_(x, cos, sin)


def store_kv(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes T new keys and values into one layer's cache.

    kv [T, 2 * h, d]: h key heads, then h value heads; cache [2, h, S, d]; slots int64 [T], each < S. Slots of rows that
    must not write lie in the null block and may repeat: what stands there afterwards is never read.
    """
    tokens, heads, width = kv.shape
    check_shape("cache", cache, (2, heads // 2, cache.shape[2], width))
    check_shape("slots", slots, (tokens,))
    reference.store_kv(kv, cache, slots)
