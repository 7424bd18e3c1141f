"""Step preparation in Triton: one launch for all rows and KV groups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait
from lockstep_kernels.prepare.inputs import DecodeInputs
from lockstep_kernels.prepare.share import WHOLE, Share

_BLOCK = 1024  # table entries a program copies


@triton.jit
def _decode_inputs(
    index_ptr,
    last_ptr,
    lengths_ptr,
    alive_ptr,
    token_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    live_ptr,
    tables,
    slots,
    copies,
    WIDTHS: tl.constexpr,
    BLOCK_SIZES: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    i = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(index_ptr + i)
    live = tl.load(alive_ptr + row) != 0
    length = tl.where(live, tl.load(lengths_ptr + row), 1)
    if part == 0:
        tl.store(live_ptr + i, live)
        tl.store(token_ids_ptr + i, tl.where(live, tl.load(last_ptr + row), 0))
        tl.store(positions_ptr + i, length - 1)
        tl.store(seq_lens_ptr + i, length)
    for g in tl.static_range(len(WIDTHS)):
        table = tables[g] + row * WIDTHS[g]
        columns = part * BLOCK + tl.arange(0, BLOCK)
        held = (columns.to(tl.int64) * BLOCK_SIZES[g] < length) & (columns < WIDTHS[g])
        blocks = tl.load(table + columns, mask=held & live, other=0)
        tl.store(copies[g] + i.to(tl.int64) * WIDTHS[g] + columns, blocks, mask=held)
        if part == 0:
            column = tl.minimum((length - 1) // BLOCK_SIZES[g], WIDTHS[g] - 1)
            block = tl.load(table + column, mask=live, other=0)
            own = BLOCK_SIZES[g] // RANKS
            here = (length - 1) % BLOCK_SIZES[g] // own == RANK
            slot = block * own + (length - 1) % own
            tl.store(slots[g] + i, tl.where(live & here, slot, 0))


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
    pdl = dependent.supported(index.device)
    widths = tuple(table.shape[1] for table in tables)
    _decode_inputs[len(index), triton.cdiv(max(widths), _BLOCK)](
        index,
        last,
        lengths,
        alive,
        out.token_ids,
        out.positions,
        out.seq_lens,
        out.live,
        tables,
        out.slots,
        out.block_tables,
        WIDTHS=widths,
        BLOCK_SIZES=block_sizes,
        RANKS=share.ranks,
        RANK=share.rank,
        BLOCK=_BLOCK,
        PDL=pdl,
        launch_pdl=pdl,
    )
