"""The experts of one or two tokens in Triton: every pair by itself, as hardly any two of them share an expert.

No plan is needed, sums run over whole rows of weights in the vector units, and each product takes along what stands beside it:
gate and up the norm before them, down the weighted sum over a token's experts and the residual. The next tile of weights is
asked for before this one is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait
from lockstep_kernels.fp8 import BLOCK
from lockstep_kernels.moe.kernel import choose_from, routing_constants
from lockstep_kernels.moe.weights import Routing, Stack
from lockstep_kernels.rms_norm import Norm

SCALE_BLOCK = tl.constexpr(BLOCK)
EXPERTS_AT_ONCE = 2  # of the gate, in one program: one warp, so that no step of the choice waits for another


@triton.jit
def _tile(at, column, k, inside_n, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K] of a weight, from `column` on."""
    if K % BLOCK_K == 0:
        w = tl.load(at + column, mask=inside_n[:, None], other=0.0, eviction_policy="evict_first")
    else:
        inside = inside_n[:, None] & (column + k < K)[None, :]
        w = tl.load(at + column, mask=inside, other=0.0, eviction_policy="evict_first")
    return w


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    x_ptr,
    gain_ptr,
    gate_ptr,
    correction_ptr,
    live_ptr,
    logits_ptr,
    arrived_ptr,
    ids_ptr,
    weights_ptr,
    tokens,
    eps,
    scale,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    CORRECTED: tl.constexpr,
    MASKED: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    CHOSEN_PAD: tl.constexpr,
    HIDDEN: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has the logits of BLOCK_E experts for all tokens; the last one to arrive has all logits, and chooses."""
    release(PDL)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    gate_at = gate_ptr + e[:, None] * HIDDEN + k[None, :]
    w = _tile(gate_at, 0, k, e < EXPERTS, HIDDEN, BLOCK_K)
    t = tl.arange(0, ROWS)
    wait(PDL)
    sums = tl.zeros((ROWS, BLOCK_E, BLOCK_K), tl.float32)
    squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for column in range(0, HIDDEN, BLOCK_K):
        next_w = w
        if column + BLOCK_K < HIDDEN:
            next_w = _tile(gate_at, column + BLOCK_K, k, e < EXPERTS, HIDDEN, BLOCK_K)
        inside = column + k < HIDDEN
        x_at = x_ptr + t[:, None] * HIDDEN + column + k[None, :]
        x = tl.load(x_at, mask=(t < tokens)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(gain_ptr + column + k, mask=inside, other=0.0)[None, :]
        sums += x[:, None, :] * w.to(tl.float32)[None, :, :]
        w = next_w
    logits = tl.sum(sums, 2)
    if NORM:
        logits *= tl.rsqrt(tl.sum(squares, 1) / HIDDEN + eps)[:, None]
    at = logits_ptr + t[:, None] * EXPERTS + e[None, :]
    tl.store(at, logits, mask=(t < tokens)[:, None] & (e < EXPERTS)[None, :])
    tl.debug_barrier()  # all of this program's logits are written before it counts as arrived
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived_ptr, 0)
        choose_from(
            logits_ptr, correction_ptr, live_ptr, ids_ptr, weights_ptr, t, tokens, scale,
            EXPERTS, TOP_K, SHARED, SIGMOID, RENORMALISE, GROUPS, TOP_GROUPS, TOP2, CORRECTED, MASKED,
            ROWS, GROUP_PAD, SIZE_PAD, CHOSEN_PAD,
        )  # fmt: skip


@triton.jit
def _block_scales(at, column, k, K: tl.constexpr):
    """[BLOCK_K] scales of the blocks that columns from `column` on lie in; `at` is their row of blocks."""
    return tl.load(at + (column + k) // SCALE_BLOCK, mask=column + k < K, other=0.0)


@triton.jit
def _gate_up(
    x_ptr,
    gain_ptr,
    w_ptr,
    scale_ptr,
    ids_ptr,
    out_ptr,
    eps,
    CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair, n] = silu(gate) * up of the pair's token by the pair's expert."""
    release(PDL)
    pair = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = n < WIDTH
    k = tl.arange(0, BLOCK_K)
    wait(PDL)
    expert = tl.load(ids_ptr + pair)
    if expert < 0:
        return
    gate_at = w_ptr + (expert.to(tl.int64) * (2 * WIDTH) + n)[:, None] * HIDDEN + k[None, :]
    up_at = gate_at + WIDTH * HIDDEN
    gate = _tile(gate_at, 0, k, inside_n, HIDDEN, BLOCK_K)
    up = _tile(up_at, 0, k, inside_n, HIDDEN, BLOCK_K)
    gate_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    x_at = x_ptr + pair // CHOSEN * HIDDEN
    ACROSS: tl.constexpr = (HIDDEN + SCALE_BLOCK - 1) // SCALE_BLOCK
    DOWN: tl.constexpr = (WIDTH + SCALE_BLOCK - 1) // SCALE_BLOCK
    gate_scale = scale_ptr + (expert * (2 * DOWN) + tl.program_id(0) * BLOCK_N // SCALE_BLOCK) * ACROSS
    for column in range(0, HIDDEN, BLOCK_K):
        next_gate, next_up = gate, up
        if column + BLOCK_K < HIDDEN:
            next_gate = _tile(gate_at, column + BLOCK_K, k, inside_n, HIDDEN, BLOCK_K)
            next_up = _tile(up_at, column + BLOCK_K, k, inside_n, HIDDEN, BLOCK_K)
        inside = column + k < HIDDEN
        x = tl.load(x_at + column + k, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(gain_ptr + column + k, mask=inside, other=0.0, eviction_policy="evict_last")
        x_up = x
        if SCALES == "blocks":
            x_up = x * _block_scales(gate_scale + DOWN * ACROSS, column, k, HIDDEN)
            x *= _block_scales(gate_scale, column, k, HIDDEN)
        gate_sum += gate.to(tl.float32) * x[None, :]
        up_sum += up.to(tl.float32) * x_up[None, :]
        gate, up = next_gate, next_up
    scale = tl.rsqrt(tl.sum(squares) / HIDDEN + eps) if NORM else 1.0
    g = tl.sum(gate_sum, 1) * scale
    u = tl.sum(up_sum, 1) * scale
    if SCALES == "rows":
        row_scale = scale_ptr + expert * (2 * WIDTH) + n
        g *= tl.load(row_scale, mask=inside_n, other=0.0)
        u *= tl.load(row_scale + WIDTH, mask=inside_n, other=0.0)
    y = g / (1 + tl.exp(-g)) * u
    tl.store(out_ptr + pair * WIDTH + n, y.to(out_ptr.dtype.element_ty), mask=inside_n)


@triton.jit
def _experts_tile(at, column, k, mask, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[CHOSEN_PAD, BLOCK_N, BLOCK_K] of the weights of a token's experts, from `column` on."""
    inside = mask if K % BLOCK_K == 0 else mask & (column + k < K)[None, None, :]
    return tl.load(at + column, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _down(
    x_ptr,
    w_ptr,
    scale_ptr,
    ids_ptr,
    factors_ptr,
    plus_ptr,
    out_ptr,
    CHOSEN: tl.constexpr,
    CHOSEN_PAD: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, n] = plus[t, n] + the sum over the token's experts j of factor[t, j] * (x[t, j] @ down.T)[n]."""
    release(PDL)
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, CHOSEN_PAD)
    k = tl.arange(0, BLOCK_K)
    pair = token * CHOSEN + j
    wait(PDL)
    expert = tl.load(ids_ptr + pair, mask=j < CHOSEN, other=-1)
    there = expert >= 0
    w_at = w_ptr + (expert.to(tl.int64)[:, None] * HIDDEN + n[None, :])[:, :, None] * WIDTH + k[None, None, :]
    mask = there[:, None, None] & (n < HIDDEN)[None, :, None]
    w = _experts_tile(w_at, 0, k, mask, WIDTH, BLOCK_K)
    total = tl.zeros((CHOSEN_PAD, BLOCK_N, BLOCK_K), tl.float32)
    ACROSS: tl.constexpr = (WIDTH + SCALE_BLOCK - 1) // SCALE_BLOCK
    DOWN: tl.constexpr = (HIDDEN + SCALE_BLOCK - 1) // SCALE_BLOCK
    block_scale = scale_ptr + (expert * DOWN + tl.program_id(0) * BLOCK_N // SCALE_BLOCK) * ACROSS
    for column in range(0, WIDTH, BLOCK_K):
        next_w = w
        if column + BLOCK_K < WIDTH:
            next_w = _experts_tile(w_at, column + BLOCK_K, k, mask, WIDTH, BLOCK_K)
        inside = there[:, None] & (column + k < WIDTH)[None, :]
        x = tl.load(x_ptr + pair[:, None] * WIDTH + column + k[None, :], mask=inside, other=0.0).to(tl.float32)
        if SCALES == "blocks":
            x *= tl.load(block_scale[:, None] + ((column + k) // SCALE_BLOCK)[None, :], mask=inside, other=0.0)
        total += w.to(tl.float32) * x[:, None, :]
        w = next_w
    factors = tl.load(factors_ptr + pair, mask=there, other=0.0)
    results = tl.sum(total, 2)
    if SCALES == "rows":
        inside = there[:, None] & (n < HIDDEN)[None, :]
        results *= tl.load(scale_ptr + expert[:, None] * HIDDEN + n[None, :], mask=inside, other=0.0)
    y = tl.sum(results * factors[:, None], 0)
    at = token * HIDDEN + n
    y += tl.load(plus_ptr + at, mask=n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=n < HIDDEN)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows of a weight that a program takes (of gate and of up each), columns at once, warps."""

    block_n: int
    block_k: int
    warps: int


def gate_up_tiling(hidden: int) -> Tiling:
    """64 elements of the two weights a thread; whole rows, if they are not longer, so that all of it is asked for at once."""
    block_k = min(triton.next_power_of_2(hidden), 2048)
    return Tiling(max(1, 4096 // block_k), block_k, 4)


def down_tiling(width: int, chosen: int) -> Tiling:
    """32 elements of the weights of all the token's experts a thread, so that many programs read at a time."""
    block_k = min(triton.next_power_of_2(width), 128)
    return Tiling(max(1, 4096 // (triton.next_power_of_2(chosen) * block_k)), block_k, 4)


def choose(
    x: torch.Tensor,
    norm: Norm | None,
    gate: torch.Tensor,
    arrived: torch.Tensor,
    routing: Routing,
    correction: torch.Tensor | None,
    live: torch.Tensor | None,
    shared: int,
    *,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `lockstep_kernels.moe.choose`; gate [E, d]. `arrived` int32 [1] is 0 before and after."""
    tokens, hidden = x.shape
    pdl = dependent.supported(x.device) if pdl is None else pdl
    shape = (tokens, routing.top_k + shared)
    ids = torch.empty(shape, dtype=torch.int32, device=x.device)
    weights = torch.empty(shape, dtype=torch.float32, device=x.device)
    logits = torch.empty(tokens, routing.experts, dtype=torch.float32, device=x.device)
    rows = triton.next_power_of_2(tokens)
    _choose[(triton.cdiv(routing.experts, EXPERTS_AT_ONCE),)](
        x,
        x if norm is None else norm.gain,
        gate,
        correction,
        live,
        logits,
        arrived,
        ids,
        weights,
        tokens,
        0.0 if norm is None else norm.eps,
        routing.scale,
        HIDDEN=hidden,
        NORM=norm is not None,
        ROWS=rows,
        BLOCK_E=EXPERTS_AT_ONCE,
        BLOCK_K=min(triton.next_power_of_2(hidden), 1024 // rows),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
        **routing_constants(routing, correction, live, shared),
    )
    return ids, weights


def gate_up(
    x: torch.Tensor,
    norm: Norm | None,
    weights: Stack,
    ids: torch.Tensor,
    *,
    tiling: Tiling | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """[P, i]: silu(x @ gate.T) * (x @ up.T) of each pair. x [T, d], to be normalised if there is a norm; weights [E, 2i, d]."""
    _, rows, hidden = weights.values.shape
    width, pairs = rows // 2, ids.numel()
    pdl = dependent.supported(x.device) if pdl is None else pdl
    out = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    tiling = tiling or gate_up_tiling(hidden)
    _gate_up[(triton.cdiv(width, tiling.block_n), pairs)](
        x,
        x if norm is None else norm.gain,
        weights.values,
        x if weights.scale is None else weights.scale,
        ids,
        out,
        0.0 if norm is None else norm.eps,
        CHOSEN=ids.shape[1],
        HIDDEN=hidden,
        WIDTH=width,
        NORM=norm is not None,
        SCALES=weights.scales,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        PDL=pdl,
        num_warps=tiling.warps,
        launch_pdl=pdl,
    )
    return out


def down(
    x: torch.Tensor,
    weights: Stack,
    ids: torch.Tensor,
    factors: torch.Tensor,
    plus: torch.Tensor,
    *,
    tiling: Tiling | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """[T, d]: plus + the weighted sum of x @ down.T over a token's pairs. x [P, i]; weights [E, d, i]; ids and factors [T, k]."""
    tokens, chosen = ids.shape
    _, hidden, width = weights.values.shape
    pdl = dependent.supported(x.device) if pdl is None else pdl
    out = torch.empty_like(plus)
    tiling = tiling or down_tiling(width, chosen)
    _down[(triton.cdiv(hidden, tiling.block_n), tokens)](
        x,
        weights.values,
        x if weights.scale is None else weights.scale,
        ids,
        factors,
        plus,
        out,
        CHOSEN=chosen,
        CHOSEN_PAD=triton.next_power_of_2(chosen),
        HIDDEN=hidden,
        WIDTH=width,
        SCALES=weights.scales,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        PDL=pdl,
        num_warps=tiling.warps,
        launch_pdl=pdl,
    )
    return out
