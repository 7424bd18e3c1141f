"""What latent attention means: one sequence at a time, keys and values expanded, everything in float32."""

from __future__ import annotations

import torch

from lockstep_kernels.mla.batch import Expansion, LatentBatch


def store(
    q: torch.Tensor,
    latents: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool,
) -> None:
    """Norm, rotation and cache write: see the public function."""
    finish_latents(latents, gain, eps, cos, sin, interleaved)
    rotate_queries(q, cos, sin, interleaved)
    cache.view(-1, cache.shape[-1])[slots] = latents.to(cache.dtype)


def finish_latents(
    latents: torch.Tensor, gain: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> None:
    """See the public function."""
    rank = gain.shape[0]
    compressed = latents[:, :rank].float()
    scale = torch.rsqrt(compressed.square().mean(-1, keepdim=True) + eps)
    latents[:, :rank] = (compressed * scale * gain).to(latents.dtype)
    _rotate(latents[:, rank:], cos, sin, interleaved)


def rotate_queries(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """See the public function."""
    _rotate(q[..., -2 * cos.shape[-1] :], cos.unsqueeze(1), sin.unsqueeze(1), interleaved)


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: LatentBatch,
    expansion: Expansion,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """See the public function; host lengths must be there."""
    heads, rank, nope = expansion.heads, expansion.rank, expansion.nope
    rows, weight = cache.view(-1, cache.shape[-1]), expansion.weight.float()
    first = 0
    for i, (new, total) in enumerate(zip(batch.query_lens, batch.host_seq_lens, strict=True)):
        positions = torch.arange(total, device=q.device)
        blocks = batch.block_table[i, positions // batch.block_size]
        latents = rows[blocks * batch.block_size + positions % batch.block_size].float()  # [total, width]
        queries = q[first : first + new].float()
        expanded = torch.einsum("sr,hdr->shd", latents[:, :rank], weight)
        keys, values = expanded[..., :nope], expanded[..., nope:]
        scores = torch.einsum("thd,shd->hts", queries[..., :nope], keys)
        scores = (scores + torch.einsum("thd,sd->hts", queries[..., nope:], latents[:, rank:])) * scale
        if batch.causal and total:
            scores = scores.masked_fill(positions > positions[total - new :, None], -torch.inf)
        weights = torch.softmax(scores, -1)
        mixed = torch.einsum("hts,shd->thd", weights, values)
        out[first : first + new] = mixed.reshape(new, heads * expansion.value).to(out.dtype)
        if lse is not None:
            lse[first : first + new] = torch.logsumexp(scores, -1).t()
        first += new


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    a, b = first.float(), second.float()
    turned = a * cos - b * sin, b * cos + a * sin
    first.copy_(turned[0])
    second.copy_(turned[1])
