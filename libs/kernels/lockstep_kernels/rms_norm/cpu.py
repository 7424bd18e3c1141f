"""Root mean square normalisation on CPU."""

from __future__ import annotations

import torch

from lockstep_kernels.scripted import scripted


@scripted
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the public function."""
    wide = x.to(torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(wide, 2, [-1], True)
    scale = (norm * norm).div_(x.size(-1)).add_(eps).rsqrt_()
    y: torch.Tensor = (wide * scale).mul_(weight).to(x.dtype)
    return y
