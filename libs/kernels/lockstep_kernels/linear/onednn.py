"""Products with weights in oneDNN's layout: what follows is fused into them."""

from __future__ import annotations

import torch

from lockstep_kernels.linear.packed import Packed
from lockstep_kernels.rms_norm import Norm
from lockstep_kernels.rms_norm.cpu import rms_norm
from lockstep_kernels.scripted import scripted


@scripted
def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gain: torch.Tensor | None,
    eps: float,
    silu: bool,
    times: torch.Tensor | None,
    plus: torch.Tensor | None,
) -> torch.Tensor:
    if gain is not None:
        x = rms_norm(x, gain, eps)
    y: torch.Tensor = x
    if times is not None:
        y = torch.ops.mkldnn._linear_pointwise(x, times, weight, bias, "mul")
    elif plus is not None:
        y = torch.ops.mkldnn._linear_pointwise(x, plus, weight, bias, "add")
    else:
        y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "swish" if silu else "none", [], "")
    return y


def linear(
    x: torch.Tensor,
    weight: Packed,
    norm: Norm | None,
    silu: bool,
    times: torch.Tensor | None,
    plus: torch.Tensor | None,
) -> torch.Tensor:
    """See the public function."""
    gain, eps = norm or (None, 0.0)
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty(0, weight.out_features)
    if rows == 1:
        x = x.expand(2, -1).contiguous()
        times, plus = (None if t is None else t.expand(2, -1).contiguous() for t in (times, plus))
    assert isinstance(weight.weight, torch.Tensor)
    return _linear(x, weight.weight, weight.bias, gain, eps, silu, times, plus)[:rows]
