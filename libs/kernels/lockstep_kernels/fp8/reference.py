"""What quantised operands and products mean."""

from __future__ import annotations

import torch

BLOCK = 128
LARGEST = 448.0  # of e4m3
SMALLEST = 1e-4  # a row of zeros has a scale too


def dequantise(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [n, k] of values e4m3 [n, k] and the scales of `Fp8Weight`."""
    if scale.dim() == 1:
        return values.float() * scale[:, None]
    n, k = values.shape
    return values.float() * scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]


def quantise(x: torch.Tensor, groups: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values [T, k] of x, and scales float32 [T, ceil(k / 128)], or [T] without `groups`."""
    rows, k = x.shape
    size = BLOCK if groups else k
    padded = torch.nn.functional.pad(x.float(), (0, -k % size)).view(rows, -(-k // size), size)
    scale = padded.abs().amax(-1).clamp(min=SMALLEST) / LARGEST
    values = (padded / scale[..., None]).flatten(1)[:, :k].to(torch.float8_e4m3fn)
    return values, scale if groups else scale[:, 0]


def product(
    values: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """float32 [T, n] of operands of `quantise` and a weight [n, k] with the scales of `Fp8Weight`."""
    k = values.shape[1]
    wide = scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(BLOCK, 1)[:, :k]
    return (values.float() * wide) @ dequantise(weight, weight_scale).t()
