"""Products of a few dozen rows with small weights in Triton, with the gate or the residual behind them.

Neither bytes nor operations decide how long these take, but how many launches stand in a row, and how long each of them waits
for memory. So each has its weights brought to the L2 cache while the launch before it runs. A norm is better a launch of its
own: operands that pass through registers on their way to the tensor cores take twice the time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait
from lockstep_kernels.linear.kernel import store_tile

MOST_FEW = 64  # rows that the kernel takes
BLOCK_K, WARPS, STAGES = 64, 4, 6
SHORT_SUM = 1024  # up to which wider programs are worth it, though there are fewer of them
UNIT = 16  # bytes that whole rows of a weight are a multiple of, if they can be brought ahead


@triton.jit
def _fetch_ahead(w_ptr, n, N, K: tl.constexpr):
    """Asks for rows n of the weight to be brought to the L2 cache, each at once."""
    at = w_ptr + tl.minimum(n, N - 1).to(tl.int64) * K
    size = tl.zeros_like(n) + K * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [at.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def _few(
    x_ptr,
    w_ptr,
    bias_ptr,
    plus_ptr,
    out_ptr,
    rows,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PLUS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns n of the result by a program, from rows n of the weight, and rows N + n if it is GATED."""
    release(PDL)
    m, n, k = tl.arange(0, ROWS), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if AHEAD:
        _fetch_ahead(w_ptr, n, N, K)
        if GATED:
            _fetch_ahead(w_ptr + N.to(tl.int64) * K, n, N, K)
    wait(PDL)
    inside_m, inside_n = (m < rows)[:, None], (n < N)[None, :]
    x_tile = x_ptr + m[:, None] * K + k[None, :]
    w_tile = w_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    up_tile = w_tile + N.to(tl.int64) * K
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    up = acc
    for at in range(0, K, BLOCK_K):
        inside = at + k < K
        x = tl.load(x_tile + at, mask=inside_m & inside[None, :], other=0.0)
        acc = tl.dot(x, tl.load(w_tile + at, mask=inside_n & inside[:, None], other=0.0), acc, input_precision="ieee")
        if GATED:
            w = tl.load(up_tile + at, mask=inside_n & inside[:, None], other=0.0)
            up = tl.dot(x, w, up, input_precision="ieee")
    if GATED:
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        acc = acc / (1.0 + tl.exp(-acc)) * up
    store_tile(acc, m, n, bias_ptr, plus_ptr, out_ptr, rows, N, BIAS and not GATED, PLUS)


def few(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    plus: torch.Tensor | None = None,
    gated: bool = False,
    pdl: bool | None = None,
) -> torch.Tensor:
    """out [T, n] = x [T, k] @ weight.T + bias [+ plus], T from 1 to MOST_FEW, x contiguous.

    `gated`: weight [2n, k] and bias [2n] hold gate and up; out = silu(gate) * up. `out` may be `plus`.
    """
    rows, k = x.shape
    n = out.shape[1]
    pdl = dependent.supported(x.device) if pdl is None else pdl
    block_n = 32 if k <= SHORT_SUM else 16
    _few[(triton.cdiv(n, block_n),)](
        x,
        weight,
        x if bias is None else bias,
        x if plus is None else plus,
        out,
        rows,
        n,
        K=k,
        ROWS=max(16, triton.next_power_of_2(rows)),
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K,
        GATED=gated,
        BIAS=bias is not None,
        PLUS=plus is not None,
        AHEAD=pdl and k * weight.element_size() % UNIT == 0,
        PDL=pdl,
        num_warps=WARPS,
        num_stages=STAGES,
        launch_pdl=pdl,
    )
    return out
