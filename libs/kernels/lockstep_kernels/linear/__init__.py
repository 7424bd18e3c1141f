"""Products with weights that never change: packed once, multiplied many times, with what follows fused into them."""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.linear import cpu, reference
from lockstep_kernels.linear.packed import Packed

__all__ = ["Packed", "linear", "pack"]


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    """The weight [out, in] (and bias [out]) in the order that `linear` reads fastest on its device. The weight may be freed."""
    out_features, in_features = weight.shape
    if bias is not None:
        check_shape("bias", bias, (out_features,))
    if cpu.can_pack(weight):
        return cpu.pack(weight, bias)
    return Packed(weight.contiguous(), bias, out_features, in_features, reordered=False)


def linear(
    x: torch.Tensor,
    weight: Packed,
    *,
    silu: bool = False,
    times: torch.Tensor | None = None,
    plus: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x @ weight.T + bias; then at most one of: silu(y), y * times, y + plus. Accumulated in float32, rounded once.

    x [T, in] contiguous, of the weight's dtype; times and plus [T, out]. Returns a new [T, out].
    A row's bits do not depend on T: a lone row is computed as two on CPU, as kernels for one row add in another order.
    """
    rows = x.shape[0]
    check_shape("x", x, (rows, weight.in_features))
    if silu + (times is not None) + (plus is not None) > 1:
        raise ValueError("at most one of silu, times and plus may follow a product")
    for name, operand in (("times", times), ("plus", plus)):
        if operand is not None:
            check_shape(name, operand, (rows, weight.out_features))
    if weight.reordered:
        return cpu.linear(x, weight, silu, times, plus)
    return reference.linear(x, weight.weight, weight.bias, silu=silu, times=times, plus=plus)
