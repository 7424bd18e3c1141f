"""Parts of attention put together in Triton: each row of each part is read once."""

# Triton's language has no types, and a kernel's parameters none that Python knows.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait

TILE = 2048  # values that a program adds up

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    outs,  # [PARTS, tokens, HEADS, D], strides as named, D contiguous
    lses,  # [PARTS, rows] float32, parts lse_part apart
    out,  # [tokens, HEADS, D], may be one of the parts
    lse,  # [rows] float32, may be one of the parts
    rows,  # tokens * HEADS
    part_stride,
    token_stride,
    head_stride,
    lse_part,
    out_token,
    out_head,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # D padded to a power of two
    PDL: tl.constexpr,
):
    """A program: some rows of one head each."""
    release(PDL)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None, :]
    known = row < rows
    token, head = (row // HEADS).to(tl.int64)[:, None], (row % HEADS)[:, None]
    wait(PDL)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    for part in tl.static_range(PARTS):
        own = tl.load(lses + part * lse_part + row, mask=known, other=-float("inf"))
        highest = tl.maximum(highest, own)
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in tl.static_range(PARTS):
        own = tl.load(lses + part * lse_part + row, mask=known, other=-float("inf"))
        weight = tl.exp2((own - shift) * LOG2E)
        total += weight
        wanted = (known & (own != -float("inf")))[:, None] & (column < D)
        at = outs + part * part_stride + token * token_stride + head * head_stride + column
        mixed += tl.load(at, mask=wanted, other=0.0).to(tl.float32) * weight[:, None]
    tl.debug_barrier()  # every thread has read before one writes over a part
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out + token * out_token + head * out_head + column
    tl.store(to, mixed.to(out.dtype.element_ty), mask=known[:, None] & (column < D))
    tl.store(lse + row, shift + tl.log2(total) * LN2, mask=known)


def merge(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """See the public function."""
    parts, tokens, heads, width = outs.shape
    rows, columns = tokens * heads, triton.next_power_of_2(width)
    if not rows:
        return
    each = max(1, TILE // columns)
    pdl = dependent.supported(outs.device)
    merge_kernel[(triton.cdiv(rows, each),)](
        outs,
        lses,
        out,
        lse,
        rows,
        *outs.stride()[:3],
        lses.stride(0),
        *out.stride()[:2],
        PARTS=parts,
        HEADS=heads,
        D=width,
        ROWS=each,
        COLUMNS=columns,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
