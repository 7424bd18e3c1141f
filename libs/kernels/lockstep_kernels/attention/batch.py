"""Which sequences a pass serves and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep_kernels.checks import check_shape


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """B sequences with the new tokens of each one after the other: query_lens[i] of them, the last of seq_lens[i] positions.

    Position p of sequence i lies in slot block_table[i, p // block_size] * block_size + p % block_size.
    A decode step on CUDA has `lens` and `max_seq_len`: one new token a sequence. There the host may leave query_lens and
    seq_lens empty, as a captured step must; a sequence of length 0 then stands for none, and its row becomes zeros.
    A captured prefill pass has `lens`, `query_starts` and `tokens`, and nothing on the host: sequence i has the new tokens
    query_starts[i] .. query_starts[i + 1], which may be none; rows from query_starts[B] up to `tokens` belong to no sequence
    and become zeros.

    Not `causal`: all seq_lens[i] positions are earlier than the new tokens, whose own are elsewhere, and each new token sees all
    of them. So a sequence's keys may lie in several caches, each of which is attended to on its own: `lockstep_kernels.merge` puts
    the results together. Such a part may hold no key at all (length 0), which holds for a single new token as well if `causal`.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_table: torch.Tensor  # [B, W] int64
    block_size: int
    lens: torch.Tensor | None = None  # [B] int64: seq_lens on the device
    max_seq_len: int = 0  # of a decode step the host's bound on `lens`: longer ones are cut
    query_starts: torch.Tensor | None = None  # [B + 1] int64
    tokens: int = 0
    causal: bool = True

    def __post_init__(self) -> None:
        sequences, width = self.block_table.shape
        if self.lens is not None:
            check_shape("lens", self.lens, (sequences,))
        if self.query_starts is not None:
            check_shape("query_starts", self.query_starts, (sequences + 1,))
            if self.lens is None or self.tokens <= 0 or self.query_lens or self.seq_lens:
                raise ValueError(
                    "a captured prefill pass has lens, query_starts and tokens, and no lengths on the host"
                )
            if not self.causal:
                raise ValueError("a captured prefill pass is causal")
            return
        if self.lens is not None:
            if not 0 < self.max_seq_len <= width * self.block_size:
                raise ValueError(f"sequences of up to {self.max_seq_len} positions do not fit their block tables")
            if any(new != 1 for new in self.query_lens):
                raise ValueError(f"a decode step has one new token a sequence, not {self.query_lens}")
        if self.lens is None or self.query_lens or self.seq_lens:
            self._check_lengths(sequences, width * self.block_size)

    def _check_lengths(self, sequences: int, room: int) -> None:
        if not len(self.query_lens) == len(self.seq_lens) == sequences:
            raise ValueError("query_lens, seq_lens and block_table disagree about the number of sequences")
        for new, total in zip(self.query_lens, self.seq_lens, strict=True):
            fits = new <= total or (new == 1 and total == 0) if self.causal else total >= 0
            if not (new > 0 and fits and total <= room):
                raise ValueError(f"a sequence of {total} positions with {new} new ones does not fit its block table")
