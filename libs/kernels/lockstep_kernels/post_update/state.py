"""What a captured step changes of the rows it stepped."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowState:
    """Tensors with one entry for each of R rows."""

    last: torch.Tensor  # [R] int64, last token
    lengths: torch.Tensor  # [R] int64, tokens known
    alive: torch.Tensor  # [R] bool
    limits: torch.Tensor  # [R] int64, length at which a row ends
    history: torch.Tensor  # [R, L] int64, all tokens known
    stop_ids: torch.Tensor  # [R, s] int64; pad: repeat one, or -1
    counts: torch.Tensor | None = None  # [R, V] int32, times that each token is in the output; None: nobody asks
