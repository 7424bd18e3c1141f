"""The gated half of a feed-forward layer: silu(x @ gate.T) * (x @ up.T)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep_kernels.linear import Packed, linear, pack
from lockstep_kernels.rms_norm import Norm, rms_norm


@dataclass(frozen=True, slots=True)
class GateUp:
    """Two packed weights [i, d]. Apart, as oneDNN fuses silu into the one and the product into the other."""

    gate: Packed
    up: Packed


def pack_gate_up(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> GateUp:
    """Weights [i, d] and biases [i] for `swiglu`."""
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up has {tuple(up.shape)}")
    return GateUp(pack(gate, gate_bias), pack(up, up_bias))


def swiglu(x: torch.Tensor, weight: GateUp, *, norm: Norm | None = None) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T) of x [T, d], normalised first if there is a `norm`: a new [T, i] of x's dtype.

    A row's bits do not depend on T.
    """
    if norm is not None:
        x = rms_norm(x, *norm)
    return linear(x, weight.up, times=linear(x, weight.gate, silu=True))
