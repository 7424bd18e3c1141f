"""The products of the experts in Triton, over pairs ordered by expert (`lockstep_kernels.moe.plan`).

Few rows an expert: reading weights is all there is to it. A program streams its part of one expert's weights once, for all of
that expert's rows, in tiles that the copy engine brings; as the tensor cores want 64 rows on one side and there are fewer
tokens than that, the weights stand on that side (SWAP): acc[n, m] = sum_k w[n, k] x[m, k].
Many rows: tiles of 128 rows, the usual way round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait
from lockstep_kernels.fp8 import BLOCK
from lockstep_kernels.moe.plan import Plan
from lockstep_kernels.moe.weights import Stack

SCALE_BLOCK = tl.constexpr(BLOCK)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: columns of the result (of gate and of up each), inner length, stages in flight, warps, and whether
    the weights stand on the left."""

    block_n: int
    block_k: int
    stages: int
    warps: int
    swap: bool


@triton.jit
def _product(x, w, acc, scale_at, SCALES: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x [M, K] times w [N, K]: [M, N], or with SWAP [N, M]; weights of 8 bits times the scale of their block."""
    if SCALES == "none":
        acc = tl.dot(w, x.T, acc, input_precision=PRECISION) if SWAP else tl.dot(x, w.T, acc, input_precision=PRECISION)
    else:
        wide = w.to(tl.float32).to(x.dtype)
        if SCALES == "rows":
            acc = tl.dot(wide, x.T, acc) if SWAP else tl.dot(x, wide.T, acc)
        else:
            part = tl.dot(wide, x.T) if SWAP else tl.dot(x, wide.T)
            acc += part * tl.load(scale_at)
    return acc


@triton.jit
def _by_row(acc, scale_at, inside, SCALES: tl.constexpr, SWAP: tl.constexpr):
    """The sums times the scales of their rows of the weight, if there are such."""
    if SCALES == "rows":
        scale = tl.load(scale_at, mask=inside, other=0.0)
        acc = acc * scale[:, None] if SWAP else acc * scale[None, :]
    return acc


@triton.jit(do_not_specialize=["blocks"])
def _gate_up(
    x_ptr, weights, scale_ptr, order_ptr, blocks_ptr, out_ptr, blocks,
    CHOSEN: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALES: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[place] = silu(x @ gate.T) * (x @ up.T) of the pair at each place of the order."""
    release(PDL)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # shared experts, the last ones, have most rows: first
    wait(PDL)
    expert = tl.load(blocks_ptr + block)
    if expert < 0:
        return
    place = tl.load(blocks_ptr + blocks + block) + tl.arange(0, BLOCK_M)
    there = place < tl.load(blocks_ptr + 2 * blocks + block)
    token = tl.load(order_ptr + place, mask=there, other=0) // CHOSEN
    column = tl.program_id(0) * BLOCK_N
    gate_row = expert * (2 * WIDTH) + column
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + token.to(tl.int64)[:, None] * HIDDEN + inner[None, :]
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if SWAP else tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    ACROSS: tl.constexpr = (HIDDEN + SCALE_BLOCK - 1) // SCALE_BLOCK
    DOWN: tl.constexpr = (WIDTH + SCALE_BLOCK - 1) // SCALE_BLOCK
    gate_scale = scale_ptr + (expert * (2 * DOWN) + column // SCALE_BLOCK) * ACROSS
    up_scale = gate_scale + DOWN * ACROSS
    for k in range(0, HIDDEN, BLOCK_K):
        if HIDDEN % BLOCK_K:
            x = tl.load(x_at + k, mask=there[:, None] & (k + inner < HIDDEN)[None, :], other=0.0)
        elif BLOCK_M < 128:
            x = tl.load(x_at + k, mask=there[:, None], other=0.0)
        else:  # 3 % quicker without a mask; rows that are not there read token 0 and are not stored
            x = tl.load(x_at + k)
        at_scale = k // SCALE_BLOCK
        gate = _product(x, weights.load([gate_row, k]), gate, gate_scale + at_scale, SCALES, SWAP, PRECISION)
        up = _product(x, weights.load([gate_row + WIDTH, k]), up, up_scale + at_scale, SCALES, SWAP, PRECISION)
    n = column + tl.arange(0, BLOCK_N)
    row_scale = scale_ptr + expert * (2 * WIDTH) + n
    gate = _by_row(gate, row_scale, n < WIDTH, SCALES, SWAP)
    up = _by_row(up, row_scale + WIDTH, n < WIDTH, SCALES, SWAP)
    result = gate / (1 + tl.exp(-gate)) * up
    if SWAP:
        result = result.T
    at = out_ptr + place.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=there[:, None] & (n < WIDTH)[None, :])


@triton.jit(do_not_specialize=["blocks"])
def _down(
    x_ptr, rows_of_x, weights, scale_ptr, order_ptr, blocks_ptr, factors_ptr, out_ptr, blocks,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[place] @ down.T * factor[pair] of the pair at each place of the order.

    Many rows come through the copy engine: those behind a block's last one are of the next expert, and not stored.
    """
    release(PDL)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # shared experts, the last ones, have most rows: first
    wait(PDL)
    expert = tl.load(blocks_ptr + block)
    if expert < 0:
        return
    begin = tl.load(blocks_ptr + blocks + block)
    place = begin + tl.arange(0, BLOCK_M)
    there = place < tl.load(blocks_ptr + 2 * blocks + block)
    pair = tl.load(order_ptr + place, mask=there, other=0)
    column = tl.program_id(0) * BLOCK_N
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + place.to(tl.int64)[:, None] * WIDTH + inner[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if SWAP else tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ACROSS: tl.constexpr = (WIDTH + SCALE_BLOCK - 1) // SCALE_BLOCK
    DOWN: tl.constexpr = (HIDDEN + SCALE_BLOCK - 1) // SCALE_BLOCK
    block_scale = scale_ptr + (expert * DOWN + column // SCALE_BLOCK) * ACROSS
    for k in range(0, WIDTH, BLOCK_K):
        if SWAP:
            x = tl.load(x_at + k, mask=there[:, None] & (k + inner < WIDTH)[None, :], other=0.0)
        else:
            x = rows_of_x.load([begin, k])
        w = weights.load([expert * HIDDEN + column, k])
        acc = _product(x, w, acc, block_scale + k // SCALE_BLOCK, SCALES, SWAP, PRECISION)
    n = column + tl.arange(0, BLOCK_N)
    acc = _by_row(acc, scale_ptr + expert * HIDDEN + n, n < HIDDEN, SCALES, SWAP)
    if SWAP:
        acc = acc.T
    acc *= tl.load(factors_ptr + pair, mask=there, other=0.0)[:, None]
    at = out_ptr + pair.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=there[:, None] & (n < HIDDEN)[None, :])


def gate_up(
    x: torch.Tensor, weights: Stack, plan: Plan, chosen: int, tiling: Tiling, *, pdl: bool | None = None
) -> torch.Tensor:
    """[P, i]: silu(x @ gate.T) * (x @ up.T) of each pair, in the plan's order. x [T, d]; weights [E, 2i, d]."""
    _, rows, hidden = weights.values.shape
    width = rows // 2
    out = torch.empty(plan.order.shape[0], width, dtype=x.dtype, device=x.device)
    blocks = plan.blocks.shape[1]
    _gate_up[(triton.cdiv(width, tiling.block_n), blocks)](
        x, _tiles(weights, tiling), x if weights.scale is None else weights.scale, plan.order, plan.blocks, out, blocks,
        CHOSEN=chosen, HIDDEN=hidden, WIDTH=width, **_constants(x, weights, plan, tiling, pdl),
    )  # fmt: skip
    return out


def down(
    x: torch.Tensor,
    weights: Stack,
    plan: Plan,
    factors: torch.Tensor,
    tiling: Tiling,
    *,
    pdl: bool | None = None,
) -> torch.Tensor:
    """[P, d]: x @ down.T * factor of each pair, at its number. x [P, i] in the plan's order; weights [E, d, i]; factors f32 [P]."""
    _, hidden, width = weights.values.shape
    out = torch.empty(plan.order.shape[0], hidden, dtype=x.dtype, device=x.device)
    blocks = plan.blocks.shape[1]
    rows_of_x = None if tiling.swap else TensorDescriptor.from_tensor(x, [plan.block_m, tiling.block_k])
    _down[(triton.cdiv(hidden, tiling.block_n), blocks)](
        x, rows_of_x, _tiles(weights, tiling), x if weights.scale is None else weights.scale, plan.order, plan.blocks, factors, out,
        blocks, HIDDEN=hidden, WIDTH=width, **_constants(x, weights, plan, tiling, pdl),
    )  # fmt: skip
    return out


def _tiles(weights: Stack, tiling: Tiling) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weights.values.flatten(0, 1), [tiling.block_n, tiling.block_k])


def _constants(
    x: torch.Tensor, weights: Stack, plan: Plan, tiling: Tiling, pdl: bool | None
) -> dict[str, int | bool | str]:
    if weights.scales == "blocks" and (BLOCK % tiling.block_n or BLOCK % tiling.block_k):
        raise ValueError(f"{tiling} does not divide blocks of scales of {BLOCK} x {BLOCK}")
    pdl = dependent.supported(x.device) if pdl is None else pdl
    return {
        "BLOCK_M": plan.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "SCALES": weights.scales,
        "SWAP": tiling.swap,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "PDL": pdl,
        "num_stages": tiling.stages,
        "num_warps": tiling.warps,
        "launch_pdl": pdl,
    }
