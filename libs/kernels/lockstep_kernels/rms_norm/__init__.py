"""Root mean square normalisation over the last dimension."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.rms_norm import cpu, reference

__all__ = ["Norm", "rms_norm"]


class Norm(NamedTuple):
    """What a normalisation needs beside its operand: the float32 gain, and eps."""

    gain: torch.Tensor
    eps: float


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once.

    x [T, ..., d] (rows may be strided); weight float32 [d], or [h, d] for x [T, h, d] with a gain of its own for each head.
    The result is contiguous and has x's shape and dtype. A row's bits do not depend on T.
    """
    check_shape("weight", weight, tuple(x.shape[-weight.dim() :]))
    if x.is_cuda:
        from lockstep_kernels.rms_norm import kernel

        return kernel.rms_norm(x, weight, eps)
    return cpu.rms_norm(x, weight, eps) if x.device.type == "cpu" else reference.rms_norm(x, weight, eps)
