"""oneDNN's prepacked products: no reordering of the weight at each call, and one pass for what follows.

Measured on Zen 4: 49152 x 576 in bf16 takes 1.1 ms at two rows where `F.linear` takes 4.2 ms. Rows have the same bits
for every number of rows from two on, in float32 and bfloat16, with one and two threads.
"""

from __future__ import annotations

import torch

from lockstep_kernels.linear.packed import Packed

PACK_ROWS = 8  # the number of rows the layout is chosen for; it serves all
_linear = torch.ops.mkldnn._linear_pointwise
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary


def can_pack(weight: torch.Tensor) -> bool:
    """True if this machine's oneDNN has a packed product for the weight."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
    """See the public function."""
    out_features, in_features = weight.shape
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    return Packed(reordered, bias, out_features, in_features, reordered=True)


def linear(
    x: torch.Tensor, weight: Packed, silu: bool, times: torch.Tensor | None, plus: torch.Tensor | None
) -> torch.Tensor:
    """See the public function."""
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty(0, weight.out_features)
    if rows == 1:
        twice = [None if t is None else t.expand(2, -1).contiguous() for t in (times, plus)]
        return linear(x.expand(2, -1).contiguous(), weight, silu, *twice)[:1]
    if times is not None:
        return _linear_binary(x, times, weight.weight, weight.bias, "mul")  # type: ignore[no-any-return]
    if plus is not None:
        return _linear_binary(x, plus, weight.weight, weight.bias, "add")  # type: ignore[no-any-return]
    return _linear(x, weight.weight, weight.bias, "swish" if silu else "none", [], "")  # type: ignore[no-any-return]
