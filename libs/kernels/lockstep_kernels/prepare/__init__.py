"""Step preparation: tokens, positions, KV slots and block tables of the rows that step."""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.prepare import reference
from lockstep_kernels.prepare.inputs import DecodeInputs
from lockstep_kernels.prepare.reference import slots, window
from lockstep_kernels.prepare.share import WHOLE, Share

__all__ = ["WHOLE", "DecodeInputs", "Share", "decode_inputs", "slots", "window"]


def decode_inputs(
    index: torch.Tensor,
    last: torch.Tensor,
    lengths: torch.Tensor,
    alive: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    block_sizes: tuple[int, ...],
    out: DecodeInputs,
    share: Share = WHOLE,
) -> None:
    """Fills `out` for a decode step of the rows `index` [b] int64, of which any number may be dead or name a row twice.

    last, lengths [R] int64: each row's last token, and its tokens with that one; alive [R] bool; tables: one [R, W] int64 a KV
    group of blocks of block_sizes[g] tokens. A row that lives feeds `last` at position length - 1. One that does not feeds
    token 0 as a sequence of one token in slot 0 of the null block: a computation that harms nothing and reads one slot.
    Of a block table only the entries that hold the sequence are copied. With a `share` the slots are those of what is kept here
    (positions and lengths stay those of the sequence).
    """
    size = len(index)
    check_shape("out.token_ids", out.token_ids, (size,))
    for name, values in (("last", last), ("alive", alive)):
        check_shape(name, values, tuple(lengths.shape))
    if not len(tables) == len(block_sizes) == len(out.slots) == len(out.block_tables):
        raise ValueError(
            f"{len(tables)} block tables, {len(block_sizes)} block sizes, {len(out.slots)} KV groups in out"
        )
    for table, copied in zip(tables, out.block_tables, strict=True):
        check_shape("block table", copied, (size, table.shape[1]))
    if index.is_cuda:
        from lockstep_kernels.prepare import kernel

        kernel.decode_inputs(index, last, lengths, alive, tables, block_sizes, out, share)
    else:
        reference.decode_inputs(index, last, lengths, alive, tables, block_sizes, out, share)
