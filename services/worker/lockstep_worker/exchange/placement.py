"""Which worker has which routed experts, and which of an expert's replicas a token goes to.

A layer has E logical experts, which the gate knows, in P physical slots, P / R on each of R ranks. An expert has one slot or
more; the tables say which. They are on the device and stay where they are, so that captured steps read the present ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from lockstep_common.errors import ConfigError, InvalidRequest
from lockstep_common.experts import initial_placement
from lockstep_common.steps import U32

_GOLDEN, _OTHER = 0x9E3779B1, 0x85EBCA6B  # odd numbers whose products spread neighbouring ones
_BITS: Final = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which share of the routed experts a worker was started with."""

    ranks: int = 1
    rank: int = 0
    redundant: int = 0  # slots beyond one for each expert
    backend: str = "all_to_all"  # see `lockstep_worker.exchange.backends`
    max_tokens: int = 0  # that a pass brings; of the largest pass
    max_rows: int = 0  # of the largest captured step; 0: none is captured

    @property
    def agreed(self) -> str:
        """What must be equal on all ranks."""
        return f"{self.ranks}+{self.redundant} by {self.backend}, {self.max_tokens}, {self.max_rows}"

    def placement(self, experts: int) -> U32:
        """The expert of each slot before anything is known of loads. ConfigError if slots cannot be shared out equally."""
        if self.redundant >= experts:
            raise ConfigError(
                f"{self.redundant} redundant experts of {experts}: expected fewer", param="num_redundant_experts"
            )
        return initial_placement(experts, experts + self.redundant, self.ranks)

    def here(self, placement: U32) -> U32:
        """The experts of this worker's slots."""
        return np.split(placement, self.ranks)[self.rank]


WHOLE: Final = Sharding()


class Placement:
    """The tables of a layer."""

    def __init__(self, experts: int, slots: U32, device: torch.device) -> None:
        """slots [P]: the expert of each; every expert has at least one."""
        self.experts = experts
        self.slots = slots
        replicas = len(slots) - experts + 1
        self._table = torch.empty(experts + 1, replicas, dtype=torch.int32, device=device)  # the last row is for id -1
        self._counts = torch.empty(experts + 1, dtype=torch.int64, device=device)
        self.set(slots)

    def check(self, slots: U32) -> None:
        """InvalidRequest unless `set` takes them: as many slots as now, and one at least for each expert."""
        if len(slots) != len(self.slots) or slots.max(initial=0) >= self.experts:
            raise InvalidRequest(f"{len(slots)} slots for {self.experts} experts do not replace {len(self.slots)}")
        if missing := sorted(set(range(self.experts)) - set(slots.tolist())):
            raise InvalidRequest(f"experts {missing} would have no slot")

    def set(self, slots: U32) -> None:
        """From now on slot p holds expert slots[p]."""
        self.check(slots)
        counts = np.bincount(slots, minlength=self.experts)
        order = np.argsort(slots, kind="stable")
        table = np.full(self._table.shape, -1, np.int32)
        column = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
        table[slots[order], column] = order
        self.slots = slots
        self._table.copy_(torch.from_numpy(table))
        self._counts.copy_(torch.from_numpy(np.append(counts, 1)))

    def choose(self, ids: torch.Tensor, spread: torch.Tensor | None) -> torch.Tensor:
        """Slots int32 [T, k] of experts ids [T, k] (-1: none); spread [T] from `spread_of`, None: the first replica."""
        index = ids.long()
        if self._table.shape[1] == 1 or spread is None:
            return self._table[index, 0]
        return self._table[index, spread[:, None] % self._counts[index]]


def spread_of(positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 [T], not negative: what chooses among replicas. Neighbours get unlike numbers.

    A function of a token and its position only: the same on all ranks that know the token, and after a preemption, so the
    bits of a sequence do not depend on its row or its batch.
    """
    mixed = positions * _GOLDEN + token_ids * _OTHER & _BITS
    return (mixed ^ mixed >> 15) * _GOLDEN >> 7 & _BITS
