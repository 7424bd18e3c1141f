"""Checks of operands that the public functions share."""

from __future__ import annotations

import torch


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `tensor` has `shape`."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
