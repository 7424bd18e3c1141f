"""The way of tokens to experts on other workers, and back.

    arrived = yield from exchange.dispatch("experts 3", x, ids, weights)    # pauses while rows travel
    results = ...                                                           # what the experts here make of the arrived rows
    finish = exchange.combine("experts 3", results, arrived.handle)
    ...                                                                     # what runs while results travel
    y = finish(plus, then)

    Local         one rank: nothing travels
    AllToAll      the workers' own communicator: gloo, or NCCL
    Symmetric     ranks of one machine write into each other's memory; captured steps, the rest as AllToAll
    DeepEp        DeepEP's kernels, where they are installed

All ranks make the same calls in the same order, those without a token too. The sum of a token's results at one rank is made
there, and the token's own rank adds the sums, in the order of ranks; or, where bits must not depend on places, it adds them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep_worker.exchange.handle import DEDUPLICATED, EXPANDED, Dispatched, Handle, Layout, expanded
from lockstep_worker.overlap import Stages

__all__ = ["DEDUPLICATED", "EXPANDED", "Arrived", "Exchange", "Finish", "Handle", "Layout", "arrived_as"]


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a rank's experts are to work on, see `Layout`. Deduplicated: ids int32 and weights float32 [N, k]; expanded: weights
    [M], and no ids, as the handle says where each slot's rows lie."""

    x: torch.Tensor  # [N, d] or [M, d]
    ids: torch.Tensor | None
    weights: torch.Tensor
    handle: Handle

    def slots(self) -> torch.Tensor:
        """int32 [M]: the local slot of each expanded row; alignment 1, so that there are no others."""
        rows = torch.arange(len(self.x), dtype=torch.int32, device=self.x.device)
        return torch.searchsorted(self.handle.psum_num_recv_tokens_per_expert, rows, right=True, out_int32=True)


def arrived_as(rows: torch.Tensor, weights: torch.Tensor, handle: Dispatched) -> Arrived:
    """Rows [N, d] as they came, with weights [N, k], in the layout of the handle."""
    if not handle.layout.expand:
        return Arrived(rows, handle.recv_topk_idx, weights, handle)
    rows, factors = expanded(rows, weights, handle)
    return Arrived(rows, None, factors, handle)


class Finish(Protocol):
    """What `combine` returns; called once."""

    def __call__(self, plus: torch.Tensor, then: torch.Tensor | None = None) -> torch.Tensor:
        """plus [T, d], plus the token's results, plus `then` [T, d]: added in float32 in this order; like plus."""
        ...


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
    ) -> Stages[Arrived]:
        """Sends x [T, d] to where its slots ids int32 [T, k] are (-1: none), with weights float32 [T, k].

        Pauses while something travels: equally often on all ranks, whatever they bring. Gives what has come from everybody.

        capacity: the most tokens that any rank brings, known to all; then no size depends on data, and nothing waits for the
        device, as a captured step needs. 0: the ranks tell each other how many rows come. ValueError if T is above it.
        """
        ...

    def combine(self, name: str, rows: torch.Tensor, handle: Handle, *, apart: bool = False) -> Finish:
        """Begins to send back what became of the arrived rows, weighted: rows like `Arrived.x`.

        apart: a token's results come back one by one and are added in the order of its slots, wherever those are: more travels,
        and places do not change bits. Expanded rows are given as they are, deduplicated ones as [N, k, d], one for each slot
        (undefined where there is none). ValueError if the backend cannot.
        """
        ...

    def close(self) -> None:
        """Gives back what it holds between calls."""
        ...
