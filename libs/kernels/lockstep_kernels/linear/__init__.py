"""Products with weights that never change: packed once, multiplied many times, with what follows fused into them."""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.linear import cpu, reference
from lockstep_kernels.linear.packed import Layout, Packed

__all__ = ["Layout", "Packed", "linear", "pack"]


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    """The weight [out, in] (and bias [out]) in the order that `linear` reads fastest on its device. The weight may be freed.

    `Packed.dtype` says what operands `linear` then takes: float32 where bfloat16 weights meet float32 arithmetic.
    """
    out_features, in_features = weight.shape
    if bias is not None:
        check_shape("bias", bias, (out_features,))
    if (packed := cpu.pack(weight, bias)) is not None:
        return packed
    return Packed(weight.contiguous(), bias, out_features, in_features, Layout.PLAIN, weight.dtype)


def linear(
    x: torch.Tensor,
    weight: Packed,
    *,
    silu: bool = False,
    times: torch.Tensor | None = None,
    plus: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x @ weight.T + bias; then at most one of: silu(y), y * times, y + plus. Accumulated in float32.

    x [T, in] contiguous, of `weight.dtype`; times and plus [T, out]. Returns a new [T, out] of that dtype.
    A row's bits do not depend on T.
    """
    rows = x.shape[0]
    check_shape("x", x, (rows, weight.in_features))
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, this weight takes {weight.dtype}")
    if silu + (times is not None) + (plus is not None) > 1:
        raise ValueError("at most one of silu, times and plus may follow a product")
    for name, operand in (("times", times), ("plus", plus)):
        if operand is not None:
            check_shape(name, operand, (rows, weight.out_features))
    match weight.layout:
        case Layout.HALF:
            return cpu.half_linear(x, weight, silu, times, plus)
        case Layout.ONEDNN:
            return cpu.onednn_linear(x, weight, silu, times, plus)
        case Layout.PLAIN:
            assert isinstance(weight.weight, torch.Tensor)
            return reference.linear(x, weight.weight, weight.bias, silu=silu, times=times, plus=plus)
