"""silu(gate) * up of the joint product, elementwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait

BLOCK = 1024


@triton.jit
def _silu_mul(both_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    wait(PDL)
    gate = tl.load(both_ptr + row * (2 * WIDTH) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(both: torch.Tensor, *, pdl: bool | None = None) -> torch.Tensor:
    """silu(gate) * up [T, i] of both [T, 2i] contiguous, gate first."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, width)
    if rows == 0:
        return out
    pdl = dependent.supported(both.device) if pdl is None else pdl
    _silu_mul[(rows, triton.cdiv(width, BLOCK))](
        both, out, WIDTH=width, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out
