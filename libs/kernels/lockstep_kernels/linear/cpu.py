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

from dataclasses import replace

import torch

from lockstep_kernels.linear.packed import Layout, Packed

PACK_ROWS = 8  # the number of rows oneDNN's layout is chosen for; it serves all
LARGEST_HALF = 65504.0
_linear = torch.ops.mkldnn._linear_pointwise
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary
_half_linear = torch.ops.quantized.linear_dynamic_fp16


def pack(weight: torch.Tensor, bias: torch.Tensor | None, prompts: bool) -> Packed | None:
    """See the public function; None if this machine has no packed product for the weight."""
    if weight.device.type != "cpu":
        return None
    if weight.dtype != torch.bfloat16 or "fbgemm" not in torch.backends.quantized.supported_engines:
        return _onednn(weight, bias)
    out_features, in_features = weight.shape
    prompt = _onednn(weight, bias) if prompts else None
    wide, wide_bias = weight.float(), None if bias is None else bias.float()
    if bool(weight.abs().max() <= LARGEST_HALF):
        half = torch.ops.quantized.linear_prepack_fp16(wide, wide_bias)
        return Packed(half, None, out_features, in_features, Layout.HALF, torch.float32, prompt)
    packed = _onednn(wide, wide_bias)
    return packed if packed is None else replace(packed, prompt=prompt)


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed | None:
    """None if oneDNN has no product of this dtype on this machine."""
    if not _onednn_has(weight.dtype):
        return None
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    out_features, in_features = weight.shape
    return Packed(reordered, bias, out_features, in_features, Layout.ONEDNN, weight.dtype)


def onednn_linear(
    x: torch.Tensor, weight: Packed, silu: bool, times: torch.Tensor | None, plus: torch.Tensor | None
) -> torch.Tensor:
    """See the public function."""
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty(0, weight.out_features)
    if rows == 1:
        twice = [None if t is None else t.expand(2, -1).contiguous() for t in (times, plus)]
        return onednn_linear(x.expand(2, -1).contiguous(), weight, silu, *twice)[:1]
    if times is not None:
        return _linear_binary(x, times, weight.weight, weight.bias, "mul")  # type: ignore[no-any-return]
    if plus is not None:
        return _linear_binary(x, plus, weight.weight, weight.bias, "add")  # type: ignore[no-any-return]
    return _linear(x, weight.weight, weight.bias, "swish" if silu else "none", [], "")  # type: ignore[no-any-return]


def half_linear(
    x: torch.Tensor, weight: Packed, silu: bool, times: torch.Tensor | None, plus: torch.Tensor | None
) -> torch.Tensor:
    """See the public function."""
    if x.shape[0] == 0:
        return x.new_empty(0, weight.out_features)
    y: torch.Tensor = _half_linear(x, weight.weight)
    if silu:
        return silu_(y)
    if times is not None:
        return y.mul_(times)
    return y if plus is None else y.add_(plus)


def silu_(y: torch.Tensor) -> torch.Tensor:
    """In place, y float32 contiguous; an element's bits do not depend on where it stands.

    torch's vector loop and its scalar tail compute exp differently, and every thread's share has a tail: the number of
    elements must divide into whole vectors for all of them.
    """
    unit = 64 * torch.get_num_threads()
    elements = y.numel()
    if elements % unit == 0:
        return torch.nn.functional.silu(y, inplace=True)
    whole = torch.zeros(-(-elements // unit) * unit)
    whole[:elements] = y.view(-1)
    y.view(-1).copy_(torch.nn.functional.silu(whole, inplace=True)[:elements])
    return y


def _onednn_has(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
