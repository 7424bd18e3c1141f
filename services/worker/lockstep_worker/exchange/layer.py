"""A layer whose routed experts are shared out among the workers of a group, and the set of all such layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from lockstep_common.errors import Conflict
from lockstep_common.steps import Kind
from lockstep_kernels import moe
from lockstep_kernels.linear import Packed, linear
from lockstep_kernels.moe import ExpertWeights, Gate
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_kernels.swiglu import GateUp, swiglu
from lockstep_worker.collectives import Group
from lockstep_worker.exchange import Exchange
from lockstep_worker.exchange.backends import open_exchange
from lockstep_worker.exchange.local import Local
from lockstep_worker.exchange.placement import Placement, Sharding

if TYPE_CHECKING:
    from lockstep_worker.models.decoder import Tokens


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """The experts that every token goes to, as one block; whole on every worker."""

    gate_up: GateUp
    down: Packed

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return linear(swiglu(x, self.gate_up), self.down, plus=residual) if len(x) else residual


class ShardedExperts:
    """The feed-forward half of a layer: y = residual + routed(x) + shared(x), where this worker has some slots of the routed.

    What every worker computes for its own tokens runs while the results of theirs travel. All workers call it for the same
    layers in the same order, those without tokens too.
    """

    routed: ClassVar[bool] = True

    def __init__(
        self,
        number: int,
        norm: Norm,
        gate: Gate,
        weights: ExpertWeights,
        shared: SharedExperts | None,
        placement: Placement,
    ) -> None:
        """number: of the layer, among those with routed experts; weights: of this worker's slots."""
        self.number = number
        self.norm = norm
        self.gate = gate
        self.weights = weights
        self.shared = shared
        self.placement = placement
        self.exchange: Exchange
        self.loads: torch.Tensor  # int32 [2, E + 1]: pairs of prefill and of decode; the first column: of no expert
        self._name = f"experts {number}"

    def __call__(self, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """See `lockstep_worker.models.decoder.FeedForward`; there may be no rows."""
        x = rms_norm(hidden, *self.norm)
        ids, factors = self._choose(x, tokens.live)
        self._count(ids, tokens.kind)
        slots = self.placement.choose(ids, tokens.spread)
        sent = x.to(self.weights.dtype)  # the same on all ranks, whichever form of the weights a pass of theirs takes
        arrived = self.exchange.dispatch(self._name, sent, slots, factors, capacity=tokens.capacity)
        assert arrived.ids is not None
        rows = arrived.x.to(x.dtype)
        results = moe.mix(rows, arrived.ids, arrived.weights, self.weights, plus=torch.zeros_like(rows))
        finish = self.exchange.combine(self._name, results.to(sent.dtype), arrived.handle)
        return finish(hidden if self.shared is None else self.shared(x, hidden))

    def _choose(self, x: torch.Tensor, live: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if len(x):
            return moe.choose(x, self.gate, live=live)
        shape = (0, self.gate.routing.top_k)
        return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)

    def _count(self, ids: torch.Tensor, kind: Kind) -> None:
        flat = ids.flatten().long() + 1
        self.loads[int(kind is Kind.DECODE)].scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))


class ShardedLayers:
    """All layers with routed experts of a model, on the worker that was loaded for one place of a group."""

    def __init__(self, layers: Sequence[ShardedExperts], sharding: Sharding) -> None:
        self.layers = tuple(layers)
        self.sharding = sharding
        first = layers[0]
        self.experts = first.placement.experts
        self.groups = first.gate.routing.groups
        device = first.gate.arrived.device
        self._loads = torch.zeros(len(layers), 2, self.experts + 1, dtype=torch.int32, device=device)
        self._passes = 0
        for layer, loads in zip(layers, self._loads, strict=True):
            layer.loads = loads
        self._exchange_through(Local(self.slots, sharding.ranks))

    @property
    def slots(self) -> int:
        """Physical slots of a layer over the whole group."""
        return len(self.layers[0].placement.slots)

    @property
    def replicated(self) -> bool:
        """Whether an expert can have several slots."""
        return self.slots > self.experts

    def accompany(self, hidden: torch.Tensor, tokens: Tokens) -> None:
        """Takes part in a pass in which only other ranks have tokens: hidden [0, d]."""
        for layer in self.layers:
            layer(hidden, tokens)

    def join(self, group: Group) -> None:
        """Exchanges tokens with this group from now on; placements are the initial ones again.

        Conflict if this worker was loaded for another place.
        """
        mine, place = self.sharding, group.place
        if (place.size, place.rank) != (mine.ranks, mine.rank):
            raise Conflict(
                f"this worker holds the experts of rank {mine.rank} of {mine.ranks}, the group wants it as rank {place.rank} "
                f"of {place.size}: start it with --dp {place.dp} --cp {place.cp} --rank {place.rank}"
            )
        self._exchange.close()
        weights = self.layers[0].weights
        self._exchange_through(
            open_exchange(
                mine.backend,
                group.world,
                self.slots,
                tokens=mine.max_tokens,
                hidden=weights.hidden,
                chosen=self.layers[0].gate.routing.top_k,
            )
        )
        self._loads.zero_()

    def _exchange_through(self, exchange: Exchange) -> None:
        self._exchange = exchange
        for layer in self.layers:
            layer.exchange = exchange
