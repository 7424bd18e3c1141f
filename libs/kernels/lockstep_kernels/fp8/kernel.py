"""Quantising operands, and products of e4m3 operands in tiles.

The tensor cores add e4m3 products with fewer bits than float32; so only 128 at a time are added there, as long as the blocks of
scales are, and those sums in float32. A row's bits depend on the row alone, whatever the configuration.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait
from lockstep_kernels.fp8.reference import BLOCK, LARGEST, SMALLEST
from lockstep_kernels.linear.kernel import store_tile, tile_of_program


@triton.jit
def _quantise(
    x_ptr,
    gain_ptr,
    values_ptr,
    scale_ptr,
    eps,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    BY_GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program, as groups of BLOCK_K elements."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    k = group[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = k < K
    if NORM:
        gain = tl.load(gain_ptr + k, mask=inside, other=0.0)
    wait(PDL)
    x = tl.load(x_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        x = x * tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / K + eps) * gain
    largest = tl.max(tl.abs(x), axis=1)
    if BY_GROUP:
        scale = tl.maximum(largest, SMALLEST) / LARGEST
        tl.store(scale_ptr + row * GROUPS + group, scale, mask=group < GROUPS)
        y = x / scale[:, None]
    else:
        scale = tl.maximum(tl.max(largest, axis=0), SMALLEST) / LARGEST
        tl.store(scale_ptr + row, scale)
        y = x / scale
    tl.store(values_ptr + row * K + k, y.to(values_ptr.dtype.element_ty), mask=inside)


def quantise(
    x: torch.Tensor, groups: bool, *, gain: torch.Tensor | None = None, eps: float = 0.0, pdl: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.quantise`; x [T, k] contiguous, normalised first if there is a gain [k]."""
    rows, k = x.shape
    count = triton.cdiv(k, BLOCK)
    values = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, count) if groups else (rows,), dtype=torch.float32, device=x.device)
    if rows == 0:
        return values, scale
    block_g = triton.next_power_of_2(count)
    pdl = dependent.supported(x.device) if pdl is None else pdl
    _quantise[(rows,)](
        x,
        scale if gain is None else gain,
        values,
        scale,
        eps,
        K=k,
        GROUPS=count,
        BLOCK_G=block_g,
        BLOCK_K=BLOCK,
        NORM=gain is not None,
        BY_GROUP=groups,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST,
        PDL=pdl,
        num_warps=min(16, max(1, block_g // 4)),
        launch_pdl=pdl,
    )
    return values, scale


@triton.jit(do_not_specialize=["rows"])
def _tiles(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    plus_ptr,
    out_ptr,
    rows,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    PLUS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of the result by a program, added over k from 0 on."""
    release(PDL)
    GROUPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    m, n = tile_of_program(rows, N, BLOCK_M, BLOCK_N, GROUP_M)
    k = tl.arange(0, BLOCK_K)
    inside_m, inside_n = (m < rows)[:, None], (n < N)[None, :]
    x_tile = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    w_tile = w_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    wait(PDL)
    for at in range(GROUPS):
        inside = at * BLOCK_K + k < K
        x = tl.load(x_tile + at * BLOCK_K, mask=inside_m & inside[None, :], other=0.0)
        w = tl.load(w_tile + at * BLOCK_K, mask=inside_n & inside[:, None], other=0.0)
        part = tl.dot(x, w)
        if BLOCKS:
            x_scale = tl.load(x_scale_ptr + m * GROUPS + at, mask=m < rows, other=0.0)
            w_scale = tl.load(w_scale_ptr + (n // BLOCK_K) * GROUPS + at, mask=n < N, other=0.0)
            acc += part * x_scale[:, None] * w_scale[None, :]
        else:
            acc += part
    if not BLOCKS:
        x_scale = tl.load(x_scale_ptr + m, mask=m < rows, other=0.0)
        w_scale = tl.load(w_scale_ptr + n, mask=n < N, other=0.0)
        acc = acc * x_scale[:, None] * w_scale[None, :]
    store_tile(acc, m, n, bias_ptr, plus_ptr, out_ptr, rows, N, BIAS, PLUS)


def tiles(
    values: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    plus: torch.Tensor | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """out [T, n] = `reference.product` + bias [+ plus]; `out` may be `plus`."""
    rows, k = values.shape
    n = out.shape[1]
    block_m, block_n, warps, stages = (64, 32, 4, 6) if rows <= 128 else (128, 128, 8, 4)
    pdl = dependent.supported(values.device) if pdl is None else pdl
    _tiles[(triton.cdiv(rows, block_m) * triton.cdiv(n, block_n),)](
        values,
        scale,
        weight,
        weight_scale,
        scale if bias is None else bias,
        scale if plus is None else plus,
        out,
        rows,
        n,
        K=k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK,
        GROUP_M=16,
        BLOCKS=weight_scale.dim() == 2,
        BIAS=bias is not None,
        PLUS=plus is not None,
        PDL=pdl,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
    )
    return out
