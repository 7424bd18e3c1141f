"""`rms_norm` in Triton: some whole rows a program, read once, held in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait


@triton.jit(do_not_specialize=["vectors"])
def _rms_norm(
    x_ptr,
    gain_ptr,
    out_ptr,
    vectors,
    row_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    OWN_GAINS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    vector = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (vector < vectors)[:, None] & (d < WIDTH)
    head = vector % HEADS
    start = (vector // HEADS).to(tl.int64) * row_stride + head * head_stride
    if OWN_GAINS:
        gain = tl.load(gain_ptr + head[:, None] * WIDTH + d, mask=inside, other=0.0)
    else:
        gain = tl.load(gain_ptr + d, mask=d < WIDTH, other=0.0)
    wait(PDL)
    x = tl.load(x_ptr + start[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    y = x * scale[:, None] * gain
    tl.store(out_ptr + vector[:, None].to(tl.int64) * WIDTH + d, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float, *, pdl: bool | None = None) -> torch.Tensor:
    """See the public function. How a row is computed depends on its width alone, so its bits do too."""
    width = x.shape[-1]
    rows = x if x.dim() in (2, 3) and x.stride(-1) == 1 else x.contiguous().view(-1, *x.shape[-gain.dim() :])
    heads = rows.shape[1] if rows.dim() == 3 else 1
    vectors = rows.shape[0] * heads
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if vectors == 0:
        return out
    block_d = triton.next_power_of_2(width)
    block_v = max(1, 1024 // block_d)
    pdl = dependent.supported(x.device) if pdl is None else pdl
    _rms_norm[(triton.cdiv(vectors, block_v),)](
        rows,
        gain,
        out,
        vectors,
        rows.stride(0),
        rows.stride(1) if rows.dim() == 3 else 0,
        eps,
        HEADS=heads,
        OWN_GAINS=gain.dim() > 1,
        WIDTH=width,
        BLOCK_V=block_v,
        BLOCK_D=block_d,
        PDL=pdl,
        num_warps=min(16, max(1, block_v * block_d // 512)),
        launch_pdl=pdl,
    )
    return out
