"""Where the tokens of a step are and where their keys and values go, in plain torch."""

from __future__ import annotations

import torch

from lockstep_kernels.prepare.inputs import NULL_BLOCK, DecodeInputs
from lockstep_kernels.prepare.share import WHOLE, Share


def window(lengths: torch.Tensor, steps: int) -> torch.Tensor:
    """[steps + 1, B] int64: position of the token that each row feeds in each step; entry i + 1 is the length after step i.

    lengths [B] int64 are tokens known before the first step; a step feeds the last one.
    """
    return (lengths - 1)[None, :] + torch.arange(steps + 1, device=lengths.device)[:, None]


def slots(
    tables: torch.Tensor, sequences: torch.Tensor, positions: torch.Tensor, block_size: int, share: Share = WHOLE
) -> torch.Tensor:
    """KV slot of each position in its sequence's table (see `Share`); the shape of `positions`. 0: it is kept elsewhere.

    tables [B, W] int64; sequences (broadcasts against positions) int64 into B; block_size: tokens of a block on all ranks.
    Positions beyond the table take its last entry.
    """
    columns = (positions // block_size).clamp(max=tables.shape[1] - 1)
    if share.ranks == 1:
        return tables[sequences, columns] * block_size + positions % block_size
    own = block_size // share.ranks
    found = tables[sequences, columns] * own + positions % own
    return found.where(share.holds(positions, block_size), NULL_BLOCK)


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
    live = alive[index]
    lengths = torch.where(live, lengths[index], 1)
    out.live.copy_(live)
    out.token_ids.copy_(torch.where(live, last[index], 0))
    out.positions.copy_(lengths - 1)
    out.seq_lens.copy_(lengths)
    for table, size, copied, where in zip(tables, block_sizes, out.block_tables, out.slots, strict=True):
        rows = torch.where(live[:, None], table[index], NULL_BLOCK)
        columns = torch.arange(table.shape[1], device=table.device)
        copied.copy_(torch.where(columns * size < lengths[:, None], rows, copied))
        sequences = torch.arange(len(index), device=index.device)
        where.copy_(torch.where(live, slots(rows, sequences, lengths - 1, size, share), NULL_BLOCK))
