"""What `rotate_` and `store_kv` mean; fast enough to be what runs on CPU."""

from __future__ import annotations

import torch


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See the public function."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1))


def store_kv(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """See the public function."""
    _, heads, width = kv.shape
    cache.view(heads, -1, width).index_copy_(1, slots, kv.transpose(0, 1))
