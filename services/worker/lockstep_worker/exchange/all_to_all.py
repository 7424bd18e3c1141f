"""Dispatch and combine over the communicator of all workers: gloo or NCCL.

Two ways. With counts: the ranks tell each other how many rows come, then rows go exactly where they must; the host has to know
the counts. With a capacity: every rank gets the tokens of all ranks, and takes those that its experts are for. No size depends
on data, so a CUDA graph holds it, and nothing can overflow; the bytes are those of `capacity` rows from each rank to each, and
no fewer would do, as all tokens may choose one rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from lockstep_kernels.gather_sum import gather_sum
from lockstep_worker.collectives import Communicator
from lockstep_worker.exchange import DEDUPLICATED, Arrived, Handle, Layout
from lockstep_worker.exchange.handle import Dispatched, expanded

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
    ) -> Arrived:
        if capacity:
            return self._with_capacity(name, x, ids, weights, layout, capacity)
        return self._with_counts(name, x, ids, weights, layout)

    def again(self, name: str, x: torch.Tensor, arrived: Arrived) -> Arrived:
        """Sends other rows x [T, d] the way that a dispatch with counts and of the deduplicated layout went."""
        handle = arrived.handle
        assert isinstance(handle, Dispatched)
        if handle.sources is None or handle.do_expand:
            raise ValueError("only a deduplicated dispatch with counts can be sent again")
        rows = self._world.all_to_all(f"{name}, rows", x[handle.sources], handle.sent, handle.received)
        return Arrived(rows, arrived.ids, arrived.weights, handle)

    def combine(self, name: str, rows: torch.Tensor, handle: Handle) -> Callable[[torch.Tensor], torch.Tensor]:
        assert isinstance(handle, Dispatched)
        if handle.do_expand:
            rows = gather_sum(rows, handle.slots)
        if handle.sources is not None:
            coming = self._world.all_to_all_later(f"{name}, results", rows, handle.received, handle.sent)
        else:
            coming = self._world.swap_later(f"{name}, results", rows.view(self._world.size, -1, rows.shape[1]))

        def finish(plus: torch.Tensor) -> torch.Tensor:
            back = coming().view(-1, rows.shape[1])
            return gather_sum(back, handle.returns, plus=plus.to(rows.dtype)).to(plus.dtype)

        return finish

    def close(self) -> None:
        pass  # the communicator is the group's

    def _with_counts(
        self, name: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layout: Layout
    ) -> Arrived:
        tokens, size = len(ids), self._world.size
        ranks, token = self._ranks(ids), torch.arange(tokens, device=ids.device)
        sends = torch.zeros(size + 1, tokens, dtype=torch.bool, device=ids.device)
        sends[ranks.T, token] = True
        sends = sends[:-1]  # without what goes nowhere
        places = sends.flatten().cumsum(0).view(size, tokens) - 1
        returns = torch.where(ranks < 0, -1, places[ranks.clamp(min=0), token[:, None]])
        counts = torch.stack((sends.sum(1), torch.full((size,), tokens, device=ids.device)), 1)
        theirs = self._world.swap(f"{name}, counts", counts)
        sent, received, brought = torch.stack((counts[:, 0], theirs[:, 0], theirs[:, 1])).tolist()
        order = (~sends.flatten()).to(torch.uint8).argsort(stable=True)[: sum(sent)]
        sources = order % max(1, tokens)
        rows = self._world.all_to_all(
            f"{name}, rows", _pack(x[sources], ids[sources], weights[sources], sources), sent, received
        )
        return self._arrived(
            x, ids, rows, layout, theirs[:, 0], returns, max(brought), sources, tuple(sent), tuple(received)
        )

    def _with_capacity(
        self, name: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layout: Layout, capacity: int
    ) -> Arrived:
        tokens = len(ids)
        if tokens > capacity:
            raise ValueError(f"{name}: {tokens} tokens, but all ranks agreed on at most {capacity}")
        ranks, token = self._ranks(ids), torch.arange(capacity, device=ids.device)
        returns = torch.where(ranks < 0, -1, ranks * capacity + token[:tokens, None])
        missing, pad = (0, 0, 0, capacity - tokens), torch.nn.functional.pad
        packed = _pack(pad(x, missing), pad(ids, missing, value=-1), pad(weights, missing), token)
        rows = self._world.all_gather(f"{name}, rows", packed).flatten(0, 1)
        came = torch.full((self._world.size,), capacity, device=ids.device)
        return self._arrived(x, ids, rows, layout, came, returns, capacity)

    def _arrived(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        packed: torch.Tensor,
        layout: Layout,
        came: torch.Tensor,
        returns: torch.Tensor,
        most: int,
        sources: torch.Tensor | None = None,
        sent: tuple[int, ...] = (),
        received: tuple[int, ...] = (),
    ) -> Arrived:
        """From the packed rows that came; x and ids are what this rank brought."""
        rows, slots, weights, tokens = _unpack(packed, x.shape[1], ids.shape[1], x.dtype)
        first = self._world.rank * self._local
        here = torch.where((slots < first) | (slots >= first + self._local), -1, slots - first)
        handle = Dispatched(
            self._slots,
            self._world.size,
            most,
            layout,
            ids,
            here,
            tokens,
            came.int(),
            returns.int(),
            sources,
            sent,
            received,
        )
        if not layout.expand:
            return Arrived(rows, here, weights, handle)
        rows, factors = expanded(rows, weights, handle)
        return Arrived(rows, None, factors, handle)

    def _ranks(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [T, k]: the ranks that have at least one of a token's slots, ascending, each once; between them -1."""
        ranks = ids.long().div(self._local, rounding_mode="floor").sort(1).values
        ranks[:, 1:].masked_fill_(ranks[:, 1:] == ranks[:, :-1], -1)
        return ranks


def bytes_held(ranks: int, tokens: int, hidden: int, chosen: int, dtype: torch.dtype, *, captured: bool) -> int:
    """Bytes of a dispatch and its combine, beside what they are given and give, if every rank brings so many tokens.

    captured: of the way with a capacity of so many. Else, of the way with counts, if experts are equally busy: a rank whose
    experts are busier gets more rows, up to those of all ranks.
    """
    row = hidden * dtype.itemsize
    packed = _width(row, chosen)
    if captured:  # own tokens packed; everybody's, packed and unpacked; results, and what returns
        return tokens * packed + ranks * tokens * (packed + 3 * row + 8 * chosen)
    travelling = tokens * min(ranks, chosen)
    return travelling * (2 * packed + 4 * row + 8 * chosen)


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
