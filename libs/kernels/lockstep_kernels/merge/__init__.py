"""Attention to parts of the keys, put together: what context parallelism and long prefixes make of several results."""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.merge import reference

__all__ = ["merge"]


def merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of attention to all keys, from what attention to each of P disjoint parts of them gives.

    outs [P, T, H, d] of a floating type, the last dimension contiguous; lses float32 [P, T, H], each part contiguous, natural: as
    `attention` and `mla.attend` write them, the log of the sum of exp(score). (Both may be views of one buffer, in which every rank's
    out is followed by its lse, and which one all-gather fills.) out[t, h] = sum over p of exp(lses[p] - lse) outs[p], added in
    float32 in the order of p and rounded once; lse = log of the sum of exp(lses). A part without keys has the lse -inf: its out
    is not looked at and may be NaN. Without any key out is 0 and lse -inf.
    out [T, H, d], of `dtype` (default: that of outs) if it is not given; lse float32 [T, H]. They may be one of the parts
    themselves, outs[p] and lses[p], so that pieces without number add up in two places.
    """
    parts, tokens, heads, width = outs.shape
    check_shape("lses", lses, (parts, tokens, heads))
    if parts == 0 or lses.dtype != torch.float32 or outs.stride(-1) != 1 or not lses[0].is_contiguous():
        raise ValueError("merge needs at least one part, contiguous lse in float32, and contiguous rows of outs")
    if out is None:
        out = torch.empty(tokens, heads, width, dtype=dtype or outs.dtype, device=outs.device)
    if lse is None:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=outs.device)
    check_shape("out", out, (tokens, heads, width))
    check_shape("lse", lse, (tokens, heads))
    if lse.dtype != torch.float32 or not lse.is_contiguous() or out.stride(-1) != 1:
        raise ValueError("out must have contiguous rows, and lse must be contiguous float32")
    if dtype not in (None, out.dtype):
        raise ValueError(f"out is {out.dtype}, not {dtype}")
    if outs.is_cuda:
        from lockstep_kernels.merge import kernel

        kernel.merge(outs, lses, out, lse)
    else:
        reference.merge(outs, lses, out, lse)
    return out, lse
