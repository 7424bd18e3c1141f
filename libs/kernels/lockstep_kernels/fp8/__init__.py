"""Weights of 8 bits (e4m3) with scales, and products of operands that are quantised on the way.

A weight [n, k] has one scale for each block of 128 x 128 (DeepSeek-V3's form) or for each row (per channel). Operands get a
scale of their own for each token and 128 elements, or for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.fp8 import reference

__all__ = ["BLOCK", "E4M3", "Fp8Weight", "dequantise"]

BLOCK = reference.BLOCK
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """values * scale, where the scale of element [i, j] is scale[i // 128, j // 128], or scale[i]."""

    values: torch.Tensor  # [n, k] e4m3
    scale: torch.Tensor  # float32 [ceil(n / 128), ceil(k / 128)] or [n]

    def __post_init__(self) -> None:
        n, k = self.values.shape
        if self.values.dtype != E4M3 or self.scale.dtype != torch.float32:
            raise ValueError(f"values are {self.values.dtype}, scales {self.scale.dtype}: expected {E4M3} and float32")
        check_shape("scale", self.scale, (-(-n // BLOCK), -(-k // BLOCK)) if self.scale.dim() == 2 else (n,))

    @property
    def blocks(self) -> bool:
        """Whether scales belong to blocks, not to rows."""
        return self.scale.dim() == 2


def dequantise(weight: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [n, k] in `dtype`, multiplied in float32 and rounded once."""
    return reference.dequantise(weight.values, weight.scale).to(dtype)
