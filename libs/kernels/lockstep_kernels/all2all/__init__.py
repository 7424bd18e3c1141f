"""Rows that ranks write straight into each other's memory: tokens to experts elsewhere, and results back.

Each of R ranks has a `Window` in memory that all ranks' kernels reach. An exchange is, on all ranks in this order:

    send_tokens(x, ids, weights, peers, capacity)       writes rows into the windows of the ranks that have experts for them
    wait(peers)                                         until the rows of all ranks are in this rank's window
    send_results(results, peers, capacity)              writes what became of them into the windows that they came from
    add_results(ids, plus, then, peers, capacity)       waits for all ranks' results, and adds a token's

Whoever has written tells each rank by a flag: the number of the exchange, released after the rows; a rank waits until all flags have
that number. Numbers are counted on the device, so a captured exchange may be replayed. Nobody clears anything: a rank's results
of an exchange say that it has read what it was sent, and its tokens say that it has added what it got back in the one before. So
tokens of an exchange may be sent once the one before *in the same windows* is added; two exchanges that overlap take two sets.

A wait ends after `Peers.limit` without what it was for; then `State.fault` says who was missing, results mean nothing, and no later
wait lasts. Float32 sums in a fixed order: a token's bits depend neither on time nor on where its rows lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from lockstep_kernels.all2all import reference
from lockstep_kernels.checks import check_shape

__all__ = ["Peers", "State", "Window", "add_results", "cut", "send_results", "send_tokens", "wait", "window_bytes"]

MOST_RANKS: Final = 31  # bits of `State.fault`
_ALIGNED: Final = 256  # bytes at which parts of a window begin


@dataclass(frozen=True, slots=True)
class Window:
    """What others write at one rank. C: tokens that a rank brings at most; k: slots of a token; d: width."""

    x: torch.Tensor  # fp [R * C, d] tokens, by rank they come from; undefined where this rank has no expert of theirs
    ids: torch.Tensor  # int32 [R * C, k] their slots here, -1: elsewhere or none
    weights: torch.Tensor  # float32 [R * C, k]
    results: torch.Tensor  # fp [R * C, d] by rank they come from; or one for each slot, [C * k, d]
    flags: torch.Tensor  # int32 [2, R]: the exchange whose tokens, and whose results, each rank has written


@dataclass(frozen=True, slots=True)
class State:
    """What one rank remembers of a set of windows, on its device."""

    counters: torch.Tensor  # int32 [3]: the present exchange; programs that have sent their tokens, and their results
    failed: torch.Tensor  # int32 [1]: bits of ranks that a wait missed; one for all sets of windows
    fault: torch.Tensor  # int32 [1]: the same where the host reads it without waiting: in page-locked memory


@dataclass(frozen=True, slots=True)
class Peers:
    """A set of windows, seen from one rank. `local`: expert slots of a rank; `apart`: a result for each slot of a token comes
    back, added in the order of slots; else one for each rank, added in the order of ranks. `limit`: ns that a wait lasts."""

    windows: tuple[Window, ...]
    rank: int
    local: int
    apart: bool
    state: State
    limit: int

    @property
    def mine(self) -> Window:
        return self.windows[self.rank]


def window_bytes(ranks: int, capacity: int, hidden: int, chosen: int, dtype: torch.dtype, *, apart: bool) -> int:
    """Memory that `cut` needs."""
    return sum(_padded(nbytes) for _, _, nbytes in _parts(ranks, capacity, hidden, chosen, dtype, apart))


def cut(
    memory: torch.Tensor, ranks: int, capacity: int, hidden: int, chosen: int, dtype: torch.dtype, *, apart: bool
) -> Window:
    """A rank's window in memory uint8 [window_bytes], whose flags must be 0 before anybody sends."""
    parts, start = [], 0
    for shape, kind, nbytes in _parts(ranks, capacity, hidden, chosen, dtype, apart):
        parts.append(memory[start : start + nbytes].view(kind).view(shape))
        start += _padded(nbytes)
    return Window(*parts)


def send_tokens(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, peers: Peers, capacity: int) -> None:
    """Begins an exchange: x [T, d] of the windows' dtype, slots ids int32 [T, k] (-1: none), weights float32 [T, k].

    `capacity` >= T: the most that any rank brings, the same on all. ValueError if operands do not fit.
    """
    tokens, (hidden, chosen) = len(ids), (peers.mine.x.shape[1], peers.mine.ids.shape[1])
    check_shape("x", x, (tokens, hidden))
    check_shape("ids", ids, (tokens, chosen))
    check_shape("weights", weights, (tokens, chosen))
    if x.dtype != peers.mine.x.dtype or ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError(f"x {x.dtype}, ids {ids.dtype}, weights {weights.dtype} are not what windows hold")
    if not tokens <= capacity <= len(peers.mine.x) // len(peers.windows):
        raise ValueError(f"{tokens} tokens with a capacity of {capacity} do not fit")
    if x.is_cuda:
        from lockstep_kernels.all2all import kernel

        return kernel.send_tokens(x.contiguous(), ids.contiguous(), weights.contiguous(), peers, capacity)
    return reference.send_tokens(x, ids, weights, peers, capacity)


def wait(peers: Peers) -> None:
    """Until the tokens of all ranks are in this rank's window: its first R * capacity rows, capacity of each rank."""
    if peers.mine.x.is_cuda:
        from lockstep_kernels.all2all import kernel

        return kernel.wait(peers)
    return reference.wait(peers)


def send_results(results: torch.Tensor, peers: Peers, capacity: int) -> None:
    """results [R * capacity, d] of the rows in the window, or with `apart` [R * capacity, k, d]; only where there are slots."""
    rows, (hidden, chosen) = len(peers.windows) * capacity, (peers.mine.x.shape[1], peers.mine.ids.shape[1])
    check_shape("results", results, (rows, chosen, hidden) if peers.apart else (rows, hidden))
    if results.dtype != peers.mine.x.dtype or not results.is_contiguous():
        raise ValueError(f"results must be contiguous and {peers.mine.x.dtype}, they are {results.dtype}")
    if results.is_cuda:
        from lockstep_kernels.all2all import kernel

        return kernel.send_results(results, peers, capacity)
    return reference.send_results(results, peers, capacity)


def add_results(
    ids: torch.Tensor, plus: torch.Tensor, then: torch.Tensor | None, peers: Peers, capacity: int
) -> torch.Tensor:
    """Ends an exchange: plus [T, d], the results of tokens that were sent with ids [T, k], `then` [T, d], added in this order in
    float32 and rounded once: new, of plus's dtype, which is the windows'."""
    check_shape("plus", plus, (len(ids), peers.mine.x.shape[1]))
    for name, x in (("plus", plus), ("then", then)):
        if x is not None and (x.dtype != peers.mine.x.dtype or not x.is_contiguous()):
            raise ValueError(f"{name} must be contiguous and {peers.mine.x.dtype}, it is {x.dtype}")
    if then is not None:
        check_shape("then", then, tuple(plus.shape))
    if plus.is_cuda:
        from lockstep_kernels.all2all import kernel

        return kernel.add_results(ids.contiguous(), plus, then, peers, capacity)
    return reference.add_results(ids, plus, then, peers, capacity)


def _parts(
    ranks: int, capacity: int, hidden: int, chosen: int, dtype: torch.dtype, apart: bool
) -> list[tuple[tuple[int, int], torch.dtype, int]]:
    """Shape, dtype and bytes of a window's parts, in the order of its fields."""
    rows = ranks * capacity
    shapes = (
        ((rows, hidden), dtype),
        ((rows, chosen), torch.int32),
        ((rows, chosen), torch.float32),
        ((capacity * chosen if apart else rows, hidden), dtype),
        ((2, ranks), torch.int32),
    )
    return [(shape, kind, math.prod(shape) * kind.itemsize) for shape, kind in shapes]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
