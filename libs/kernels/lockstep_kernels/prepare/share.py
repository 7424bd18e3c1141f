"""Which tokens of a sequence a rank keeps where several ranks keep it together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Integers = TypeVar("Integers", torch.Tensor, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Share:
    """Of each block of a sequence's tokens the part number `rank` of `ranks` equal ones.

    With blocks of `block_size` tokens and parts of own = block_size / ranks, token p belongs to rank p % block_size // own, and
    lies there in slot block * own + p % own: what a rank keeps of a sequence is again a paged sequence, of the same blocks.
    """

    ranks: int = 1
    rank: int = 0

    def holds(self, positions: Integers, block_size: int) -> Integers:
        """Which of these positions (int64) are kept here: bool, of the same shape."""
        here: Integers = positions % block_size // (block_size // self.ranks) == self.rank
        return here

    def held(self, lens: Integers, block_size: int) -> Integers:
        """How many of the first `lens` tokens (int64) of a sequence are kept here."""
        own = block_size // self.ranks
        count: Integers = lens // block_size * own + (lens % block_size - self.rank * own).clip(0, own)
        return count


WHOLE: Final = Share()
