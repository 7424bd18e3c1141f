"""What `rotate_` and `store_kv` mean; fast enough to be what runs on CPU."""

from __future__ import annotations

import torch


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See the public function."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)


def store_kv(kv: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor) -> None:
    """See the public function."""
    width = kv.shape[-1]
    cache.view(-1, width).index_copy_(0, rows, kv.reshape(-1, width).to(cache.dtype))
