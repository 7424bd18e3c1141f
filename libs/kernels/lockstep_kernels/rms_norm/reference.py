"""What `rms_norm` means; written with as few operations as it takes, as each costs more than the arithmetic of a few rows."""

from __future__ import annotations

import functools

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the public function."""
    wide = x.to(torch.float32, copy=True)
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    mean_square = torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1])
    return wide.mul_(mean_square.rsqrt_()).mul_(weight).to(x.dtype)


@functools.cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor([value], device=device)
