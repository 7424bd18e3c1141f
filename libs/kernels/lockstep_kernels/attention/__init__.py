"""Causal attention of new tokens over a paged KV cache: prefill, chunks after a cached prefix, and decode alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from lockstep_kernels.attention import cpu, reference
from lockstep_kernels.attention.batch import PagedBatch
from lockstep_kernels.checks import check_shape

if TYPE_CHECKING:
    from lockstep_kernels.attention import cuda

__all__ = ["PagedBatch", "Prepared", "attention", "prepare"]

Prepared: TypeAlias = "cpu.Prepared | cuda.Plan | PagedBatch"


def prepare(
    batch: PagedBatch,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
    new_kv: bool = False,
) -> Prepared:
    """What all layers of a pass share: which slots to read, masks, workspaces. Valid for one pass.

    `deterministic`, on CUDA: a token's bits depend neither on the other sequences nor on how its prompt was cut; prefill and
    decode may still differ, as they add in different orders. On CPU they never differ.
    `new_kv`: `attention` will be given the new tokens' keys and values, which is faster for long prompts without a prefix.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide among {kv_heads} key/value heads")
    if device.type == "cuda":
        from lockstep_kernels.attention import cuda

        return cuda.prepare(
            batch,
            group=heads // kv_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            deterministic=deterministic,
            new_kv=new_kv,
        )
    if len(batch.query_lens) != len(batch.block_table):
        raise ValueError(f"attention on {device.type} needs the lengths on the host: query_lens and seq_lens")
    if device.type == "cpu":
        return cpu.prepare(batch, heads // kv_heads, kv_heads, head_dim, dtype)
    return batch


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    prepared: Prepared,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    kv_scale: tuple[torch.Tensor, torch.Tensor] | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = concat over heads of softmax(scale * q[t] . K) V, over the keys of t's sequence up to t itself. Returns out.

    q [T, H, d] (tokens may be strided); cache [blocks, 2, h, block_size, d] (contiguous) holds the keys and values of
    all positions of the batch, those of the new tokens included; out [T', H * d] with T' >= T, of which the first T rows
    are written, or None: a new tensor [T, H * d], which can save a copy. new_kv: the new tokens' keys and values, each
    [T, h, d] (tokens may be strided), exactly if `prepare` was told so. kv_scale: float32 [h] for keys and for values: what
    the cache holds is multiplied by, if that is float8_e4m3fn; on CUDA only.
    lse: float32 [T, H] contiguous, or None; gets the log-sum-exp (natural) of each query's scaled scores. With it, out may be
    float32 whatever q is, and is if it is not given: parts of a sequence's keys are not rounded before `merge` adds them.
    A query without any key has the result 0, and the lse -inf.
    Products, softmax and sums are float32; weights are rounded to q's dtype on CUDA. Slots beyond a sequence's length
    and the null block may hold anything, NaN too. On CPU a token's bits depend neither on the other sequences, nor on how its
    prompt was cut, nor on prefill against decode; on CUDA see `prepare`.
    """
    tokens, heads, width = q.shape
    check_shape("cache", cache, (cache.shape[0], 2, cache.shape[2], cache.shape[3], width))
    if out is not None:
        check_shape("out", out, (out.shape[0], heads * width))
    for x in new_kv or ():
        check_shape("new_kv", x, (tokens, cache.shape[2], width))
    for x in kv_scale or ():
        check_shape("kv_scale", x, (cache.shape[2],))
    if lse is not None:
        check_shape("lse", lse, (tokens, heads))
        if lse.dtype != torch.float32 or not lse.is_contiguous():
            raise ValueError(f"lse must be contiguous float32, it is {lse.dtype}")
        out = q.new_empty(tokens, heads * width, dtype=torch.float32) if out is None else out
    if q.is_cuda:
        from lockstep_kernels.attention import cuda

        assert isinstance(prepared, cuda.DecodePlan | cuda.PrefillPlan)
        return cuda.attention(q, cache, prepared, scale, out, new_kv, kv_scale, lse)
    if kv_scale is not None:
        raise ValueError(f"a cache with scales is not supported on {q.device.type}")
    if out is None:
        out = q.new_empty(tokens, heads * width)
    if isinstance(prepared, PagedBatch):
        reference.attention(q, cache, prepared, scale, out, lse=lse)
    else:
        assert isinstance(prepared, tuple)
        cpu.attention(q, cache, prepared, scale, out, lse)
    return out
