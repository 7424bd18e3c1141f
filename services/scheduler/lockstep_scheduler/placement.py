"""Which DP rank a waiting request goes to: a pure function of costs. Prefix affinity is a cost, not a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROW_COST = 64
"""Prompt tokens that one more running row on a rank is worth: a rank with many rows slows the step of all."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one rank would pay for the request."""

    rank: int
    fits: bool  # rows, blocks and watermark allow it now
    uncached_tokens: int  # prompt tokens that its cache does not cover
    rows: int  # rows in use, with those that this plan adds
    planned_tokens: int  # tokens that this plan prefills there already


def choose(candidates: Sequence[Candidate]) -> int | None:
    """The rank with the smallest cost among those where the request fits, the lowest number on ties; None if it fits nowhere.

    cost = uncached_tokens + planned_tokens + ROW_COST * rows: the work the request makes there, plus the work it waits for.
    """
    fitting = [c for c in candidates if c.fits]
    if not fitting:
        return None
    return min(fitting, key=lambda c: (c.uncached_tokens + c.planned_tokens + ROW_COST * c.rows, c.rank)).rank
