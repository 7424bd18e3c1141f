"""Rotary position embedding (half-split), and the way of new keys and values into the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_kernels.rope import cpu, reference

__all__ = [
    "Prepared",
    "Tables",
    "kv_rows",
    "prepare",
    "rotate_",
    "rotate_and_store_",
    "rotate_heads_",
    "store_kv",
    "tables",
]


@dataclass(frozen=True, slots=True)
class Tables:
    """cos and sin of every position's angles on a model's device.

    On CPU [positions, r] in the vectors' dtype, as `rotate_` takes them; on CUDA float32 [positions, r / 2].
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all layers of a pass share: the angles of its tokens' positions, and where their keys and values go."""

    cos: torch.Tensor  # CPU: [R, 1, r], of the pass's rows; CUDA: of all positions
    sin: torch.Tensor
    where: torch.Tensor  # CPU: rows of `kv_rows`; CUDA: slots [T]
    positions: torch.Tensor  # [R]


def tables(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Tables:
    """Of cos and sin float64 [positions, r / 2], for vectors of `dtype`, of which the first r elements are rotated."""
    check_shape("sin", sin, tuple(cos.shape))
    if device.type == "cuda":
        return Tables(cos.to(device, torch.float32), sin.to(device, torch.float32))
    return Tables(torch.cat((cos, cos), 1).to(device, dtype), torch.cat((-sin, sin), 1).to(device, dtype))


def prepare(
    tables: Tables,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_heads: int,
    block_size: int,
    dtype: torch.dtype,
) -> Prepared:
    """For vectors of `dtype`. positions [R] int64 of all rows of a pass; slots [T] int64 of its tokens, the first T <= R
    rows: what further rows compute is stored nowhere."""
    if positions.is_cuda:
        check_shape("slots", slots, tuple(positions.shape))
        return Prepared(tables.cos, tables.sin, slots, positions)
    cos, sin = (table[positions].unsqueeze(1).to(dtype) for table in (tables.cos, tables.sin))
    return Prepared(cos, sin, kv_rows(slots, kv_heads, block_size), positions)


def rotate_and_store_(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    prepared: Prepared,
    norm: Norm | None = None,
    *,
    kv_scale: torch.Tensor | None = None,
) -> None:
    """Turns the products q, k, v of a pass into what attention reads.

    qkv [R, H + 2h, d] contiguous: the query heads, key heads and value heads of R rows. Each query and key head is
    normalised if there is a `norm` (its gain [H + h, d]), then the first r of its d elements are rotated, in
    place; the keys and values of the first T rows are written to the cache [blocks, 2, h, block_size, d] contiguous.
    kv_scale float32 [2, h], of keys and of values: what is written is divided by it (a cache of 8 bits, on CUDA).
    """
    kv_heads = cache.shape[2]
    heads, width = qkv.shape[1] - 2 * kv_heads, qkv.shape[2]
    check_shape("cache", cache, (cache.shape[0], 2, kv_heads, cache.shape[3], width))
    check_shape("positions", prepared.positions, (qkv.shape[0],))
    if norm is not None:
        check_shape("gain", norm.gain, (heads + kv_heads, width))
    if kv_scale is not None:
        check_shape("kv_scale", kv_scale, (2, kv_heads))
    if qkv.is_cuda:
        from lockstep_kernels.rope import kernel

        gain, eps = norm if norm is not None else (None, 0.0)
        p = prepared
        kernel.rotate_and_store_(qkv, cache, p.cos, p.sin, p.positions, p.where, gain, eps, kv_scale=kv_scale)
        return
    if kv_scale is not None:
        raise ValueError(f"a cache with scales is not supported on {qkv.device.type}")
    if qkv.device.type == "cpu":
        gain, eps = norm if norm is not None else (None, 0.0)
        cpu.rotate_and_store_(qkv, cache, prepared.cos, prepared.sin, prepared.where, gain, eps)
        return
    rotated = qkv[:, : heads + kv_heads]
    if norm is not None:
        rotated.copy_(rms_norm(rotated, *norm))
    rotate_(rotated[..., : prepared.cos.shape[-1]], prepared.cos, prepared.sin)
    tokens = prepared.where.shape[0] // (2 * kv_heads)
    store_kv(qkv[:tokens, heads:], cache, prepared.where)


def rotate_heads_(x: torch.Tensor, heads: int, prepared: Prepared, norm: Norm | None = None) -> None:
    """What `rotate_and_store_` does to queries and keys, of some of them alone: nothing is stored.

    x [R, n, d] contiguous: the first `heads` heads of R rows are normalised if there is a `norm` (its gain [heads, d]) and
    rotated, in place; the others, none or as many values, stay. `prepared` with slots of 0.
    """
    rows, count, width = x.shape
    check_shape("positions", prepared.positions, (rows,))
    if norm is not None:
        check_shape("gain", norm.gain, (heads, width))
    if count not in (heads, 2 * heads):
        raise ValueError(f"{heads} of {count} heads are rotated: expected all, or keys before as many values")
    gain, eps = norm if norm is not None else (None, 0.0)
    if x.is_cuda:
        from lockstep_kernels.rope import kernel

        kernel.rotate_heads_(x, heads, prepared.cos, prepared.sin, prepared.positions, prepared.where, gain, eps)
        return
    rotated = x[:, :heads]
    if norm is not None:
        rotated.copy_(rms_norm(rotated, *norm))
    rotate_(rotated[..., : prepared.cos.shape[-1]], prepared.cos, prepared.sin)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the heads of x [T, h, d] in place by its positions' angles.

    cos and sin [T, 1, d] have x's dtype and hold each angle twice, `sin` with its first half negated, so that
    x * cos + halves_swapped(x) * sin is the rotation. A token's bits do not depend on T.
    """
    check_shape("cos", cos, (x.shape[0], 1, x.shape[2]))
    check_shape("sin", sin, (x.shape[0], 1, x.shape[2]))
    (cpu if x.device.type == "cpu" else reference).rotate_(x, cos, sin)


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
