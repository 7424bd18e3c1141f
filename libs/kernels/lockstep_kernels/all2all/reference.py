"""What an exchange between windows means, in plain torch: for ranks whose windows lie in one address space of the host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lockstep_kernels.all2all import Peers

TOKENS, RESULTS = 0, 1  # rows of `Window.flags`


def send_tokens(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, peers: Peers, capacity: int) -> None:
    """See the public function."""
    tokens, first = len(ids), peers.rank * capacity
    epoch = peers.state.counters[0] + 1
    for rank, window in enumerate(peers.windows):
        here = ids - rank * peers.local
        here = torch.where((here < 0) | (here >= peers.local) | (ids < 0), -1, here)
        wanted = (here >= 0).any(1).nonzero().squeeze(1)
        window.x[first + wanted] = x[wanted]
        window.ids[first : first + tokens] = here
        window.ids[first + tokens : first + capacity] = -1
        window.weights[first : first + tokens] = weights
        window.weights[first + tokens : first + capacity] = 0
    peers.state.counters[0] = epoch
    _tell(peers, TOKENS)


def wait(peers: Peers) -> None:
    """See the public function."""
    _wait(peers, TOKENS)


def send_results(results: torch.Tensor, peers: Peers, capacity: int) -> None:
    """See the public function."""
    chosen = peers.mine.ids.shape[1]
    ids = peers.mine.ids[: len(peers.windows) * capacity]
    for rank, window in enumerate(peers.windows):
        theirs, rows = (x[rank * capacity : (rank + 1) * capacity] for x in (ids, results))
        if peers.apart:
            pairs = (theirs >= 0).flatten().nonzero().squeeze(1)
            window.results[pairs] = rows.reshape(capacity * chosen, -1)[pairs]
        else:
            tokens = (theirs >= 0).any(1).nonzero().squeeze(1)
            window.results[peers.rank * capacity + tokens] = rows[tokens]
    _tell(peers, RESULTS)


def add_results(
    ids: torch.Tensor, plus: torch.Tensor, then: torch.Tensor | None, peers: Peers, capacity: int
) -> torch.Tensor:
    """See the public function."""
    _wait(peers, RESULTS)
    tokens, chosen = ids.shape
    total, results, token = plus.float(), peers.mine.results, torch.arange(tokens, device=ids.device)
    if peers.apart:
        parts = [(ids[:, j] >= 0, token * chosen + j) for j in range(chosen)]
    else:
        ranks = torch.where(ids < 0, -1, ids.div(peers.local, rounding_mode="floor"))
        parts = [((ranks == rank).any(1), rank * capacity + token) for rank in range(len(peers.windows))]
    for present, rows in parts:
        total = total + torch.where(present[:, None], results[rows].float(), 0.0)
    return (total if then is None else total + then.float()).to(plus.dtype)


def _tell(peers: Peers, kind: int) -> None:
    for window in peers.windows:
        window.flags[kind, peers.rank] = peers.state.counters[0]


def _wait(peers: Peers, kind: int) -> None:
    """Differences of numbers are right where they overflow, too."""
    end = time.monotonic_ns() + peers.limit
    while (late := (peers.mine.flags[kind] - peers.state.counters[0]) < 0).any():
        if time.monotonic_ns() > end or peers.state.failed.any():
            missing = sum(1 << rank for rank in late.nonzero().flatten().tolist())
            peers.state.failed.bitwise_or_(missing)
            peers.state.fault.bitwise_or_(missing)
            return
        time.sleep(0)
