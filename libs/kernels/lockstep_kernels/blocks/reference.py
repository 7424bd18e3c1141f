"""Blocks of a KV cache, zeroed and copied in plain torch."""

from __future__ import annotations

import torch


def zero(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    for layer in cache:
        layer.index_fill_(0, blocks, 0)


def copy(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    for layer in cache:
        layer.index_copy_(0, destinations, layer.index_select(0, sources))
