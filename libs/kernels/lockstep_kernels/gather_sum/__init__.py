"""Sums of chosen rows: what tokens get back from where they were sent."""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.gather_sum import reference

__all__ = ["gather_sum"]


def gather_sum(rows: torch.Tensor, index: torch.Tensor, *, plus: torch.Tensor | None = None) -> torch.Tensor:
    """out[t] = plus[t] + the sum over j of rows[index[t, j]] where index[t, j] is not negative: a new [T, d] of rows' dtype.

    rows [N, d]; index int32 [T, m], below N; plus [T, d] of rows' dtype, None: zeros. Added in float32 in the order of j and
    rounded once, so a row's bits depend on nothing but the row and do not vary from run to run.
    """
    tokens, hidden = index.shape[0], rows.shape[1]
    if index.dtype != torch.int32 or not rows.is_contiguous():
        raise ValueError(f"index is {index.dtype}, expected torch.int32, and rows must be contiguous")
    if plus is not None:
        check_shape("plus", plus, (tokens, hidden))
        if plus.dtype != rows.dtype or not plus.is_contiguous():
            raise ValueError(f"plus must be contiguous and {rows.dtype}, as rows are")
    if rows.is_cuda:
        from lockstep_kernels.gather_sum import kernel

        return kernel.gather_sum(rows, index, plus)
    return reference.gather_sum(rows, index, plus)
