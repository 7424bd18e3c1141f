"""The experts of so few tokens that hardly any two of them share one."""

from __future__ import annotations

from typing import Final

import torch

from lockstep_kernels.moe.skinny import kernel
from lockstep_kernels.moe.weights import ExpertWeights, Gate
from lockstep_kernels.rms_norm import Norm

MOST_TOKENS: Final = 2  # with more, experts that two tokens share are worth reading once


def choose(
    x: torch.Tensor, norm: Norm | None, gate: Gate, live: torch.Tensor | None, shared: int, *, pdl: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `lockstep_kernels.moe.choose`, for 1 to MOST_TOKENS tokens."""
    assert isinstance(gate.weight.weight, torch.Tensor)
    return kernel.choose(
        x, norm, gate.weight.weight, gate.arrived, gate.routing, gate.correction, live, shared, pdl=pdl
    )


def mix(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: ExpertWeights,
    plus: torch.Tensor,
    norm: Norm | None,
    *,
    pdl: bool | None = None,
) -> torch.Tensor:
    """See `lockstep_kernels.moe.mix`, for 1 to MOST_TOKENS tokens."""
    assert packed.gate_up is not None and packed.down is not None
    gated = kernel.gate_up(x, norm, packed.gate_up, ids, pdl=pdl)
    return kernel.down(gated, packed.down, ids, weights, plus, pdl=pdl)
