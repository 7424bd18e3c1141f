"""The mixture-of-experts layer: its gate, and experts that are all here, or shared out among workers (`exchange.layer`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from lockstep_kernels import moe
from lockstep_kernels.fp8 import BLOCK
from lockstep_kernels.moe import ExpertStack, ExpertWeights, Gate, Routing, Weight, split
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_worker.exchange.layer import ShardedExperts, SharedExperts
from lockstep_worker.exchange.placement import Placement
from lockstep_worker.weights import Checkpoint, ConfigFile

if TYPE_CHECKING:
    from lockstep_worker.models.decoder import Tokens, WeightSource

__all__ = [
    "ExpertMlp",
    "ExpertNames",
    "Experts",
    "Routing",
    "load_expert_mlp",
    "read_routing",
]


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward half of a layer whose experts are all here: y = residual + routed(x) + shared(x).

    Shared experts are experts like the others, after the routed ones, that every live token goes to with weight 1: so one
    grouped product serves both. Rows that are not live go to no expert and keep their residual.
    """

    gate: Gate
    weights: ExpertWeights  # the experts that the gate routes to, then the shared ones

    @classmethod
    def pack(
        cls,
        routing: Routing,
        gate: torch.Tensor,
        weights: ExpertWeights,
        *,
        correction: torch.Tensor | None = None,
    ) -> Experts:
        """gate [E, d]; correction float32 [E]; weights: E routed experts and any number of shared ones after them."""
        if weights.experts < routing.experts:
            raise ValueError(f"{weights.experts} experts have weights, {routing.experts} are routed to")
        packed = moe.pack_gate(gate, routing, correction, deterministic=weights.deterministic)
        return cls(packed, weights)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, live: torch.Tensor | None, *, norm: Norm | None = None
    ) -> torch.Tensor:
        """x and residual [T, d], x to be normalised if there is a norm; live bool [T], None: all.

        A row's bits do not depend on the others; on CUDA that takes weights packed as deterministic.
        """
        if norm is not None and not moe.fuses_norm(x, self.weights):
            x, norm = rms_norm(x, *norm), None
        shared = self.weights.experts - self.gate.routing.experts
        ids, factors = moe.choose(x, self.gate, live=live, shared=shared, norm=norm)
        return moe.mix(x, ids, factors, self.weights, plus=residual, norm=norm)


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """The feed-forward half of a layer with experts; see `lockstep_worker.models.decoder.FeedForward`."""

    norm: Norm
    experts: Experts
    routed: ClassVar[bool] = True

    def __call__(self, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return self.experts(hidden, hidden, tokens.live, norm=self.norm)


def read_routing(
    config: ConfigFile,
    experts_field: str,
    *,
    scoring: Literal["softmax", "sigmoid"],
    renormalise: bool,
    scale: float = 1.0,
    group_score: Literal["max", "top2"] | None = None,
) -> Routing:
    """The routing of a config; with a `group_score` the experts may stand in groups. Raises ConfigError naming the field."""
    experts, top_k = config.integer(experts_field), config.integer("num_experts_per_tok")
    groups, top_groups = 1, 1
    if group_score is not None:
        groups, top_groups = config.integer("n_group", 1), config.integer("topk_group", 1)
    if experts % groups:
        raise config.error("n_group", f"is {groups}, which does not divide {experts} experts")
    if top_groups > groups:
        raise config.error("topk_group", f"is {top_groups}, more than the {groups} groups")
    if group_score == "top2" and 1 < groups == experts:
        raise config.error("n_group", f"is {groups}: groups of one expert have no two best")
    if top_k > experts // groups * top_groups:
        raise config.error("num_experts_per_tok", f"is {top_k}, more than the experts to choose from")
    try:
        return Routing(experts, top_k, scoring, renormalise, scale, groups, top_groups, group_score or "max")
    except ValueError as error:
        raise config.error(experts_field, f"is not supported: {error}") from None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a family calls the tensors of one expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def load_expert_mlp(
    weights: WeightSource,
    norm: str,
    prefix: str,
    routing: Routing,
    *,
    hidden: int,
    width: int,
    shared: int = 0,
    corrected: bool = False,
    names: ExpertNames = ExpertNames(),
) -> ExpertMlp | ShardedExperts:
    """A layer's feed-forward half behind the norm of that name. Reads experts one at a time, straight into their stack; of
    experts that are shared out among workers, only those of this worker.

    Below `prefix` ("model.layers.3.mlp.") stand gate.weight [E, d], with `corrected` gate.e_score_correction_bias [E], the
    routed experts (experts.N.gate_proj.weight and so on, or the stacks experts.gate_up_proj [E, 2i, d] and experts.down_proj
    [E, d, i]) and with `shared` shared_experts.gate_proj.weight and so on, `shared` experts wide. Experts are of 8 bits if
    all are stored so.
    """
    gate = weights.tensor(f"{prefix}gate.weight", routing.experts, hidden)
    correction = None
    if corrected:
        correction = weights.tensor(f"{prefix}gate.e_score_correction_bias", routing.experts, dtype=torch.float32)
    before = weights.norm(norm, hidden)
    source = _ExpertSource(weights, prefix, names, routing.experts, hidden, width)
    if weights.sharding.ranks > 1:
        return _load_sharded(source, before, routing, gate, correction, shared)
    stack = source.stack(routing.experts + shared)
    fp8 = source.are_fp8(shared)
    for e in range(routing.experts):
        stack.put(e, *source.expert(e, fp8=fp8))
    if shared:
        for s, parts in enumerate(source.shared(shared, fp8=fp8)):
            stack.put(routing.experts + s, *parts)
    return ExpertMlp(before, Experts.pack(routing, gate, stack.finish(), correction=correction))


def _load_sharded(
    source: _ExpertSource,
    norm: Norm,
    routing: Routing,
    gate: torch.Tensor,
    correction: torch.Tensor | None,
    shared: int,
) -> ShardedExperts:
    """The slots that are this worker's before loads are known; shared experts as one block."""
    weights, sharding = source.weights, source.weights.sharding
    slots = sharding.placement(routing.experts)
    here = sharding.here(slots)
    fp8 = weights.device.type == "cuda" and source.are_fp8(0)  # on a CPU they are what values and scales stand for
    stack = source.stack(len(here))
    for slot, e in enumerate(here.tolist()):
        stack.put(slot, *source.expert(e, fp8=fp8))
    source.leave_others(set(here.tolist()))
    block = None
    if shared:
        module, size = f"{source.prefix}shared_experts.", shared * source.width
        down = weights.linear([f"{module}down_proj"], [source.hidden], size)
        block = SharedExperts(weights.gate_up(module, size, source.hidden), down)
    packed = moe.pack_gate(gate, routing, correction, deterministic=weights.deterministic)
    placement = Placement(routing.experts, slots, weights.device)

    def read(checkpoint: Checkpoint, e: int) -> tuple[Weight, Weight, Weight]:
        return replace(source, weights=weights.over(checkpoint)).expert(e, fp8=fp8)

    layer = ShardedExperts(len(weights.sharded), norm, packed, stack.finish(), block, placement, read)
    weights.sharded.append(layer)
    return layer


@dataclass(frozen=True, slots=True)
class _ExpertSource:
    """The experts of a layer in a checkpoint, one by one: gate, up and down of each."""

    weights: WeightSource
    prefix: str
    names: ExpertNames
    experts: int
    hidden: int
    width: int

    def stack(self, experts: int) -> ExpertStack:
        """Room for so many."""
        w = self.weights
        return ExpertStack(experts, self.hidden, self.width, w.dtype, w.device, deterministic=w.deterministic)

    @property
    def stacked(self) -> bool:
        """Whether the checkpoint has one tensor for all of them."""
        return f"{self.prefix}experts.gate_up_proj" in self.weights.checkpoint

    def are_fp8(self, shared: int) -> bool:
        """Whether all experts, and as many shared ones, can stay of 8 bits: they are stored so, and none ends within a block
        of scales."""
        if self.stacked or (shared > 1 and self.width % BLOCK):
            return False
        modules = [(f"{self.prefix}experts.{e}.", self.names) for e in range(self.experts)]
        if shared:
            modules.append((f"{self.prefix}shared_experts.", ExpertNames()))
        stored = (f"{module}{name}.weight" for module, n in modules for name in (n.gate, n.up, n.down))
        return all(self.weights.checkpoint.quantised(name) for name in stored)

    def expert(self, e: int, *, fp8: bool) -> tuple[Weight, Weight, Weight]:
        if not self.stacked:
            return self._module(f"{self.prefix}experts.{e}.", self.names, self.width, fp8)
        shape = (self.experts, 2 * self.width, self.hidden)
        gate, up = self.weights.part(f"{self.prefix}experts.gate_up_proj", *shape, part=e).chunk(2)
        return (
            gate,
            up,
            self.weights.part(f"{self.prefix}experts.down_proj", self.experts, self.hidden, self.width, part=e),
        )

    def shared(self, count: int, *, fp8: bool) -> Iterator[tuple[Weight, Weight, Weight]]:
        """The shared experts, which are stored as one."""
        joint = self._module(f"{self.prefix}shared_experts.", ExpertNames(), count * self.width, fp8)
        gates, ups, downs = (split(weight, count, dim) for weight, dim in zip(joint, (0, 0, 1), strict=True))
        return zip(gates, ups, downs, strict=True)

    def leave_others(self, mine: set[int]) -> None:
        """The experts that are not `mine` are read by other workers."""
        if self.stacked:
            return
        n = self.names
        for e in set(range(self.experts)) - mine:
            for name in (n.gate, n.up, n.down):
                self.weights.leave(f"{self.prefix}experts.{e}.{name}.weight")

    def _module(self, module: str, names: ExpertNames, width: int, fp8: bool) -> tuple[Weight, Weight, Weight]:
        read: Callable[[str, int, int], Weight] = self.weights.weight if fp8 else self.weights.tensor
        gate, up = (read(f"{module}{name}.weight", width, self.hidden) for name in (names.gate, names.up))
        return gate, up, read(f"{module}{names.down}.weight", self.hidden, width)
