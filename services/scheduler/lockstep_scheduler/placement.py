"""What prompts cost, which DP rank a waiting one goes to, and how much of them one pass computes. Pure functions.

Work is counted in tokens: one is the time of a prompt token's way through the model without attention. Attention costs a token
more for each `span` pairs of a query and a key, so that q tokens behind a prefix of s come to

    work(s, q) = q + (q s + q (q + 1) / 2) / span

All ranks of a group take a pass together, and it lasts as long as the rank with the most work: equal numbers of tokens are not
enough, as behind a long prefix a token costs several times as much.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

ROW_COST = 64.0
"""Tokens of work that one more running row on a rank is worth: a rank with many rows slows the step of all, for as long as they
run. As is the next one, it is the fitted cost of a decode step over that of a prompt token, for some 200 steps."""

KV_COST = 0.1
"""Tokens of work that one more token in a rank's KV cache is worth: each step reads it. More evens decode steps out little more, and
lets prompts meet on one rank that could be computed side by side."""

PASS_COST = 512.0
"""Tokens of work that one more pass costs, however little is in it: weights are read, kernels are launched."""


def work(start: int, count: int, span: float) -> float:
    """Tokens of work of `count` prompt tokens behind `start` others."""
    return count + count * (start + (count + 1) / 2) / span


def affordable(start: int, work_left: float, span: float) -> int:
    """The most tokens behind `start` others whose work is at most `work_left`; 0 if not even one is."""
    if work_left <= 0:
        return 0
    slope = 1 + (start + 0.5) / span  # of the first token
    count = int((math.sqrt(slope * slope + 2 * work_left / span) - slope) * span)
    while work(start, count + 1, span) <= work_left:  # the root may be off by a rounding
        count += 1
    while count and work(start, count, span) > work_left:
        count -= 1
    return count


def choose(fits: Bools, cost: Floats) -> int | None:
    """The rank with the smallest cost among those where the request fits, the lowest number on ties; None if it fits nowhere.

    The cost is the work that the request makes there, with what the rank's cache has of it taken away, and what it waits for
    or slows: the work of prompts that are there already, ROW_COST a row, KV_COST a token that is kept. So a cached prefix
    attracts for as much as computing it again would cost, and no longer once the rank is busier by more than that.
    """
    best = int(np.argmin(np.where(fits, cost, np.inf)))
    return best if fits[best] else None


def level(planned: Floats, full: float) -> float:
    """The work to which ranks are cut in one pass, at least `full`: that at which the ranks' time is best used.

    A pass that is cut at c lasts c + PASS_COST on all ranks, of which min(planned, c) on each is work. Who has much to do behind a
    long prefix would let all others wait; cut, it computes its prompt in more passes, which the others fill. Where the others
    have little, nothing is gained by that, and it is not cut. `full`, the work of a pass of short prompts, is never cut.
    """
    limits = np.unique(np.append(planned[planned > full], full))
    done = np.minimum(planned[:, None], limits).sum(axis=0)
    return float(limits[int(np.argmax(done / (limits + PASS_COST)))])
