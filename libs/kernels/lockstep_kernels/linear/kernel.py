"""Products in Triton: for a few rows, where reading the weight is all there is to do, and with one order of sums for any number.

`skinny` reads whole rows of the weight, each element once, and fuses what stands before and after the product, so that a layer
of one token is a handful of launches. `tiles` gives a row the same bits whatever stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait
from lockstep_kernels.fp8 import reference

SCALE_BLOCK, LARGEST, SMALLEST = (
    tl.constexpr(reference.BLOCK),
    tl.constexpr(reference.LARGEST),
    tl.constexpr(reference.SMALLEST),
)
MOST_SKINNY = 4  # rows that the kernel takes


@triton.jit
def _multiply(x, w, ROWS: tl.constexpr):
    """[ROWS, BLOCK_N, BLOCK_K], or [BLOCK_N, BLOCK_K] of one row: products yet to be added over k."""
    wide = w.to(tl.float32)
    return x[None, :] * wide if ROWS == 1 else x[:, None, :] * wide[None, :, :]


@triton.jit
def _weights(w_ptr, at, n, k, N, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile of the weight, from column `at` on; read once, so it need not stay in the cache."""
    pointers = w_ptr + at + k[None, :]
    if EVEN_N and EVEN_K:
        w = tl.load(pointers, eviction_policy="evict_first")
    elif EVEN_N:
        w = tl.load(pointers, mask=(at + k < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        inside = (n < N)[:, None] & (at + k < K)[None, :]
        w = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _operand(x_ptr, at, k, rows, K: tl.constexpr, ROWS: tl.constexpr, EVEN_K: tl.constexpr):
    """[BLOCK_K] or [ROWS, BLOCK_K] float32; every program reads it, so it should stay."""
    if ROWS == 1:
        if EVEN_K:
            x = tl.load(x_ptr + at + k, eviction_policy="evict_last")
        else:
            x = tl.load(x_ptr + at + k, mask=at + k < K, other=0.0, eviction_policy="evict_last")
    else:
        t = tl.arange(0, ROWS)[:, None]
        inside = (t < rows) & (at + k < K)[None, :]
        x = tl.load(x_ptr + t * K + at + k[None, :], mask=inside, other=0.0, eviction_policy="evict_last")
    return x.to(tl.float32)


@triton.jit
def _by_block(x, scale_ptr, n, at, k, K: tl.constexpr, ROWS: tl.constexpr):
    """x times the scales of the blocks (128 x 128) of the weight that it meets; all rows of a program lie in one block."""
    BLOCKS: tl.constexpr = (K + 127) // 128
    scale = tl.load(scale_ptr + tl.min(n, axis=0) // 128 * BLOCKS + (at + k) // 128, mask=at + k < K, other=0.0)
    return x * scale if ROWS == 1 else x * scale[None, :]


@triton.jit
def _scaled(x, gain_ptr, at, k, K: tl.constexpr, ROWS: tl.constexpr):
    gain = tl.load(gain_ptr + at + k, mask=at + k < K, other=0.0, eviction_policy="evict_last")
    return x * gain if ROWS == 1 else x * gain[None, :]


@triton.jit
def _before(
    x_ptr, gain_ptr, k, rows, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """What must be known of whole rows before their elements can be rounded: the factor of the norm, and the scale of the largest
    element; numbers, or [ROWS, 1]."""
    squares = tl.zeros((BLOCK_K,), tl.float32) if ROWS == 1 else tl.zeros((ROWS, BLOCK_K), tl.float32)
    largest = squares
    for at in range(0, K, BLOCK_K):
        x = _operand(x_ptr, at, k, rows, K, ROWS, EVEN_K)
        if NORM:
            squares += x * x
            x = _scaled(x, gain_ptr, at, k, K, ROWS)
        largest = tl.maximum(largest, tl.abs(x))
    if ROWS == 1:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps) if NORM else 1.0
        scale = tl.maximum(tl.max(largest, axis=0) * factor, SMALLEST) / LARGEST
    else:
        factor = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None] if NORM else 1.0
        scale = tl.maximum(tl.max(largest, axis=1)[:, None] * factor, SMALLEST) / LARGEST
    return factor, scale


@triton.jit
def _rounded(x, scale, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BY_GROUP: tl.constexpr):
    """x as e4m3 keeps it, by its scale, or by that of each 128 elements; see `lockstep_kernels.fp8.reference.quantise`."""
    if BY_GROUP:
        SIZE: tl.constexpr = SCALE_BLOCK if BLOCK_K > SCALE_BLOCK else BLOCK_K
        groups = tl.reshape(x, (ROWS * BLOCK_K // SIZE, SIZE))
        own = (tl.maximum(tl.max(tl.abs(groups), axis=1), SMALLEST) / LARGEST)[:, None]
        y = tl.reshape((groups / own).to(tl.float8e4nv).to(tl.float32) * own, x.shape)
    else:
        y = (x / scale).to(tl.float8e4nv).to(tl.float32) * scale
    return y


@triton.jit
def _finish(
    acc,
    scale,
    w_scale_ptr,
    bias_ptr,
    n,
    N,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    SCALES: tl.constexpr,
    BIAS: tl.constexpr,
):
    """[ROWS, BLOCK_N]"""
    y = tl.sum(acc, axis=1)[None, :] if ROWS == 1 else tl.sum(acc, axis=2)
    if NORM:
        y = y * scale
    if SCALES == "rows":
        y = y * tl.load(w_scale_ptr + n, mask=n < N, other=0.0)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["rows"])
def _skinny(
    x_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    gain_ptr,
    plus_ptr,
    out_ptr,
    rows,
    N,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GATED: tl.constexpr,
    SCALES: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    PLUS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows n of the weight by a program, and rows N + n if it is GATED. The next tile is asked for before this one is used."""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    release(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_row = w_ptr + n.to(tl.int64)[:, None] * K
    up_row = w_row
    w = _weights(w_row, 0, n, k, N, K, EVEN_N, EVEN_K)
    up = w
    if GATED:
        up_row = w_row + N.to(tl.int64) * K
        up = _weights(up_row, 0, n, k, N, K, EVEN_N, EVEN_K)
    wait(PDL)
    if ROWS == 1:
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        squares = tl.zeros((BLOCK_K,), tl.float32)
    else:
        acc = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
        squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    acc_up = acc
    ROUND: tl.constexpr = SCALES != "none"
    if ROUND:
        factor, x_scale = _before(x_ptr, gain_ptr, k, rows, eps, K, ROWS, BLOCK_K, EVEN_K, NORM)
    for at in range(0, K, BLOCK_K):
        w_next, up_next = w, up
        if at + BLOCK_K < K:
            w_next = _weights(w_row, at + BLOCK_K, n, k, N, K, EVEN_N, EVEN_K)
            if GATED:
                up_next = _weights(up_row, at + BLOCK_K, n, k, N, K, EVEN_N, EVEN_K)
        x = _operand(x_ptr, at, k, rows, K, ROWS, EVEN_K)
        if NORM:
            squares += x * x
            x = _scaled(x, gain_ptr, at, k, K, ROWS)
        if ROUND:
            x = _rounded(x * factor, x_scale, ROWS, BLOCK_K, SCALES == "blocks")
        if SCALES == "blocks":
            acc += _multiply(_by_block(x, w_scale_ptr, n, at, k, K, ROWS), w, ROWS)
        else:
            acc += _multiply(x, w, ROWS)
        if GATED:
            if SCALES == "blocks":
                x = _by_block(x, w_scale_ptr, N + n, at, k, K, ROWS)
            acc_up += _multiply(x, up, ROWS)
        w, up = w_next, up_next
    scale = 1.0
    if NORM and not ROUND:
        if ROWS == 1:
            scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        else:
            scale = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
    y = _finish(acc, scale, w_scale_ptr, bias_ptr, n, N, ROWS, NORM and not ROUND, SCALES, BIAS)
    if GATED:
        y_up = _finish(acc_up, scale, w_scale_ptr + N, bias_ptr + N, n, N, ROWS, NORM and not ROUND, SCALES, BIAS)
        y = y / (1.0 + tl.exp(-y)) * y_up
    t = tl.arange(0, ROWS)[:, None]
    inside = (t < rows) & (n < N)[None, :]
    if PLUS:
        y += tl.load(plus_ptr + t * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * N + n[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How many rows of the weight a program takes, how many columns at once, and its warps."""

    block_n: int
    block_k: int
    warps: int


def skinny_config(n: int, k: int, rows: int, gated: bool) -> SkinnyConfig:
    """32 elements of the weight a thread and step, fewer where sums of several rows need the registers; whole rows in one
    step where they are short; and programs enough for every multiprocessor to hold a few."""
    warps = 8 if n * k >= 1 << 22 else 4
    elements = 1024 * warps // (triton.next_power_of_2(rows) if rows > 2 else 1) // (2 if gated else 1)
    block_k = triton.next_power_of_2(k)
    if block_k > min(2048, elements):
        sizes = [size for size in ((1024, 512) if gated else (2048, 1024, 512)) if size <= elements]
        block_k = min(sizes, key=lambda size: (-(-k // size) * size, -size))
    block_n = max(1, elements // block_k)
    while block_n > 1 and triton.cdiv(n, block_n) < 264:
        block_n //= 2
    return SkinnyConfig(block_n, block_k, warps)


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    plus: torch.Tensor | None = None,
    gated: bool = False,
    weight_scale: torch.Tensor | None = None,
    config: SkinnyConfig | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """out [T, n] = [silu of] [norm of] x [T, k] @ weight.T + bias [+ plus], T from 1 to 4, in a program that reads weights once.

    `gated`: weight [2n, k] and bias [2n] hold gate and up; out = silu(gate) * up. `out` may be `plus`.
    `weight_scale`: of an e4m3 weight, as in `lockstep_kernels.fp8.Fp8Weight`; then n is a multiple of 128 if `gated`, and x is
    rounded to e4m3 as `lockstep_kernels.fp8.reference.quantise` does.
    """
    rows, k = x.shape
    n = out.shape[1]
    if config is None:
        config = skinny_config(n, k, rows, gated)
    pdl = dependent.supported(x.device) if pdl is None else pdl
    _skinny[(triton.cdiv(n, config.block_n),)](
        x,
        weight,
        x if weight_scale is None else weight_scale,
        x if bias is None else bias,
        x if gain is None else gain,
        x if plus is None else plus,
        out,
        rows,
        n,
        eps,
        K=k,
        ROWS=triton.next_power_of_2(rows),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        EVEN_N=n % config.block_n == 0,
        GATED=gated,
        SCALES="none" if weight_scale is None else "blocks" if weight_scale.dim() == 2 else "rows",
        NORM=gain is not None,
        BIAS=bias is not None,
        PLUS=plus is not None,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out


@triton.jit
def tile_of_program(rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Rows and columns of this program's tile of the result. Programs that run side by side share rows and weights: they go
    through all columns of GROUP_M tiles of rows, then of the next."""
    across = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * across)
    place = tl.program_id(0) % (GROUP_M * across)
    high = tl.minimum(tl.cdiv(rows, BLOCK_M) - group * GROUP_M, GROUP_M)
    m = (group * GROUP_M + place % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = place // high * BLOCK_N + tl.arange(0, BLOCK_N)
    return m, n


@triton.jit
def store_tile(acc, m, n, bias_ptr, plus_ptr, out_ptr, rows, N, BIAS: tl.constexpr, PLUS: tl.constexpr):
    """The sums with what is added to them, where a row and a column are there."""
    inside_m, inside_n = (m < rows)[:, None], (n < N)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at_out = m.to(tl.int64)[:, None] * N + n[None, :]
    if PLUS:
        acc += tl.load(plus_ptr + at_out, mask=inside_m & inside_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at_out, acc.to(out_ptr.dtype.element_ty), mask=inside_m & inside_n)


@triton.jit(do_not_specialize=["rows"])
def _tiles(
    x_ptr,
    w_ptr,
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
    BIAS: tl.constexpr,
    PLUS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of the result by a program, added over k from 0 on."""
    release(PDL)
    m, n = tile_of_program(rows, N, BLOCK_M, BLOCK_N, GROUP_M)
    k = tl.arange(0, BLOCK_K)
    inside_m, inside_n = (m < rows)[:, None], (n < N)[None, :]
    x_tile = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    w_tile = w_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    wait(PDL)
    for at in range(0, K, BLOCK_K):
        if K % BLOCK_K:
            inside = at + k < K
            x = tl.load(x_tile + at, mask=inside_m & inside[None, :], other=0.0)
            w = tl.load(w_tile + at, mask=inside_n & inside[:, None], other=0.0)
        else:
            x = tl.load(x_tile + at, mask=inside_m, other=0.0)
            w = tl.load(w_tile + at, mask=inside_n, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    store_tile(acc, m, n, bias_ptr, plus_ptr, out_ptr, rows, N, BIAS, PLUS)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Rows and columns of the result a program, columns of the operands at once, warps, and tiles in flight."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


# Both add the same 64 products at a time, in the same order, by the same instruction (64 rows, 16 products): equal bits.
FIXED_FEW = TileConfig(64, 32, 64, 4, 6)
FIXED_MANY = TileConfig(128, 128, 64, 8, 4)
FIXED_MOST_FEW = 128  # rows


def fixed_config(rows: int) -> TileConfig:
    """Of products whose bits must not depend on the number of rows."""
    return FIXED_FEW if rows <= FIXED_MOST_FEW else FIXED_MANY


def tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    plus: torch.Tensor | None = None,
    config: TileConfig | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """out [T, n] = x [T, k] @ weight.T + bias [+ plus]. `out` may be `plus`. With `fixed_config`, the default, a row has the
    same bits for every T."""
    rows, k = x.shape
    n = out.shape[1]
    if config is None:
        config = fixed_config(rows)
    pdl = dependent.supported(x.device) if pdl is None else pdl
    _tiles[(triton.cdiv(rows, config.block_m) * triton.cdiv(n, config.block_n),)](
        x,
        weight,
        x if bias is None else bias,
        x if plus is None else plus,
        out,
        rows,
        n,
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=16,
        BIAS=bias is not None,
        PLUS=plus is not None,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )
    return out
