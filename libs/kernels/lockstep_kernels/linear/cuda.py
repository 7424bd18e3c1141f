"""Products on CUDA: cuBLAS for many rows, an own kernel for a few; for weights packed as deterministic one order of sums.

cuBLAS chooses its kernel by the number of rows, and kernels add in different orders. Products that may not depend on it
(`Layout.TILES`) are computed in tiles of a fixed shape, added over k from 0 on, whatever the number of rows.
"""

from __future__ import annotations

import torch

from lockstep_kernels.linear import kernel
from lockstep_kernels.linear.packed import Layout, Packed
from lockstep_kernels.rms_norm import Norm, rms_norm


def pack(weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool) -> Packed:
    """See the public function. Sums in cuBLAS are float32 from here on, partial ones included: torch's default rounds those."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    layout = Layout.TILES if deterministic else Layout.CUBLAS
    out_features, in_features = weight.shape
    return Packed(weight.contiguous(), bias, out_features, in_features, layout, weight.dtype)


def linear(
    x: torch.Tensor, packed: Packed, norm: Norm | None, plus: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """See the public function; the result is of `dtype`."""
    weight, bias = packed.weight, packed.bias
    assert isinstance(weight, torch.Tensor)
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty(0, packed.out_features, dtype=dtype)
    skinny = packed.layout is Layout.CUBLAS and rows <= kernel.MOST_SKINNY
    if norm is not None and not skinny:
        x, norm = rms_norm(x, *norm), None
    if packed.layout is Layout.CUBLAS and not skinny:
        return _cublas(x, weight, bias, plus, dtype)
    in_place = plus is not None and _may_overwrite(plus, x) and plus.dtype == dtype
    out = plus if plus is not None and in_place else x.new_empty(rows, packed.out_features, dtype=dtype)
    if not skinny:
        return kernel.tiles(x, weight, bias, out=out, plus=plus)
    gain, eps = norm if norm is not None else (None, 0.0)
    return kernel.skinny(x, weight, bias, out=out, gain=gain, eps=eps, plus=plus)


def gated(x: torch.Tensor, packed: Packed, norm: Norm | None) -> torch.Tensor:
    """silu(gate) * up of the joint product with `packed` [2i, d], gate first."""
    from lockstep_kernels.swiglu import kernel as elementwise

    rows, width = x.shape[0], packed.out_features // 2
    if packed.layout is not Layout.CUBLAS or not 0 < rows <= kernel.MOST_SKINNY:
        return elementwise.silu_mul(linear(x, packed, norm, None, x.dtype))
    assert isinstance(packed.weight, torch.Tensor)
    gain, eps = norm if norm is not None else (None, 0.0)
    out = x.new_empty(rows, width)
    return kernel.skinny(x, packed.weight, packed.bias, out=out, gain=gain, eps=eps, gated=True)


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
