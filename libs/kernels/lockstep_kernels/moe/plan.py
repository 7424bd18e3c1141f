"""Pairs of token and expert in the order in which the grouped products take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Plan:
    """P pairs ordered by expert, cut into blocks of at most `block_m` pairs of one expert. int32 tensors.

    Pair p = t * k + j is token t's j-th choice. Pairs without an expert come nowhere; what stands behind the last of the
    others in `order` is undefined.
    """

    order: torch.Tensor  # [P] pairs by expert, those of an expert ascending
    ends: torch.Tensor  # [E] where in `order` each expert's pairs end
    blocks: torch.Tensor  # [3, B]: expert (-1: no block), begin and end in `order`
    block_m: int


def plan_blocks(pairs: int, experts: int, block_m: int) -> int:
    """B: as many blocks as `pairs` pairs can need, however they choose among `experts` experts."""
    return (pairs + (block_m - 1) * min(pairs, experts)) // block_m
