"""What becomes of q, k and v on CPU."""

from __future__ import annotations

import torch

from lockstep_kernels.rms_norm.cpu import rms_norm
from lockstep_kernels.scripted import scripted


@scripted
def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See the public function."""
    swapped = x.roll([x.size(-1) // 2], [-1])
    x.mul_(cos).addcmul_(swapped, sin)


@scripted
def rotate_and_store_(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    gain: torch.Tensor | None,
    eps: float,
) -> None:
    """See the public function; cos and sin as for `rotate_`, `rows` of `kv_rows`."""
    kv_heads, width = cache.size(2), cache.size(4)
    heads = qkv.size(1) - 2 * kv_heads
    rotated = qkv[:, : heads + kv_heads]
    if gain is not None:
        rotated.copy_(rms_norm(rotated, gain, eps))
    rotate_(rotated[:, :, : cos.size(-1)], cos, sin)
    kv = qkv[: rows.size(0) // (2 * kv_heads), heads:]
    cache.view(-1, width).index_copy_(0, rows, kv.to(cache.dtype).reshape(-1, width))
