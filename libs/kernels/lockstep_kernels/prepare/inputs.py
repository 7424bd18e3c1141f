"""What a captured decode step reads: buffers that stay where they are and are filled anew for each step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NULL_BLOCK = 0  # rows that must not write write there


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Buffers of b sequences that feed one token each."""

    token_ids: torch.Tensor  # [b] int64
    positions: torch.Tensor  # [b] int64, of that token in its sequence
    seq_lens: torch.Tensor  # [b] int64, tokens of the sequence, that one included
    live: torch.Tensor  # [b] bool
    slots: tuple[torch.Tensor, ...]  # one [b] int64 a KV group: block * block_size + offset where the token's KV goes
    block_tables: tuple[torch.Tensor, ...]  # one [b, W] int64 a KV group; entries behind the sequence's end are stale

    @classmethod
    def empty(cls, size: int, tables: tuple[torch.Tensor, ...], device: torch.device) -> DecodeInputs:
        """Buffers of `size` sequences of rows whose block tables are `tables` [R, W]. Nothing lives in them, all is 0."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(size),
            positions=zeros(size),
            seq_lens=zeros(size),
            live=zeros(size, dtype=torch.bool),
            slots=tuple(zeros(size) for _ in tables),
            block_tables=tuple(zeros(size, table.shape[1]) for table in tables),
        )

    def narrow(self, size: int) -> DecodeInputs:
        """The first `size` sequences of these buffers."""
        return DecodeInputs(
            self.token_ids[:size],
            self.positions[:size],
            self.seq_lens[:size],
            self.live[:size],
            tuple(slots[:size] for slots in self.slots),
            tuple(table[:size] for table in self.block_tables),
        )
