"""The way of tokens to experts on other workers, and back.

    arrived = exchange.dispatch("experts 3", x, ids, weights)
    results = ...                                             # what the experts here make of the arrived rows
    finish = exchange.combine("experts 3", results, arrived.handle)
    ...                                                       # what runs while results travel
    y = finish(plus)

    Local         one rank: nothing travels
    AllToAll      the workers' own communicator: gloo, or NCCL
    DeepEp        DeepEP's kernels, where they are installed

All ranks make the same calls in the same order, those without a token too. The sum of a token's results at one rank is made
there; the token's own rank adds the sums, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep_worker.exchange.handle import DEDUPLICATED, Handle, Layout

__all__ = ["DEDUPLICATED", "Arrived", "Exchange", "Handle", "Layout"]


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a rank's experts are to work on, see `Layout`. Deduplicated: ids int32 and weights float32 [N, k]; expanded: weights
    [M], and no ids, as the handle says where each slot's rows lie."""

    x: torch.Tensor  # [N, d] or [M, d]
    ids: torch.Tensor | None
    weights: torch.Tensor
    handle: Handle


class Exchange(Protocol):
    """Between R ranks with P / R expert slots each."""

    def dispatch(
        self,
        name: str,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        capacity: int = 0,
        layout: Layout = DEDUPLICATED,
    ) -> Arrived:
        """Sends x [T, d] to where its slots ids int32 [T, k] are (-1: none), with weights float32 [T, k].

        capacity: the most tokens that any rank brings, known to all; then no size depends on data, and nothing waits for the
        device, as a captured step needs. 0: the ranks tell each other how many rows come. ValueError if T is above it.
        """
        ...

    def combine(self, name: str, rows: torch.Tensor, handle: Handle) -> Callable[[torch.Tensor], torch.Tensor]:
        """Begins to send back what became of the arrived rows, weighted: rows like `Arrived.x`.

        Returns a call that takes plus [T, d] and gives plus + the sum of each token's rows, like plus.
        """
        ...

    def close(self) -> None:
        """Gives back what it holds between calls."""
        ...
