"""Causal attention of new tokens over a paged KV cache: prefill, chunks after a cached prefix, and decode alike."""

from __future__ import annotations

import torch

from lockstep_kernels.attention import cpu, reference
from lockstep_kernels.attention.batch import PagedBatch
from lockstep_kernels.checks import check_shape

__all__ = ["PagedBatch", "Prepared", "attention", "prepare"]

Prepared = cpu.Prepared | PagedBatch


def prepare(
    batch: PagedBatch, *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Prepared:
    """What all layers of a pass share: which slots to read, masks, workspaces. Valid for one pass."""
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide among {kv_heads} key/value heads")
    if device.type == "cpu":
        return cpu.prepare(batch, heads // kv_heads, kv_heads, head_dim, dtype)
    return batch


def attention(q: torch.Tensor, cache: torch.Tensor, prepared: Prepared, *, scale: float, out: torch.Tensor) -> None:
    """out[t] = concat over heads of softmax(scale * q[t] . K) V, over the keys of t's sequence up to t itself.

    q [T, H, d] (tokens may be strided); cache [blocks, 2, h, block_size, d] (contiguous) holds the keys and values of
    all positions of the batch, those of the new tokens included; out [T', H * d] with T' >= T, of which the first T rows
    are written. Products, softmax and sums are float32. Slots beyond a sequence's length and the null block may hold anything, NaN too.
    A token's bits depend neither on the other sequences, nor on how its prompt was cut, nor on prefill against decode.
    """
    heads, width = q.shape[1:]
    check_shape("cache", cache, (cache.shape[0], 2, cache.shape[2], cache.shape[3], width))
    check_shape("out", out, (out.shape[0], heads * width))
    if isinstance(prepared, PagedBatch):
        reference.attention(q, cache, prepared, scale, out)
    else:
        cpu.attention(q, cache, prepared, scale, out)
