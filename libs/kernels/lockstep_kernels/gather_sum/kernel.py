"""`gather_sum` in Triton: a program for each token and block of columns, which reads every row once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait


@triton.jit
def _gather_sum(
    rows_ptr, index_ptr, plus_ptr, out_ptr,
    HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    wait(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    if ADDS:
        total = tl.load(plus_ptr + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(CHOSEN):
        row = tl.load(index_ptr + token * CHOSEN + j).to(tl.int64)
        total += tl.load(rows_ptr + row * HIDDEN + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def gather_sum(
    rows: torch.Tensor, index: torch.Tensor, plus: torch.Tensor | None, *, pdl: bool | None = None
) -> torch.Tensor:
    """See the public function."""
    (tokens, chosen), hidden = index.shape, rows.shape[1]
    pdl = dependent.supported(rows.device) if pdl is None else pdl
    out = torch.empty(tokens, hidden, dtype=rows.dtype, device=rows.device)
    if tokens:
        block = min(triton.next_power_of_2(hidden), 1024)
        _gather_sum[(tokens, triton.cdiv(hidden, block))](
            rows, index.contiguous(), plus, out, HIDDEN=hidden, CHOSEN=chosen, ADDS=plus is not None, BLOCK=block, PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out
