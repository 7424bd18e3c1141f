"""Zeroing and copying of whole KV blocks, in all layers of a group at once."""

from __future__ import annotations

import torch

from lockstep_kernels.blocks import reference
from lockstep_kernels.checks import check_shape

__all__ = ["copy", "zero"]


def zero(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """Fills `blocks` [n] int64 of cache [layers, num_blocks, ...] with zeros, in every layer. A block may be named twice."""
    _check(cache)
    if cache.is_cuda:
        from lockstep_kernels.blocks import kernel

        kernel.zero(cache, blocks)
    else:
        reference.zero(cache, blocks)


def copy(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copies block sources[i] of cache [layers, num_blocks, ...] over block destinations[i] ([n] int64), in every layer.

    No block is both source and destination, none is destination twice.
    """
    _check(cache)
    check_shape("destinations", destinations, tuple(sources.shape))
    if cache.is_cuda:
        from lockstep_kernels.blocks import kernel

        kernel.copy(cache, sources, destinations)
    else:
        reference.copy(cache, sources, destinations)


def _check(cache: torch.Tensor) -> None:
    if cache.dim() < 3 or not cache.is_contiguous():
        raise ValueError(f"cache must be contiguous [layers, num_blocks, ...], is {tuple(cache.shape)}")
