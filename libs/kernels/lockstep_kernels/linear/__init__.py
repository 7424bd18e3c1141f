"""Products with weights that never change: packed once, multiplied many times, with what follows fused into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.fp8 import BLOCK, Fp8Weight, dequantise
from lockstep_kernels.linear import cpu
from lockstep_kernels.linear.packed import Layout, Packed
from lockstep_kernels.rms_norm import Norm

__all__ = ["Layout", "Packed", "linear", "pack", "pack_fp8", "split", "unpack"]


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, prompts: bool = True, deterministic: bool = False
) -> Packed:
    """The weight [out, in] (and bias [out]) in the order that `linear` reads fastest on its device. The weight may be freed.

    What operands `linear` then takes: `Packed.dtype`, and that of `Packed.for_prompts`, which are two on a CPU with
    bfloat16 weights. Without `prompts` there is the first only: for a weight that never meets many rows.
    `deterministic`: a row's bits must not depend on the number of rows, which costs speed on CUDA; on CPU they never do.
    """
    out_features, in_features = weight.shape
    if bias is not None:
        check_shape("bias", bias, (out_features,))
    if weight.is_cuda:
        from lockstep_kernels.linear import cuda

        return cuda.pack(weight, bias, deterministic)
    if (packed := cpu.pack(weight, bias, prompts)) is not None:
        return packed
    return Packed(weight.contiguous(), bias, out_features, in_features, Layout.PLAIN, weight.dtype)


def unpack(packed: Packed) -> torch.Tensor:
    """The weight [out, in] that was packed, of what it was packed for; not of 8 bits."""
    packed = packed.for_prompts  # as stored, where there are two forms
    if packed.layout is Layout.HALF:
        half: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(packed.weight)[0]
        return half.bfloat16()
    assert isinstance(packed.weight, torch.Tensor)
    if packed.layout is Layout.ONEDNN:
        return packed.weight.to_dense()
    if packed.scale is not None:
        raise ValueError("a weight of 8 bits is kept as values and scales")
    return packed.weight


def pack_fp8(
    weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype, *, deterministic: bool = False
) -> Packed:
    """A weight of 8 bits for operands of `dtype`: kept so on CUDA, where operands are rounded to 8 bits too, with a scale for each
    128 elements or for each row as the weight has them (`fp8.reference.quantise`), whatever their number. On CPU it is the weight
    that its values and scales stand for, packed as such, and operands are not rounded."""
    if bias is not None:
        check_shape("bias", bias, (weight.values.shape[0],))
    if weight.values.is_cuda:
        from lockstep_kernels.linear import cuda

        return cuda.pack_fp8(weight, bias, dtype, deterministic)
    return pack(dequantise(weight, dtype), bias)


def split(weight: Packed, sizes: Sequence[int]) -> tuple[Packed, ...]:
    """The products of the first sizes[0] outputs, of the next sizes[1], and so on, without a further form for prompts.

    On CUDA they share the weight's memory; on CPU they are packed anew. ValueError if a block of scales would be cut.
    """
    if sum(sizes) != weight.out_features:
        raise ValueError(f"parts of {list(sizes)} outputs do not make up the {weight.out_features} of the weight")
    if weight.layout in (Layout.ONEDNN, Layout.HALF):
        return cpu.split(weight, sizes)
    assert isinstance(weight.weight, torch.Tensor)
    none = (None,) * len(sizes)
    biases = none if weight.bias is None else torch.split(weight.bias, list(sizes))
    scales = none if weight.scale is None else _split_scale(weight.scale, sizes)
    return tuple(
        replace(weight, weight=part, bias=bias, scale=scale, out_features=len(part), prompt=None)
        for part, bias, scale in zip(torch.split(weight.weight, list(sizes)), biases, scales, strict=True)
    )


def _split_scale(scale: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    if scale.dim() == 1:
        return torch.split(scale, list(sizes))
    if any(size % BLOCK for size in sizes[:-1]):
        raise ValueError(f"blocks of {BLOCK} rows that share a scale cannot be cut into parts of {list(sizes)} rows")
    return torch.split(scale, [-(-size // BLOCK) for size in sizes])


def linear(
    x: torch.Tensor,
    weight: Packed,
    *,
    norm: Norm | None = None,
    silu: bool = False,
    times: torch.Tensor | None = None,
    plus: torch.Tensor | None = None,
    wide: bool = False,
) -> torch.Tensor:
    """y = x @ weight.T + bias, of x normalised first if there is a `norm`; then at most one of: silu(y), y * times, y + plus.

    x [T, in] contiguous, of a dtype that the weight has a form for; times and plus [T, out]. Accumulated in float32. Returns
    [T, out] of x's dtype, or float32 if it is to be `wide`; the result may be `plus` itself, overwritten.
    A row's bits do not depend on T; on CUDA that takes a weight packed as deterministic.
    """
    rows = x.shape[0]
    check_shape("x", x, (rows, weight.in_features))
    if x.dtype != weight.dtype:
        weight = weight.form(x.dtype)
    if silu + (times is not None) + (plus is not None) > 1:
        raise ValueError("at most one of silu, times and plus may follow a product")
    for name, operand in (("times", times), ("plus", plus)):
        if operand is not None:
            check_shape(name, operand, (rows, weight.out_features))
    if weight.layout.on_cuda:
        return _on_cuda(x, weight, norm, silu, times, plus, torch.float32 if wide else x.dtype)
    y = cpu.linear(x, weight, norm, silu, times, plus)
    return y.float() if wide else y


def _on_cuda(
    x: torch.Tensor,
    weight: Packed,
    norm: Norm | None,
    silu: bool,
    times: torch.Tensor | None,
    plus: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    from lockstep_kernels.linear import cuda

    y = cuda.linear(x, weight, norm, plus, dtype)
    if silu:
        return torch.nn.functional.silu(y, inplace=True)
    return y if times is None else y.mul_(times)
