"""What `attention` means: one sequence at a time, everything in float32."""

from __future__ import annotations

import torch

from lockstep_kernels.attention.batch import PagedBatch


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    out: torch.Tensor,
    kv_scale: tuple[torch.Tensor, torch.Tensor] | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """See the public function."""
    _, heads, width = q.shape
    kv_heads = cache.shape[2]
    first = 0
    for i, (new, total) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        positions = torch.arange(total, device=q.device)
        blocks = batch.block_table[i, positions // batch.block_size]
        keys, values = cache[blocks, :, :, positions % batch.block_size].float().unbind(1)  # [total, kv_heads, d]
        if kv_scale is not None:
            keys, values = keys * kv_scale[0][:, None], values * kv_scale[1][:, None]
        queries = q[first : first + new].float().view(new, kv_heads, heads // kv_heads, width)
        scores = torch.einsum("tkgd,skd->kgts", queries, keys) * scale
        if batch.causal and total:
            scores = scores.masked_fill(positions > positions[total - new :, None], -torch.inf)
        weights = torch.softmax(scores, -1)
        mixed = torch.einsum("kgts,skd->tkgd", weights, values)
        out[first : first + new] = mixed.reshape(new, heads * width).to(out.dtype)
        if lse is not None:
            lse[first : first + new] = torch.logsumexp(scores, -1).flatten(0, 1).t()
        first += new
