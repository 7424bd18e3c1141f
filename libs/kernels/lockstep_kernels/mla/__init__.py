"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a token's keys and values are one cached latent that all heads share.

A latent is `rank` compressed values, normalised, and beside them one rotated key of `rope` values. A query head has `nope`
values that meet the expanded latent and `rope` rotated ones that meet the rotated key as it is.

`attention` is a layer's whole step. Where a sequence's latents lie in several caches, which is context parallelism, its parts are
called one by one: `finish_latents_`, `rotate_queries_`, `store`, and `attend` with a plan of `plan` for each cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.mla import cpu, reference
from lockstep_kernels.mla.batch import Expansion, LatentBatch, Prepared, takes_width
from lockstep_kernels.rms_norm import Norm

if TYPE_CHECKING:
    from lockstep_kernels.mla import cuda, parts

__all__ = [
    "Expansion",
    "LatentBatch",
    "Plan",
    "Prepared",
    "attend",
    "attention",
    "finish_latents_",
    "pack",
    "plan",
    "prepare",
    "rotate_queries_",
    "store",
    "takes_width",
]

Plan: TypeAlias = "cpu.Prepared | cuda.DecodePlan | parts.KeysPlan"


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
        planned: object = cuda.prepare(batch, expansion, 2 * half, dtype)
    else:
        planned = cpu.prepare(batch)
    return Prepared(cos, sin, slots, interleaved, planned)


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
    lse: torch.Tensor | None = None,
) -> None:
    """Finishes a layer's projections, writes its latents into the cache, and attends:
    out[t] = concat over heads of softmax(scale * q[t] . K) V, over the keys of t's sequence up to t itself.

    q [T, H, nope + rope]: the last `rope` values of each head are rotated. latents [T, rank + rope]: the first `rank` are
    normalised (gain [rank]), the others rotated. Both in place, computed in float32 and rounded once; tokens may be strided.
    cache [blocks, 1, 1, block_size, rank + rope] contiguous, of one layer. out [T', H * value] with T' >= T, of which the
    first T rows are written. Slots beyond a sequence's length and the null block may hold anything, NaN too. lse: as `attend`
    says; not of a captured prefill pass.
    On CPU a token's bits depend neither on the other sequences, nor on how its prompt was cut, nor on prefill against decode.
    """
    tokens, width = latents.shape
    rope = width - expansion.rank
    check_shape("q", q, (tokens, expansion.heads, expansion.nope + rope))
    check_shape("gain", norm.gain, (expansion.rank,))
    check_shape("cos", prepared.cos, (tokens, rope // 2))
    check_shape("cache", cache, (cache.shape[0], 1, 1, cache.shape[3], width))
    check_shape("out", out, (out.shape[0], expansion.heads * expansion.value))
    if lse is not None:
        _check_lse(lse, tokens, expansion.heads)
    if isinstance(prepared.plan, tuple):
        p = prepared
        reference.store(q, latents, norm.gain, norm.eps, p.cos, p.sin, cache, p.slots, p.interleaved)
        cpu.attention(q, cache, prepared.plan, expansion, scale, out, lse)
    else:
        from lockstep_kernels.mla import cuda

        cuda.attention(q, latents, norm, cache, prepared, expansion, scale, out, lse)


def finish_latents_(
    latents: torch.Tensor, norm: Norm, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """What is cached of new tokens: latents [T, rank + rope] with the first `rank` values normalised (gain [rank]) and the others
    rotated, in place; returned. Tokens may be strided. cos, sin, `interleaved` as in `prepare`."""
    tokens, half = cos.shape
    check_shape("sin", sin, (tokens, half))
    check_shape("latents", latents, (tokens, norm.gain.shape[0] + 2 * half))
    if latents.is_cuda:
        from lockstep_kernels.mla import parts

        parts.finish_latents(latents, norm, cos, sin, interleaved)
    else:
        reference.finish_latents(latents, norm.gain, norm.eps, cos, sin, interleaved)
    return latents


def rotate_queries_(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """q [T, H, nope + rope] with the last `rope` values of each head rotated, in place; returned. Tokens may be strided. cos, sin,
    `interleaved` as in `prepare`."""
    tokens, half = cos.shape
    check_shape("sin", sin, (tokens, half))
    check_shape("q", q, (tokens, q.shape[1], q.shape[2]))
    if q.is_cuda:
        from lockstep_kernels.mla import parts

        parts.rotate_queries(q, cos, sin, interleaved)
    else:
        reference.rotate_queries(q, cos, sin, interleaved)
    return q


def store(latents: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes finished latents [T, rank + rope] to slots [T] int64 of cache [blocks, 1, 1, block_size, rank + rope] contiguous.

    Slots of tokens that must not write lie in the null block and may repeat.
    """
    check_shape("slots", slots, (latents.shape[0],))
    check_shape("cache", cache, (cache.shape[0], 1, 1, cache.shape[3], latents.shape[1]))
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots, latents.to(cache.dtype))


def plan(batch: LatentBatch, expansion: Expansion, *, rope: int, dtype: torch.dtype) -> Plan:
    """What all layers of a pass share to `attend` to one cache; `rope` and `expansion` for the widths, `dtype` of the queries.

    A decode step is absorbed, other passes are expanded (on CPU all are absorbed). Valid for one pass. A captured prefill pass has
    no such plan: ValueError.
    """
    if batch.query_starts is not None:
        raise ValueError("a captured prefill pass cannot attend to several caches")
    if batch.seq_lens.is_cuda:
        from lockstep_kernels.mla import cuda, parts

        cuda.check_widths(expansion, rope)
        return parts.plan(batch, expansion, dtype)
    return cpu.prepare(batch)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: Plan,
    expansion: Expansion,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """out[t] = concat over heads of softmax(scale * q[t] . K) V, over the keys that t's sequence has in this cache.

    q [T, H, nope + rope] as `rotate_queries_` leaves it; cache [blocks, 1, 1, block_size, rank + rope] contiguous, which holds all
    seq_lens[i] positions of the batch already; out [T', H * value] with T' >= T, of which the first T rows are written: of any
    floating type, float32 if it is a part to be merged. lse float32 [T, H] contiguous, or None: gets the log-sum-exp (natural) of
    each query's scaled scores. A query without any key has the result 0, and the lse -inf.
    """
    tokens, width = q.shape[0], cache.shape[-1]
    check_shape("q", q, (tokens, expansion.heads, expansion.nope + width - expansion.rank))
    check_shape("cache", cache, (cache.shape[0], 1, 1, cache.shape[3], width))
    check_shape("out", out, (out.shape[0], expansion.heads * expansion.value))
    if lse is not None:
        _check_lse(lse, tokens, expansion.heads)
    if isinstance(plan, tuple):
        cpu.attention(q, cache, plan, expansion, scale, out, lse)
    else:
        from lockstep_kernels.mla import parts

        parts.attend(q, cache, plan, expansion, scale, out, lse)


def _check_lse(lse: torch.Tensor, tokens: int, heads: int) -> None:
    check_shape("lse", lse, (tokens, heads))
    if lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous float32, it is {lse.dtype}")
