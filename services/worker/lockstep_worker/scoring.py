"""Log probabilities of prompts: what a prefill pass says about the tokens that were given, beside sampling the next one.

The hidden states of all tokens of a pass are small, their logits are not: these are made for some rows at a time, and of each only
a few numbers are kept. A token's scores do not depend on how its prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from lockstep_common.steps import PromptChunk, PromptScores
from lockstep_kernels import sampling as ops

_MOST_ROWS: Final = 1024  # that have logits at a time
_MOST_LOGITS: Final = 1 << 25
_LEAST_ROWS: Final = 16

I64 = npt.NDArray[np.int64]
LogitsOf = Callable[[torch.Tensor], torch.Tensor]  # [n, V] float32 of hidden states [n, d]


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens [starts[i], starts[i] + counts[i]) of rows[i], with the widths[i] best ones of each; m tokens in all."""

    rows: I64
    starts: I64
    counts: I64
    widths: I64
    targets: torch.Tensor  # [m] int64: these tokens, on the device


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of m tokens, on their way to the host. Each has as many best tokens as the widest of them asks for."""

    of: Scored
    logprobs: torch.Tensor  # [m] float32
    ranks: torch.Tensor  # [m] int64
    ids: torch.Tensor  # [m, widest] int64
    values: torch.Tensor  # [m, widest] float32

    def to_host(self) -> Scores:
        """Copies without waiting."""
        parts = (self.logprobs, self.ranks, self.ids, self.values)
        return Scores(self.of, *(part.to("cpu", non_blocking=True) for part in parts))

    def chunks(self) -> tuple[PromptChunk, ...]:
        """Row by row; the tensors must have arrived on the host."""
        logprobs, values = self.logprobs.numpy(), self.values.numpy()
        ranks, ids = self.ranks.numpy().astype(np.uint32), self.ids.numpy().astype(np.uint32)
        found, first = [], 0
        for row, start, count, width in zip(
            *(array.tolist() for array in (self.of.rows, self.of.starts, self.of.counts, self.of.widths)), strict=True
        ):
            part = slice(first, first + count)
            scores = PromptScores(logprobs[part], ranks[part], ids[part, :width].copy(), values[part, :width].copy())
            found.append(PromptChunk(row, start, scores))
            first += count
        return tuple(found)


def score(logits_of: LogitsOf, vocab_size: int, hidden: torch.Tensor, scored: Scored) -> Scores:
    """hidden [m, d]: the states from which the tokens `scored.targets` followed."""
    width = int(scored.widths.max(initial=0))
    rows = rows_at_once(vocab_size)
    parts = [
        _score(logits_of(some), targets, width)
        for some, targets in zip(torch.split(hidden, rows), torch.split(scored.targets, rows), strict=True)
    ]
    return Scores(
        scored, *(column[0] if len(column) == 1 else torch.cat(column) for column in zip(*parts, strict=True))
    )


def rehearse(logits_of: LogitsOf, vocab_size: int, hidden: torch.Tensor) -> None:
    """Takes the memory that scoring takes at most; hidden [n, d] with n > 0."""
    rows = rows_at_once(vocab_size)
    targets = torch.zeros(rows, dtype=torch.int64, device=hidden.device)
    _score(logits_of(hidden[:1].repeat(rows, 1)), targets, 1)


def rows_at_once(vocab_size: int) -> int:
    """How many hidden states get their logits at a time."""
    return min(_MOST_ROWS, max(_LEAST_ROWS, _MOST_LOGITS // vocab_size))


def _score(
    logits: torch.Tensor, targets: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1) + 1
    logprobs, ids, values = ops.logprobs(logits, targets, width)
    return logprobs, ranks, ids, values
