"""Dispatch and combine of captured steps through memory that all ranks of a machine reach: rows go where they must at once.

Rows, slots and weights are written into the windows of the ranks that have experts for them, results into the window of the token's
rank: a kernel each to send, one that waits, one that waits and adds. Nothing is packed, gathered or copied in between. Prefill
passes, whose windows would be as large as all ranks' tokens, go over the communicator.

Two exchanges may be under way at a time, as where a pass is computed in two halves: the first that begins takes the large windows,
one that begins before it ends takes those of half the size. The same everywhere, whether a rank replays its step or computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from lockstep_kernels import all2all
from lockstep_kernels.all2all import Peers, State, cut, window_bytes
from lockstep_kernels.gather_sum import gather_sum
from lockstep_worker.collectives import Group, SharedMemory
from lockstep_worker.exchange import DEDUPLICATED, Arrived, Finish, Handle, Layout, arrived_as
from lockstep_worker.exchange.all_to_all import AllToAll
from lockstep_worker.exchange.handle import Dispatched
from lockstep_worker.overlap import Stages


@dataclass(frozen=True, slots=True)
class Room:
    """What windows have room for: tokens of a rank, of so many slots of `ranks * local` each."""

    ranks: int
    local: int
    capacity: int
    hidden: int
    chosen: int
    dtype: torch.dtype
    apart: bool  # see `Exchange.combine`; one of the two for all

    @property
    def capacities(self) -> tuple[int, int]:
        """Of the two sets of windows."""
        return self.capacity, -(-self.capacity // 2)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of a rank's window of each set."""
        return tuple(
            window_bytes(self.ranks, capacity, self.hidden, self.chosen, self.dtype, apart=self.apart)
            for capacity in self.capacities
        )

    @property
    def held(self) -> int:
        """Bytes of windows and of what experts make of the rows in the large one."""
        results = self.ranks * self.capacity * (self.chosen if self.apart else 1)
        return sum(self.sizes) + results * self.hidden * self.dtype.itemsize

    def sets(self, memory: Sequence[torch.Tensor], rank: int, limit: int) -> tuple[Peers, ...]:
        """Both sets in the ranks' memory, uint8 [sum(sizes)] each, zero at first; see `Peers`."""
        device = memory[rank].device
        failed = torch.zeros(1, dtype=torch.int32, device=device)
        fault = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        found, start = [], 0
        for capacity, size in zip(self.capacities, self.sizes, strict=True):
            windows = tuple(
                cut(
                    part[start : start + size],
                    self.ranks,
                    capacity,
                    self.hidden,
                    self.chosen,
                    self.dtype,
                    apart=self.apart,
                )
                for part in memory
            )
            state = State(torch.zeros(3, dtype=torch.int32, device=device), failed, fault)
            found.append(Peers(windows, rank, self.local, self.apart, state, limit))
            start += size
        return tuple(found)


@dataclass(frozen=True)
class _InWindow(Dispatched):
    """A dispatch whose rows lie in the windows of a set."""

    set: int = field(kw_only=True)


class Symmetric:
    """See `lockstep_worker.exchange.Exchange`. Belongs to a group, which asks for its faults and ends its waits."""

    def __init__(self, group: Group, room: Room, memory: SharedMemory, *, limit_s: float) -> None:
        """`limit_s`: after so long a wait ends without the ranks that it was for."""
        self._group = group
        self._room = room
        self._memory = memory
        self._sets = room.sets(memory.parts, group.world.rank, int(limit_s * 1e9))
        self._free = list(range(len(self._sets)))
        self._others = AllToAll(group.world, room.ranks * room.local)
        self._limit_s = limit_s
        self._fault = self._sets[0].state.fault
        self._given_up = torch.ones_like(self._fault, pin_memory=self._fault.is_pinned())

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
        if not 0 < capacity <= self._room.capacity:
            return self._others.dispatch(name, x, ids, weights, capacity=capacity, layout=layout)
        if len(ids) > capacity:
            raise ValueError(f"{name}: {len(ids)} tokens, but all ranks agreed on at most {capacity}")
        return self._dispatch(name, x, ids, weights, capacity, layout)

    def combine(self, name: str, rows: torch.Tensor, handle: Handle, *, apart: bool = False) -> Finish:
        if not isinstance(handle, _InWindow):
            return self._others.combine(name, rows, handle, apart=apart)
        if apart != self._room.apart:
            raise ValueError(
                f"{name}: windows were made for results that come back {'apart' if not apart else 'added'}"
            )
        peers, capacity = self._sets[handle.set], handle.num_max_tokens_per_rank
        dtype, hidden = self._room.dtype, self._room.hidden
        if handle.do_expand:
            rows = self._gathered(rows, handle)
        shape = (-1, self._room.chosen, hidden) if apart else (-1, hidden)
        with self._during(f"{name}, results"):
            all2all.send_results(rows.to(dtype).view(shape), peers, capacity)

        def finish(plus: torch.Tensor, then: torch.Tensor | None = None) -> torch.Tensor:
            last = None if then is None else then.to(dtype).contiguous()
            with self._during(f"{name}, results, arrival"):
                y = all2all.add_results(handle.topk_idx, plus.to(dtype).contiguous(), last, peers, capacity)
            self._free = sorted((*self._free, handle.set))
            return y.to(plus.dtype)

        return finish

    def fault(self) -> str:
        """See `lockstep_worker.collectives.groups.OnDevice`."""
        missing = int(self._fault)
        if not missing:
            return ""
        names = [self._group.peer(rank) for rank in range(self._room.ranks) if missing >> rank & 1]
        return f"waited {self._limit_s:g} s on the device for tokens or results of {', '.join(names)}"

    def abort(self) -> None:
        """See `OnDevice`."""
        failed = self._sets[0].state.failed
        with torch.inference_mode():  # in which it was made
            if failed.device.type != "cuda":
                failed.fill_(1)
                return
            beside = torch.cuda.Stream(failed.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(beside):  # not behind the waits that it is to end
                failed.copy_(self._given_up, non_blocking=True)

    def close(self) -> None:
        """See `OnDevice`; waits for what the device is at."""
        if not self._sets:
            return
        self.abort()
        if self._sets[0].state.failed.is_cuda:
            torch.cuda.synchronize(self._sets[0].state.failed.device)
        self._sets = ()
        self._memory.close()

    def _dispatch(
        self, name: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, capacity: int, layout: Layout
    ) -> Stages[Arrived]:
        room = self._room
        number = self._take(name, capacity)
        peers = self._sets[number]
        with self._during(f"{name}, rows"):
            all2all.send_tokens(x.contiguous(), ids, weights, peers, capacity)
        yield
        with self._during(f"{name}, rows, arrival"):
            all2all.wait(peers)
        rows, mine = room.ranks * capacity, peers.mine
        slots = room.ranks * room.local
        handle = _InWindow(slots, room.ranks, capacity, layout, ids, mine.ids[:rows], set=number)
        return arrived_as(mine.x[:rows], mine.weights[:rows], handle)

    def _take(self, name: str, capacity: int) -> int:
        """The first set of windows that no exchange is in."""
        if not self._free or capacity > self._room.capacities[self._free[0]]:
            raise ValueError(
                f"{name}: there are no free windows for {capacity} tokens: finish exchanges in their order"
            )
        return self._free.pop(0)

    def _gathered(self, rows: torch.Tensor, handle: _InWindow) -> torch.Tensor:
        """Results of the expanded layout as those of the deduplicated one."""
        return gather_sum(rows, handle.slots.view(-1, 1) if self._room.apart else handle.slots)

    def _during(self, name: str) -> AbstractContextManager[object]:
        return self._group.recorder.during(name, "world")
