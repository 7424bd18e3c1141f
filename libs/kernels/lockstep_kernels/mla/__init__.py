"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a token's keys and values are one cached latent that all heads share.

A latent is `rank` compressed values, normalised, and beside them one rotated key of `rope` values. A query head has `nope`
values that meet the expanded latent and `rope` rotated ones that meet the rotated key as it is.
"""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.mla import cpu, reference
from lockstep_kernels.mla.batch import Expansion, LatentBatch, Prepared, takes_width
from lockstep_kernels.rms_norm import Norm

__all__ = ["Expansion", "LatentBatch", "Prepared", "attention", "pack", "prepare", "takes_width"]


def pack(weight: torch.Tensor, heads: int, nope: int) -> Expansion:
    """Of kv_b_proj [H * (nope + value), rank]. On CPU it is kept in float32, which its products are computed in."""
    out_features, rank = weight.shape
    if out_features % heads or out_features // heads <= nope:
        raise ValueError(f"a weight of {out_features} rows does not give {heads} heads keys of {nope} and values")
    weight = weight.contiguous().view(heads, -1, rank)
    return Expansion(weight if weight.is_cuda else weight.float(), nope)


def prepare(
    batch: LatentBatch,
    expansion: Expansion,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
    dtype: torch.dtype,
) -> Prepared:
    """What all layers of a pass share, whose expansions have the shapes of `expansion` and whose queries are of `dtype`.

    cos and sin float32 [T, rope / 2] of the tokens' positions: angle i turns the values 2i and 2i + 1 of a rotated part if
    `interleaved`, else i and i + rope / 2. slots [T] int64: where their latents go; those of tokens that must not write
    lie in the null block and may repeat. Valid for one pass. On CUDA, ValueError names a width that the kernels do not have.
    """
    tokens, half = cos.shape
    check_shape("sin", sin, (tokens, half))
    check_shape("slots", slots, (tokens,))
    if cos.is_cuda:
        from lockstep_kernels.mla import cuda

        cuda.check_widths(expansion, 2 * half)
        plan: object = cuda.prepare(batch, expansion, 2 * half, dtype)
    else:
        plan = cpu.prepare(batch)
    return Prepared(cos, sin, slots, interleaved, plan)


def attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    norm: Norm,
    cache: torch.Tensor,
    prepared: Prepared,
    expansion: Expansion,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Finishes a layer's projections, writes its latents into the cache, and attends:
    out[t] = concat over heads of softmax(scale * q[t] . K) V, over the keys of t's sequence up to t itself.

    q [T, H, nope + rope]: the last `rope` values of each head are rotated. latents [T, rank + rope]: the first `rank` are
    normalised (gain [rank]), the others rotated. Both in place, computed in float32 and rounded once; tokens may be strided.
    cache [blocks, 1, 1, block_size, rank + rope] contiguous, of one layer. out [T', H * value] with T' >= T, of which the
    first T rows are written. Slots beyond a sequence's length and the null block may hold anything, NaN too.
    On CPU a token's bits depend neither on the other sequences, nor on how its prompt was cut, nor on prefill against decode.
    """
    tokens, width = latents.shape
    rope = width - expansion.rank
    check_shape("q", q, (tokens, expansion.heads, expansion.nope + rope))
    check_shape("gain", norm.gain, (expansion.rank,))
    check_shape("cos", prepared.cos, (tokens, rope // 2))
    check_shape("cache", cache, (cache.shape[0], 1, 1, cache.shape[3], width))
    check_shape("out", out, (out.shape[0], expansion.heads * expansion.value))
    if isinstance(prepared.plan, tuple):
        p = prepared
        reference.store(q, latents, norm.gain, norm.eps, p.cos, p.sin, cache, p.slots, p.interleaved)
        cpu.attention(q, cache, prepared.plan, expansion, scale, out)
    else:
        from lockstep_kernels.mla import cuda

        cuda.attention(q, latents, norm, cache, prepared, expansion, scale, out)
