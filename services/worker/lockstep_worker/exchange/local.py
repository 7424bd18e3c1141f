"""Nobody else: what a single rank, and a worker before it has joined its group, exchange with."""

from __future__ import annotations

import torch

from lockstep_worker.exchange import DEDUPLICATED, Arrived, Finish, Handle, Layout, arrived_as
from lockstep_worker.exchange.handle import Dispatched, added
from lockstep_worker.overlap import Stages


class Local:
    """All slots are here.

    With `ranks` it stands in for a group that the worker has not joined: slots elsewhere are taken for the one in their place
    here, so that a pass takes the memory and time that balanced experts will take. Its results mean nothing then.
    """

    def __init__(self, slots: int, ranks: int = 1) -> None:
        self._local = slots // ranks

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
        here = torch.where(ids < 0, ids, ids % self._local)
        arrived = arrived_as(x, weights, Dispatched(self._local, 1, len(ids), layout, here, here))
        yield
        return arrived

    def combine(self, name: str, rows: torch.Tensor, handle: Handle, *, apart: bool = False) -> Finish:
        assert isinstance(handle, Dispatched)
        index = handle.slots if handle.do_expand else handle.pair_returns if apart else handle.returns

        def finish(plus: torch.Tensor, then: torch.Tensor | None = None) -> torch.Tensor:
            return added(rows.view(-1, rows.shape[-1]), index, plus, then)

        return finish

    def close(self) -> None:
        pass
