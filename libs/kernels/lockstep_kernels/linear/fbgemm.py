"""Products with weights that FBGEMM holds as float16."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from lockstep_kernels.linear.packed import Packed
from lockstep_kernels.rms_norm import Norm
from lockstep_kernels.rms_norm.cpu import rms_norm
from lockstep_kernels.scripted import scripted

if TYPE_CHECKING:
    Weight: TypeAlias = torch.ScriptObject | torch.Tensor
else:
    Weight = torch.classes.quantized.LinearPackedParamsBase


@scripted
def silu_(y: torch.Tensor, unit: int) -> torch.Tensor:
    """In place, y float32 contiguous; an element's bits do not depend on where it stands.

    torch's vector loop and its scalar tail compute exp differently, and every thread's share has a tail: the number of
    elements must be a multiple of `silu_unit()`, so that it divides into whole vectors for all of them.
    """
    elements = y.numel()
    if elements % unit == 0:
        return torch.nn.functional.silu(y, inplace=True)
    whole = torch.zeros([(elements + unit - 1) // unit * unit])
    whole[:elements] = y.view(-1)
    y.view(-1).copy_(torch.nn.functional.silu(whole, inplace=True)[:elements])
    return y


@scripted
def _linear(
    x: torch.Tensor,
    weight: Weight,
    gain: torch.Tensor | None,
    eps: float,
    silu: int,
    times: torch.Tensor | None,
    plus: torch.Tensor | None,
) -> torch.Tensor:
    """silu: the unit of `silu_`; 0: none."""
    if gain is not None:
        x = rms_norm(x, gain, eps)
    y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, weight)
    if silu > 0:
        return silu_(y, silu)
    if times is not None:
        return y.mul_(times)
    return y if plus is None else y.add_(plus)


@scripted
def _gated(x: torch.Tensor, gate: Weight, up: Weight, gain: torch.Tensor | None, eps: float, unit: int) -> torch.Tensor:
    if gain is not None:
        x = rms_norm(x, gain, eps)
    gated = silu_(torch.ops.quantized.linear_dynamic_fp16(x, gate), unit)
    y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, up)
    return y.mul_(gated)


def linear(
    x: torch.Tensor,
    weight: Packed,
    norm: Norm | None,
    silu: bool,
    times: torch.Tensor | None,
    plus: torch.Tensor | None,
) -> torch.Tensor:
    """See the public function."""
    if x.shape[0] == 0:
        return x.new_empty(0, weight.out_features)
    gain, eps = norm or (None, 0.0)
    return _linear(x, weight.weight, gain, eps, silu_unit() if silu else 0, times, plus)


def gated(x: torch.Tensor, gate: Packed, up: Packed, norm: Norm | None) -> torch.Tensor:
    """See `lockstep_kernels.linear.cpu.gated`."""
    if x.shape[0] == 0:
        return x.new_empty(0, gate.out_features)
    gain, eps = norm or (None, 0.0)
    return _gated(x, gate.weight, up.weight, gain, eps, silu_unit())


def silu_unit() -> int:
    """What the number of elements for `silu_` is rounded up to."""
    return 64 * torch.get_num_threads()
