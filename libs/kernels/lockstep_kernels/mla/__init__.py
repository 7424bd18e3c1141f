"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a token's keys and values are one cached latent that all heads share.

A latent is `rank` compressed values, normalised, and beside them one rotated key of `rope` values. A query head has `nope`
values that meet the expanded latent and `rope` rotated ones that meet the rotated key as it is.
"""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.mla import cpu, reference
from lockstep_kernels.mla.batch import Expansion, LatentBatch

__all__ = ["Expansion", "LatentBatch", "attention", "pack", "prepare", "store_"]


def pack(weight: torch.Tensor, heads: int, nope: int) -> Expansion:
    """Of kv_b_proj [H * (nope + value), rank]. On CPU it is kept in float32, which its products are computed in."""
    out_features, rank = weight.shape
    if out_features % heads or out_features // heads <= nope:
        raise ValueError(f"a weight of {out_features} rows does not give {heads} heads keys of {nope} and values")
    weight = weight.contiguous().view(heads, -1, rank)
    return Expansion(weight if weight.is_cuda else weight.float(), nope)


def store_(
    q: torch.Tensor,
    latents: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """Finishes a pass's projections in place and writes its latents into one layer's cache.

    q [T, H, nope + rope]: the last `rope` values of each head are rotated. latents [T, rank + rope]: the first `rank` are
    normalised (gain float32 [rank]), the others rotated. Tokens of both may be strided. cos and sin float32 [T, rope / 2];
    angle i turns the values 2i and 2i + 1 if `interleaved`, else i and i + rope / 2. cache [blocks, 1, 1, block_size, rank + rope] contiguous,
    slots [T] int64. Computed in float32, rounded once. Slots of tokens that must not write lie in the null block and may repeat.
    """
    tokens, width = latents.shape
    rope = 2 * cos.shape[-1]
    check_shape("q", q, (tokens, *q.shape[1:]))
    check_shape("gain", gain, (width - rope,))
    check_shape("sin", sin, tuple(cos.shape))
    check_shape("cos", cos, (tokens, rope // 2))
    check_shape("cache", cache, (cache.shape[0], 1, 1, cache.shape[3], width))
    check_shape("slots", slots, (tokens,))
    reference.store(q, latents, gain, eps, cos, sin, cache, slots, interleaved)


def prepare(batch: LatentBatch, expansion: Expansion) -> cpu.Prepared:
    """What all layers of a pass share, whose expansions have the shapes of `expansion`. Valid for one pass."""
    return cpu.prepare(batch)


def attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    cache: torch.Tensor,
    prepared: cpu.Prepared,
    expansion: Expansion,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """out[t] = concat over heads of softmax(scale * q[t] . K) V, over the keys of t's sequence up to t itself.

    q [T, H, nope + rope] and latents [T, rank + rope] as `store_` left them (both may be strided); the cache holds the latents
    of all positions of the batch, those of the new tokens included; out [T', H * value] with T' >= T, of which the first T
    rows are written. Slots beyond a sequence's length and the null block may hold anything, NaN too.
    """
    tokens, width = latents.shape
    rope = width - expansion.rank
    check_shape("q", q, (tokens, expansion.heads, expansion.nope + rope))
    check_shape("cache", cache, (cache.shape[0], 1, 1, cache.shape[3], width))
    check_shape("out", out, (out.shape[0], expansion.heads * expansion.value))
    cpu.attention(q, cache, prepared, expansion, scale, out)
