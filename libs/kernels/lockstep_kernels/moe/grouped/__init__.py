"""The experts' products on a GPU: how they are cut for how many pairs there are, and in which order they run."""

from __future__ import annotations

import torch

from lockstep_kernels.moe import kernel as order
from lockstep_kernels.moe.grouped import kernel
from lockstep_kernels.moe.grouped.kernel import Tiling
from lockstep_kernels.moe.weights import ExpertWeights

__all__ = ["Tiling", "block_rows", "experts", "tilings"]

LARGEST_BLOCK = 128


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: ExpertWeights, *, pdl: bool | None = None
) -> torch.Tensor:
    """See `lockstep_kernels.moe.experts`."""
    tokens, chosen = ids.shape
    if tokens == 0:
        return x.new_empty(0, chosen, packed.hidden)
    assert packed.gate_up is not None and packed.down is not None
    rows = block_rows(tokens * chosen, packed.experts, deterministic=packed.deterministic)
    first, second = tilings(rows, of_8_bits=packed.down.scale is not None)
    plan = order.plan(ids, packed.experts, rows, pdl=pdl)
    gated = kernel.gate_up(x, packed.gate_up, plan, chosen, first, pdl=pdl)
    pairs = kernel.down(gated, packed.down, plan, weights, second, pdl=pdl)
    return pairs.view(tokens, chosen, packed.hidden)


def block_rows(pairs: int, experts: int, *, deterministic: bool = False) -> int:
    """Rows of a block: half as many again as an expert has on average, so that few experts need a second block.

    A second block reads the expert's weights again; a block's empty rows cost only arithmetic. From 64 rows on all blocks add
    the same products in the same order by the same instruction, so deterministic ones have no fewer.
    """
    rows = 64 if deterministic else 16
    while rows < LARGEST_BLOCK and 2 * rows * experts < 3 * pairs:
        rows *= 2
    return rows


def tilings(rows: int, *, of_8_bits: bool = False) -> tuple[Tiling, Tiling]:
    """Of gate and up, and of down, for blocks of that many rows.

    Up to 32 rows the time is that of reading weights: three programs share a processor's memory, each with 48 KiB on the way.
    From 64 on it is that of the tensor cores. Weights of 8 bits are widened on their way from memory to the tensor cores,
    which take them from registers on the left only.
    """
    if of_8_bits:
        warps = 4 if rows <= 32 else 8
        return Tiling(64, 128, 4, warps, swap=True), Tiling(128, 128, 4, warps, swap=True)
    if rows <= 32:
        return Tiling(64, 64, 4, 4, swap=True), Tiling(128, 64, 4, 4, swap=True)
    if rows == 64:
        return Tiling(64, 64, 3, 4, swap=False), Tiling(128, 64, 3, 4, swap=False)
    return Tiling(128, 64, 4, 8, swap=False), Tiling(256, 64, 3, 8, swap=False)
