"""A layer whose routed experts are shared out among the workers of a group, and the set of all such layers of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch

from lockstep_common.errors import Conflict
from lockstep_common.steps import ExpertLoads, Header, Kind
from lockstep_kernels import moe
from lockstep_kernels.linear import Packed, linear
from lockstep_kernels.moe import ExpertWeights, Gate, Weight
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_kernels.swiglu import GateUp, swiglu
from lockstep_worker.collectives import Communicator, Group
from lockstep_worker.exchange import DEDUPLICATED, EXPANDED, Arrived, Exchange
from lockstep_worker.exchange.all_to_all import bytes_held
from lockstep_worker.exchange.backends import open_exchange
from lockstep_worker.exchange.local import Local
from lockstep_worker.exchange.moves import exchange_experts, plan_moves
from lockstep_worker.exchange.placement import Placement, Sharding
from lockstep_worker.exchange.symmetric import Room
from lockstep_worker.overlap import Stages, last_of
from lockstep_worker.protocol import steps_of

if TYPE_CHECKING:
    from lockstep_worker.models.decoder import Tokens
    from lockstep_worker.weights import Checkpoint


_UNSURE: Final = 2  # moves that a device may still be at: those of the plan that runs and of the next one


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """The experts that every token goes to, as one block; whole on every worker."""

    gate_up: GateUp
    down: Packed

    def __call__(self, x: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        """[T, d] of x [T, d]; on top of `plus`, which may be overwritten."""
        return linear(swiglu(x, self.gate_up), self.down, plus=plus) if len(x) else x


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
        read: Callable[[Checkpoint, int], tuple[Weight, Weight, Weight]],
    ) -> None:
        """number: of the layer, among those with routed experts; weights: of this worker's slots; read: an expert's gate, up and
        down from a checkpoint."""
        self.norm = norm
        self.gate = gate
        self.weights = weights
        self.shared = shared
        self.placement = placement
        self.read = read
        self.exchange: Exchange
        self.loads: torch.Tensor  # int32 [2, E + 1]: pairs of prefill and of decode; the first column: of no expert
        self.name = f"experts {number}"

    def __call__(self, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """See `lockstep_worker.models.decoder.FeedForward`; there may be no rows."""
        return last_of(self.stages(hidden, tokens))

    def stages(self, hidden: torch.Tensor, tokens: Tokens) -> Stages[torch.Tensor]:
        """The same; it pauses where rows (and before them their number, if it is not known), and where results, have begun to
        travel, so that something else can be computed before it goes on."""
        x = rms_norm(hidden, *self.norm)
        ids, factors = self._choose(x, tokens.live)
        self._count(ids, tokens.kind)
        slots = self.placement.choose(ids, tokens.spread)
        sent = x.to(self.weights.dtype)  # the same on all ranks, whichever form of the weights a pass of theirs takes
        capacity, layout = tokens.capacity, DEDUPLICATED if tokens.capacity else EXPANDED
        arrived = yield from self.exchange.dispatch(self.name, sent, slots, factors, capacity=capacity, layout=layout)
        apart = self.weights.deterministic  # as on one worker, so that bits do not depend on where experts are
        results = self._results(arrived, x.dtype, apart=apart).to(sent.dtype)
        finish = self.exchange.combine(self.name, results, arrived.handle, apart=apart)
        if apart:
            last = None if self.shared is None else self.shared(x)
            yield
            return finish(hidden, last)
        on_top = hidden if self.shared is None else self.shared(x, plus=hidden)
        yield
        return finish(on_top)

    def _results(self, arrived: Arrived, dtype: torch.dtype, *, apart: bool) -> torch.Tensor:
        """What the experts here make of the arrived rows, as `Exchange.combine` takes it. Where the host knows how many came for
        each slot, nothing is computed or kept for slots elsewhere."""
        rows = arrived.x.to(dtype)
        if arrived.ids is None:
            one = moe.experts(rows, arrived.slots()[:, None], arrived.weights[:, None], self.weights)
            return one.flatten(0, 1)
        if apart:
            return moe.experts(rows, arrived.ids, arrived.weights, self.weights)
        return moe.mix(rows, arrived.ids, arrived.weights, self.weights, plus=torch.zeros_like(rows))

    def _choose(self, x: torch.Tensor, live: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if len(x):
            return moe.choose(x, self.gate, live=live)
        shape = (0, self.gate.routing.top_k)
        return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)

    def _count(self, ids: torch.Tensor, kind: Kind) -> None:
        flat = ids.flatten().long() + 1
        self.loads[int(kind is Kind.DECODE)].scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class LoadsOnTheWay:
    """From the device to the host."""

    pairs: torch.Tensor  # int32 [layers, 2, experts]: (token, expert) pairs of prefill and of decode
    steps: int

    def arrived(self) -> ExpertLoads:
        """Once what was queued before has been done."""
        prefill, decode = self.pairs.numpy().astype(np.uint32).swapaxes(0, 1)
        return ExpertLoads(prefill, decode, self.steps)


class ShardedLayers:
    """All layers with routed experts of a model, on the worker that was loaded for one place of a group."""

    def __init__(
        self,
        layers: Sequence[ShardedExperts],
        sharding: Sharding,
        open_checkpoint: Callable[[], AbstractContextManager[Checkpoint]],
    ) -> None:
        """`open_checkpoint`: what the layers were loaded from, again."""
        self.layers = tuple(layers)
        self.open_checkpoint = open_checkpoint
        self.sharding = sharding
        first = layers[0]
        self.experts = first.placement.experts
        self.groups = first.gate.routing.groups
        device = first.gate.arrived.device
        self._loads = torch.zeros(len(layers), 2, self.experts + 1, dtype=torch.int32, device=device)
        for layer, loads in zip(layers, self._loads, strict=True):
            layer.loads = loads
        self.forget_loads()
        self._recent: deque[ShardedExperts] = deque(maxlen=_UNSURE)  # that have moved
        self.versions = [0] * len(layers)  # how often each layer's experts have moved in this group
        self._exchange_through(Local(self.slots, sharding.ranks))

    @property
    def slots(self) -> int:
        """Physical slots of a layer over the whole group."""
        return len(self.layers[0].placement.slots)

    @property
    def replicated(self) -> bool:
        """Whether an expert can have several slots."""
        return self.slots > self.experts

    def accompany(self, hidden: torch.Tensor, tokens: Tokens) -> Stages[None]:
        """Takes part in a pass in which only other ranks have tokens: hidden [0, d]."""
        for layer in self.layers:
            yield from layer.stages(hidden, tokens)

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
        self._exchange_through(
            open_exchange(
                mine.backend,
                group,
                self._room(mine.max_rows),
                self.layers[0].gate.arrived.device,
                tokens=mine.max_tokens,
                limit_s=group.timeout_s,
            )
        )
        self._world = group.world
        self._restore()
        self.forget_loads()

    def forget_loads(self) -> None:
        """What was counted so far does not count."""
        self._loads.zero_()
        self._steps, self._reporting_step = 0, -1

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Passes meanwhile are rehearsals: their tokens are no load."""
        loads = self._loads.clone()
        yield
        self._loads.copy_(loads)

    def move(self, number: int, experts: Sequence[int]) -> None:
        """From the next pass on, slot p of layer `number` holds expert experts[p]. All ranks of the group do this together."""
        layer, slots = self.layers[number], np.array(experts, np.uint32)
        layer.placement.check(slots)
        moves = plan_moves(layer.placement.slots, slots, self.sharding.ranks)
        self._recent.append(layer)
        self.versions[number] += 1
        name = f"{layer.name}, version {self.versions[number]}"
        layer.weights = exchange_experts(self._world, name, layer.weights, moves)
        layer.placement.set(slots)

    def exchange_bytes(self, tokens: int, *, captured: bool) -> int:
        """Of device memory, see `all_to_all.bytes_held`; windows that ranks share count if they may be used, and DeepEP's buffers
        are of that order."""
        room = self._room(tokens)
        held = bytes_held(room.ranks, tokens, room.hidden, room.chosen, room.dtype, captured=captured, apart=room.apart)
        shared = captured and self.sharding.backend in ("auto", "symmetric")
        return max(held, room.held) if shared else held

    def begin(self, header: Header) -> None:
        """Before the steps of a plan: a layer's experts change places, if the header says so."""
        if header.moved_layer >= 0:
            self.move(header.moved_layer, header.moved_experts)
        self._steps += steps_of(header)
        self._reporting_step = steps_of(header) - 1 if header.report_loads else -1

    @property
    def most_over_equal(self) -> float:
        """Rows that come to a rank that has an expert of every token of every rank, over those if all ranks are equally busy."""
        ranks = self.sharding.ranks
        return ranks / min(ranks, self.layers[0].gate.routing.top_k)

    def report(self, step: int, mates: Communicator) -> LoadsOnTheWay | None:
        """After the passes of a step of the plan: if it is the last one of a plan that reports loads, those of this DP rank since
        the last report. Its ranks, `mates`, do this together."""
        if step != self._reporting_step:
            return None
        pairs = mates.all_gather("expert loads", self._loads[..., 1:].contiguous()).sum(0, dtype=torch.int32)
        steps, self._steps = self._steps, 0
        self._loads.zero_()
        return LoadsOnTheWay(pairs.to("cpu", non_blocking=True), steps)

    def _room(self, rows: int) -> Room:
        """For captured steps of so many rows."""
        layer, ranks = self.layers[0], self.sharding.ranks
        weights, chosen = layer.weights, layer.gate.routing.top_k
        return Room(ranks, self.slots // ranks, rows, weights.hidden, chosen, weights.dtype, weights.deterministic)

    def _restore(self) -> None:
        """Places as they were when the model was loaded; what has moved since is read again, and all of the layers that moved
        last: if the group broke, nobody knows what their slots hold."""
        initial = self.sharding.placement(self.experts)
        want = self.sharding.here(initial)
        moved = [layer for layer in self.layers if layer in self._recent or (layer.placement.slots != initial).any()]
        if moved:
            with self.open_checkpoint() as checkpoint:
                for layer in moved:
                    changed = np.flatnonzero(self.sharding.here(layer.placement.slots) != want).tolist()
                    if layer in self._recent:
                        changed = list(range(len(want)))
                    read = {slot: layer.read(checkpoint, int(want[slot])) for slot in changed}
                    layer.weights = layer.weights.replaced(read)
                    layer.placement.set(initial)
        self._recent.clear()
        self.versions = [0] * len(self.layers)

    def _exchange_through(self, exchange: Exchange) -> None:
        self._exchange = exchange
        for layer in self.layers:
            layer.exchange = exchange
