"""Where the tokens of a step are and where their keys and values go, in plain torch."""

from __future__ import annotations

import torch


def window(lengths: torch.Tensor, steps: int) -> torch.Tensor:
    """[steps + 1, B] int64: position of the token that each row feeds in each step; entry i + 1 is the length after step i.

    lengths [B] int64 are tokens known before the first step; a step feeds the last one.
    """
    return (lengths - 1)[None, :] + torch.arange(steps + 1, device=lengths.device)[:, None]


def slots(tables: torch.Tensor, sequences: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """KV slot (block * block_size + offset) of each position in its sequence's table; the shape of `positions`.

    tables [B, W] int64; sequences (broadcasts against positions) int64 into B. Positions beyond the table take its last entry.
    """
    columns = (positions // block_size).clamp(max=tables.shape[1] - 1)
    return tables[sequences, columns] * block_size + positions % block_size
