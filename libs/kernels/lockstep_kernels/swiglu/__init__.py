"""The gated half of a feed-forward layer: silu(x @ gate.T) * (x @ up.T)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.fp8 import BLOCK, Fp8Weight
from lockstep_kernels.linear import Packed, cpu, pack, pack_fp8
from lockstep_kernels.rms_norm import Norm


@dataclass(frozen=True, slots=True)
class GateUp:
    """Two packed weights [i, d]. Apart on CPU, as oneDNN fuses silu into the one and the product into the other; on CUDA one
    weight [2i, d], gate first, and `up` is None."""

    gate: Packed
    up: Packed | None


def pack_gate_up(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> GateUp:
    """Weights [i, d] and biases [i] for `swiglu`; `deterministic` as in `lockstep_kernels.linear.pack`."""
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up has {tuple(up.shape)}")
    if not gate.is_cuda:
        return GateUp(pack(gate, gate_bias), pack(up, up_bias))
    bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
    return GateUp(pack(torch.cat((gate, up)), bias, deterministic=deterministic), None)


def pack_gate_up_fp8(gate: Fp8Weight, up: Fp8Weight, dtype: torch.dtype, *, deterministic: bool = False) -> GateUp:
    """Weights [i, d] of 8 bits without biases, for operands of `dtype`; i a multiple of 128 on CUDA if scales belong to blocks."""
    if gate.values.shape != up.values.shape or gate.blocks != up.blocks:
        raise ValueError("gate and up are not quantised alike")
    if not gate.values.is_cuda:
        return GateUp(pack_fp8(gate, None, dtype), pack_fp8(up, None, dtype))
    if gate.blocks and gate.values.shape[0] % BLOCK:
        raise ValueError(f"gate has {gate.values.shape[0]} rows, expected a multiple of {BLOCK}")
    both = Fp8Weight(torch.cat((gate.values, up.values)), torch.cat((gate.scale, up.scale)))
    return GateUp(pack_fp8(both, None, dtype, deterministic=deterministic), None)


def swiglu(x: torch.Tensor, weight: GateUp, *, norm: Norm | None = None) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T) of x [T, d], normalised first if there is a `norm`: a new [T, i] of x's dtype.

    A row's bits do not depend on T; on CUDA that takes weights packed as deterministic.
    """
    if weight.up is None:
        from lockstep_kernels.linear import cuda

        return cuda.gated(x, weight.gate, norm)
    check_shape("x", x, (x.shape[0], weight.gate.in_features))
    return cpu.gated(x, weight.gate, weight.up, norm)
