"""The end of a step: outcome words, and the rows' state moved on by a token."""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.post_update import reference
from lockstep_kernels.post_update.reference import NO_WORD, outcome_words
from lockstep_kernels.post_update.state import RowState

__all__ = ["NO_WORD", "RowState", "finish", "outcome_words"]


def finish(
    index: torch.Tensor,
    tokens: torch.Tensor,
    bad: torch.Tensor | None,
    state: RowState,
    ring: torch.Tensor,
    cursor: torch.Tensor,
    *,
    row_shift: int,
    stop_bit: int,
    length_bit: int,
    fault_bit: int,
) -> None:
    """Ends a step of the rows `index` [b] int64: appends their tokens [b] int64 and says so in outcome words.

    A row that lives gets its token into `history`, `last` and `counts` and one more in `lengths`, and dies if it ends (see
    `outcome_words`; bad [b] bool). Nothing of a dead row changes; any number of dead rows may be listed, also twice.
    ring [depth, n >= b] int64, on the host (page-locked) or the device: its line cursor % depth gets the b words,
    token | row << row_shift | the bit of the row's end, or NO_WORD of a dead row. cursor [1] int64 then counts one more.
    """
    size = len(index)
    check_shape("tokens", tokens, (size,))
    if bad is not None:
        check_shape("bad", bad, (size,))
    if ring.shape[1] < size:
        raise ValueError(f"ring has lines of {ring.shape[1]} words, the step has {size} rows")
    for name in ("last", "alive", "limits"):
        check_shape(name, getattr(state, name), tuple(state.lengths.shape))
    bits = (row_shift, stop_bit, length_bit, fault_bit)
    if index.is_cuda:
        from lockstep_kernels.post_update import kernel

        kernel.finish(index, tokens, bad, state, ring, cursor, bits)
    else:
        reference.finish(index, tokens, bad, state, ring, cursor, bits)
