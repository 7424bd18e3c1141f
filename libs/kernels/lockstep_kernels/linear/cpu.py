"""Products with prepacked weights on CPU. What a weight gets is decided once, by its dtype; each form gives a row the same
bits for every number of rows (oneDNN's from two rows on), with one and two threads.

- float32 weights go to oneDNN, with what follows fused into the product.
- bfloat16 weights are held twice, for tokens of two kinds (figures: two cores of Zen 4, 1536 x 576):
  - For bfloat16 operands, by oneDNN: 412 GFLOP/s at 512 rows, where float32 arithmetic ends at 205. Prompt tokens.
  - For float32 operands, by FBGEMM as float16, which holds each weight exactly but those below 2^-14 (error at most 2^-25);
    sums and results are float32. It streams weights from memory half again as fast as oneDNN does (one row: 68 us against
    96), and a step of generated tokens is little else. oneDNN in float32 stands in for weights beyond float16's range.
- A CPU without bfloat16 products has only the second form, a torch without FBGEMM only the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lockstep_kernels.linear import reference
from lockstep_kernels.linear.packed import Layout, Packed
from lockstep_kernels.rms_norm import Norm, rms_norm

PACK_ROWS = 8  # the number of rows oneDNN's layout is chosen for; it serves all
LARGEST_HALF = 65504.0
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
HAS_ONEDNN = torch._C._has_mkldnn
if HAS_FBGEMM:
    from lockstep_kernels.linear import fbgemm
if HAS_ONEDNN:
    from lockstep_kernels.linear import onednn


def pack(weight: torch.Tensor, bias: torch.Tensor | None, prompts: bool) -> Packed | None:
    """See the public function; None if this machine has no packed product for the weight."""
    if weight.device.type != "cpu":
        return None
    if weight.dtype != torch.bfloat16 or not HAS_FBGEMM:
        return _onednn(weight, bias)
    prompt = _onednn(weight, bias) if prompts else None
    wide, wide_bias = weight.float(), None if bias is None else bias.float()
    if bool(weight.abs().max() <= LARGEST_HALF):
        return replace(_half(wide, wide_bias), prompt=prompt)
    packed = _onednn(wide, wide_bias)
    return packed if packed is None else replace(packed, prompt=prompt)


def split(weight: Packed, sizes: Sequence[int]) -> tuple[Packed, ...]:
    """See the public function; of a weight in FBGEMM's or oneDNN's layout."""
    if weight.layout is Layout.HALF:
        plain, bias = torch.ops.quantized.linear_unpack_fp16(weight.weight)
    else:
        assert isinstance(weight.weight, torch.Tensor)
        plain, bias = weight.weight.to_dense(), weight.bias
    parts = torch.split(plain, list(sizes))
    biases = (None,) * len(parts) if bias is None else torch.split(bias, list(sizes))
    return tuple(_packed_as(weight.layout, part, b) for part, b in zip(parts, biases, strict=True))


def linear(
    x: torch.Tensor,
    weight: Packed,
    norm: Norm | None,
    silu: bool,
    times: torch.Tensor | None,
    plus: torch.Tensor | None,
) -> torch.Tensor:
    """See the public function."""
    match weight.layout:
        case Layout.HALF:
            return fbgemm.linear(x, weight, norm, silu, times, plus)
        case Layout.ONEDNN:
            return onednn.linear(x, weight, norm, silu, times, plus)
        case _:
            if norm is not None:
                x = rms_norm(x, *norm)
            assert isinstance(weight.weight, torch.Tensor)
            return reference.linear(x, weight.weight, weight.bias, silu=silu, times=times, plus=plus)


def gated(x: torch.Tensor, gate: Packed, up: Packed, norm: Norm | None) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T), of x normalised first if there is a `norm`."""
    gate, up = gate.form(x.dtype), up.form(x.dtype)
    if gate.layout is up.layout is Layout.HALF:
        return fbgemm.gated(x, gate, up, norm)
    if norm is not None:
        x = rms_norm(x, *norm)
    return linear(x, up, None, False, linear(x, gate, None, True, None, None), None)


def _half(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
    """Of float32 values that float16 has."""
    half = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    return Packed(half, None, weight.shape[0], weight.shape[1], Layout.HALF, torch.float32)


def _packed_as(layout: Layout, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
    """In a layout that this machine has for its dtype."""
    packed = _half(weight.float().contiguous(), bias) if layout is Layout.HALF else _onednn(weight, bias)
    assert packed is not None
    return packed


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed | None:
    """None if oneDNN has no product of this dtype on this machine."""
    if not _onednn_has(weight.dtype):
        return None
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    out_features, in_features = weight.shape
    return Packed(reordered, bias, out_features, in_features, Layout.ONEDNN, weight.dtype)


def _onednn_has(dtype: torch.dtype) -> bool:
    if not HAS_ONEDNN:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
