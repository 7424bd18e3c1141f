"""Which sequences a pass serves and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """B sequences with the new tokens of each one after the other: query_lens[i] of them, the last of seq_lens[i] positions.

    Position p of sequence i lies in slot block_table[i, p // block_size] * block_size + p % block_size.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_table: torch.Tensor  # [B, W] int64
    block_size: int

    def __post_init__(self) -> None:
        if not len(self.query_lens) == len(self.seq_lens) == self.block_table.shape[0]:
            raise ValueError("query_lens, seq_lens and block_table disagree about the number of sequences")
        for new, total in zip(self.query_lens, self.seq_lens, strict=True):
            if not 0 < new <= total <= self.block_table.shape[1] * self.block_size:
                raise ValueError(f"a sequence of {total} positions with {new} new ones does not fit its block table")
