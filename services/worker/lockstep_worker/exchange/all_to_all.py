"""Dispatch and combine over the communicator of all workers: gloo or NCCL.

Two ways. With counts: the ranks tell each other how many rows come, then rows go exactly where they must; the host has to know
the counts. With a capacity: every rank gets the tokens of all ranks, and takes those that its experts are for. No size depends
on data, so a CUDA graph holds it, and nothing can overflow; the bytes are those of `capacity` rows from each rank to each, and
no fewer would do, as all tokens may choose one rank's experts.
"""

from __future__ import annotations

from typing import Final

import torch

from lockstep_kernels.gather_sum import gather_sum
from lockstep_worker.collectives import Communicator
from lockstep_worker.exchange import DEDUPLICATED, Arrived, Finish, Handle, Layout, arrived_as
from lockstep_worker.exchange.handle import Dispatched, Traffic, added, ranks_of
from lockstep_worker.overlap import Stages

_UNIT: Final = 16  # a row on the way is a multiple of so many bytes


class AllToAll:
    """See `lockstep_worker.exchange.Exchange`."""

    def __init__(self, world: Communicator, slots: int) -> None:
        """`slots` over all ranks, a multiple of their number."""
        if slots % world.size:
            raise ValueError(f"{slots} expert slots cannot be shared out among {world.size} ranks")
        self._world = world
        self._slots = slots
        self._local = slots // world.size

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
        if capacity:
            return self._with_capacity(name, x, ids, weights, layout, capacity)
        return self._with_counts(name, x, ids, weights, layout)

    def again(self, name: str, x: torch.Tensor, arrived: Arrived) -> Arrived:
        """Sends other rows x [T, d] the way that a dispatch with counts and of the deduplicated layout went."""
        handle = arrived.handle
        assert isinstance(handle, Dispatched)
        traffic = handle.traffic
        if traffic is None or handle.do_expand:
            raise ValueError("only a deduplicated dispatch with counts can be sent again")
        rows = self._world.all_to_all(f"{name}, rows", x[traffic.sources], traffic.sent, traffic.received)
        return Arrived(rows, arrived.ids, arrived.weights, handle)

    def combine(self, name: str, rows: torch.Tensor, handle: Handle, *, apart: bool = False) -> Finish:
        assert isinstance(handle, Dispatched)
        traffic, hidden = handle.traffic, rows.shape[-1]
        if traffic is None:
            if handle.do_expand:
                index = handle.slots.view(-1, 1) if apart else handle.slots
                rows = gather_sum(rows, index)
            coming = self._world.swap_later(f"{name}, results", rows.view(self._world.size, -1, hidden))
        elif apart:
            pairs = handle.slots.flatten()[handle.pairs] if handle.do_expand else handle.pairs
            rows = rows.view(-1, hidden)[pairs.long()]
            coming = self._world.all_to_all_later(f"{name}, results", rows, traffic.received_pairs, traffic.sent_pairs)
        else:
            rows = gather_sum(rows, handle.slots) if handle.do_expand else rows
            coming = self._world.all_to_all_later(f"{name}, results", rows, traffic.received, traffic.sent)
        index = handle.pair_returns if apart else handle.returns

        def finish(plus: torch.Tensor, then: torch.Tensor | None = None) -> torch.Tensor:
            return added(coming().view(-1, hidden), index, plus, then)

        return finish

    def close(self) -> None:
        pass  # the communicator is the group's

    def _with_counts(
        self, name: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layout: Layout
    ) -> Stages[Arrived]:
        tokens, size = len(ids), self._world.size
        ranks, token = ranks_of(ids, self._local), torch.arange(tokens, device=ids.device)
        sends = torch.zeros(size + 1, tokens, dtype=torch.bool, device=ids.device)
        sends[ranks.T, token] = sends.new_ones(())  # a scalar of the host would make it wait
        sends = sends[:-1]  # without what goes nowhere
        places = sends.flatten().cumsum(0).view(size, tokens) - 1
        returns = torch.where(ranks < 0, -1, places[ranks.clamp(min=0), token[:, None]])
        pairs = (
            ids.long().div(self._local, rounding_mode="floor")[:, :, None] == torch.arange(size, device=ids.device)
        ).sum((0, 1))
        counts = torch.stack((sends.sum(1), pairs, torch.full_like(pairs, tokens)), 1)
        counted = self._world.swap_later(f"{name}, counts", counts)
        yield
        theirs = counted()
        numbers = torch.cat((counts[:, :2], theirs), 1).T.tolist()
        sent, sent_pairs, received, received_pairs, brought = (tuple(column) for column in numbers)
        order = (~sends.flatten()).to(torch.uint8).argsort(stable=True)[: sum(sent)]
        sources = order % max(1, tokens)
        packed = _pack(x[sources], ids[sources], weights[sources], sources)
        coming = self._world.all_to_all_later(f"{name}, rows", packed, sent, received)
        yield
        rows, here, factors, arrived = self._unpacked(coming(), x, ids)
        came = theirs[:, 0].int()
        traffic = Traffic(sources, arrived, came, returns.int(), sent, received, sent_pairs, received_pairs)
        handle = Dispatched(self._slots, size, max(brought), layout, ids, here, traffic)
        return arrived_as(rows, factors, handle)

    def _with_capacity(
        self, name: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layout: Layout, capacity: int
    ) -> Stages[Arrived]:
        tokens = len(ids)
        if tokens > capacity:
            raise ValueError(f"{name}: {tokens} tokens, but all ranks agreed on at most {capacity}")
        token = torch.arange(capacity, dtype=torch.int32, device=ids.device)
        missing, pad = (0, 0, 0, capacity - tokens), torch.nn.functional.pad
        packed = _pack(pad(x, missing), pad(ids, missing, value=-1), pad(weights, missing), token)
        coming = self._world.all_gather_later(f"{name}, rows", packed)
        yield
        rows, here, factors, _ = self._unpacked(coming().flatten(0, 1), x, ids)
        return arrived_as(rows, factors, Dispatched(self._slots, self._world.size, capacity, layout, ids, here))

    def _unpacked(
        self, packed: torch.Tensor, x: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows that came like x [T, d], their local slots like ids [T, k], weights, and tokens' numbers."""
        rows, slots, weights, tokens = _unpack(packed, x.shape[1], ids.shape[1], x.dtype)
        first = self._world.rank * self._local
        here = torch.where((slots < first) | (slots >= first + self._local), -1, slots - first)
        return rows, here, weights, tokens


def bytes_held(
    ranks: int, tokens: int, hidden: int, chosen: int, dtype: torch.dtype, *, captured: bool, apart: bool
) -> int:
    """Bytes of a dispatch and its combine, beside what they are given and what experts would take of this rank's own tokens, if
    every rank brings so many tokens.

    captured: of the way with a capacity of so many. Else, of the way with counts, if experts are equally busy: a rank whose
    experts are busier gets more rows, up to those of all ranks. apart: a token's results come back one by one.
    """
    row = hidden * dtype.itemsize
    packed = _width(row, chosen)
    if captured:  # packed once; arrived, packed and unpacked; what experts make of them; what returns
        results = ranks * tokens * (chosen if apart else 1)
        return tokens * packed + ranks * tokens * (packed + row + 8 * chosen) + 2 * results * row
    rows = tokens * min(ranks, chosen)
    results = tokens * chosen if apart else rows  # in the order in which they are sent, and when they return
    return rows * (packed + row) + rows * (packed + row + 8 * chosen) + 2 * results * row


def _width(row: int, chosen: int) -> int:
    """Bytes of a row on the way: `row` bytes of x, then slots, weights, and the token's number."""
    return -(-(row + 8 * chosen + 4) // _UNIT) * _UNIT


def _pack(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """uint8 [n, width] of x [n, d], ids and weights [n, k], tokens [n]: one thing to send."""
    row, chosen = x.shape[1] * x.dtype.itemsize, ids.shape[1]
    packed = torch.zeros(len(x), _width(row, chosen), dtype=torch.uint8, device=x.device)
    packed[:, :row].view(x.dtype).copy_(x)
    numbers = packed[:, row : row + 8 * chosen + 4].view(torch.int32)
    numbers[:, :chosen] = ids
    numbers[:, chosen : 2 * chosen] = weights.float().view(torch.int32)
    numbers[:, -1] = tokens
    return packed


def _unpack(
    packed: torch.Tensor, hidden: int, chosen: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `_pack` was given."""
    row = hidden * dtype.itemsize
    numbers = packed[:, row : row + 8 * chosen + 4].view(torch.int32)
    weights = numbers[:, chosen : 2 * chosen].contiguous().view(torch.float32)
    return packed[:, :row].view(dtype).contiguous(), numbers[:, :chosen].contiguous(), weights, numbers[:, -1]
