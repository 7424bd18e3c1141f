"""Products on CUDA: cuBLAS for many rows, own kernels for a few; for weights packed as deterministic one order of sums.

cuBLAS chooses its kernel by the number of rows, and kernels add in different orders. Products that may not depend on it
(`Layout.TILES`) are computed in tiles of a fixed shape, added over k from 0 on, whatever the number of rows.
Weights of 8 bits are read as they are, and operands beside them are rounded to 8 bits, one row as many.
"""

from __future__ import annotations

from typing import Final

import torch

from lockstep_kernels.fp8 import Fp8Weight
from lockstep_kernels.fp8 import kernel as fp8
from lockstep_kernels.linear import kernel
from lockstep_kernels.linear.few.kernel import MOST_FEW, few
from lockstep_kernels.linear.packed import Layout, Packed
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_kernels.swiglu import kernel as elementwise

SMALL_WEIGHT: Final = 1 << 22  # elements
ENOUGH_COLUMNS: Final = 512  # of the result: fewer do not keep the programs of `few` busy


def pack(weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool) -> Packed:
    """See the public function. Sums in cuBLAS are float32 from here on, partial ones included: torch's default rounds those."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    layout = Layout.TILES if deterministic else Layout.CUBLAS
    out_features, in_features = weight.shape
    return Packed(weight.contiguous(), bias, out_features, in_features, layout, weight.dtype)


def pack_fp8(weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype, deterministic: bool) -> Packed:
    """See the public function."""
    out_features, in_features = weight.values.shape
    layout = Layout.FP8_TILES if deterministic else Layout.FP8
    return Packed(weight.values, bias, out_features, in_features, layout, dtype, scale=weight.scale.contiguous())


def linear(
    x: torch.Tensor, packed: Packed, norm: Norm | None, plus: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """See the public function; the result is of `dtype`."""
    weight, bias = packed.weight, packed.bias
    assert isinstance(weight, torch.Tensor)
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty(0, packed.out_features, dtype=dtype)
    are_few = _are_few(packed, x)
    if packed.layout is Layout.CUBLAS and not (are_few or _is_skinny(packed, rows)):
        return _cublas(x if norm is None else rms_norm(x, *norm), weight, bias, plus, dtype)
    in_place = plus is not None and plus.dtype == dtype and _may_overwrite(plus, x)
    out = plus if plus is not None and in_place else x.new_empty(rows, packed.out_features, dtype=dtype)
    gain, eps = norm if norm is not None else (None, 0.0)
    if are_few:
        return few(x if norm is None else rms_norm(x, *norm), weight, bias, out=out, plus=plus)
    if _is_skinny(packed, rows):
        return kernel.skinny(x, weight, bias, out=out, gain=gain, eps=eps, plus=plus, weight_scale=packed.scale)
    if packed.scale is None:
        return kernel.tiles(x if norm is None else rms_norm(x, *norm), weight, bias, out=out, plus=plus)
    values, scale = fp8.quantise(x, packed.scale.dim() == 2, gain=gain, eps=eps)
    return fp8.tiles(values, scale, weight, packed.scale, bias, out=out, plus=plus)


def gated(x: torch.Tensor, packed: Packed, norm: Norm | None) -> torch.Tensor:
    """silu(gate) * up of the joint product with `packed` [2i, d], gate first."""
    rows, width = x.shape[0], packed.out_features // 2
    are_few = _are_few(packed, x)
    if not (are_few or _is_skinny(packed, rows)):
        return elementwise.silu_mul(linear(x, packed, norm, None, x.dtype))
    assert isinstance(packed.weight, torch.Tensor)
    gain, eps = norm if norm is not None else (None, 0.0)
    out = x.new_empty(rows, width)
    if are_few:
        return few(x if norm is None else rms_norm(x, *norm), packed.weight, packed.bias, out=out, gated=True)
    return kernel.skinny(
        x, packed.weight, packed.bias, out=out, gain=gain, eps=eps, gated=True, weight_scale=packed.scale
    )


def _is_skinny(packed: Packed, rows: int) -> bool:
    """Several rows cost the kernel registers that loads in flight need: beyond one it wins only where launches are the cost."""
    few = 1 if packed.in_features * packed.out_features >= SMALL_WEIGHT else 2
    return packed.layout in (Layout.CUBLAS, Layout.FP8) and 0 < rows <= few


def _are_few(packed: Packed, x: torch.Tensor) -> bool:
    """More rows than `skinny` takes, of operands of 16 bits, with a weight so small that launches are the cost."""
    small = packed.in_features * packed.out_features < SMALL_WEIGHT and packed.out_features >= ENOUGH_COLUMNS
    several = not _is_skinny(packed, x.shape[0]) and 0 < x.shape[0] <= MOST_FEW
    return packed.layout is Layout.CUBLAS and small and several and packed.dtype.itemsize == 2 and x.is_contiguous()


def _cublas(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plus: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if plus is not None:
        y = plus.addmm_(x, weight.t()) if _may_overwrite(plus, x) else torch.addmm(plus, x, weight.t())
        return y if bias is None else y.add_(bias)
    if dtype == x.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    y = torch.mm(x, weight.t(), out_dtype=dtype)
    return y if bias is None else y.add_(bias)


def _may_overwrite(plus: torch.Tensor, x: torch.Tensor) -> bool:
    """Not if it is what the product still reads."""
    return plus.is_contiguous() and plus.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
