"""The mixture-of-experts layer: a gate, and experts wherever they are.

A token's way: `route` chooses its experts from the gate's logits; an `Exchange` brings it to those experts and adds what they
make of it, weighted, to the residual stream.
Shared experts are experts like the others, after the routed ones, that every live token goes to with weight 1: so one
grouped product serves both. Rows that are not live go to no expert and keep their residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from lockstep_kernels import moe
from lockstep_kernels.fp8 import BLOCK
from lockstep_kernels.moe import ExpertStack, ExpertWeights, Gate, Routing, Weight, split
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_worker.weights import ConfigFile

if TYPE_CHECKING:
    from lockstep_worker.models.decoder import Tokens, WeightSource

__all__ = [
    "Exchange",
    "ExpertMlp",
    "ExpertNames",
    "Experts",
    "Local",
    "Routing",
    "load_expert_mlp",
    "read_routing",
]


class Exchange(Protocol):
    """The way of tokens to the experts and back, wherever those are. Its calls come in the same order on all workers."""

    def mix(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        packed: ExpertWeights,
        residual: torch.Tensor,
        norm: Norm | None,
    ) -> torch.Tensor:
        """residual [T, d] plus the weighted sum of what each token's experts make of x [T, d].

        ids int32 [T, k] over all experts, -1: none; weights float32 [T, k]; `packed` are the experts that are here. An
        exchange over workers dispatches x by ids, calls `moe.experts` on what arrives, and combines what returns.
        """
        ...


class Local:
    """All experts are here."""

    def mix(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        packed: ExpertWeights,
        residual: torch.Tensor,
        norm: Norm | None,
    ) -> torch.Tensor:
        return moe.mix(x, ids, weights, packed, plus=residual, norm=norm)


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward half of a layer with routed experts: y = residual + routed(x) + shared(x)."""

    gate: Gate
    weights: ExpertWeights  # the experts that the gate routes to, then the shared ones
    exchange: Exchange

    @classmethod
    def pack(
        cls,
        routing: Routing,
        gate: torch.Tensor,
        weights: ExpertWeights,
        *,
        correction: torch.Tensor | None = None,
        exchange: Exchange | None = None,
    ) -> Experts:
        """gate [E, d]; correction float32 [E]; weights: E routed experts and any number of shared ones after them."""
        if weights.experts < routing.experts:
            raise ValueError(f"{weights.experts} experts have weights, {routing.experts} are routed to")
        packed = moe.pack_gate(gate, routing, correction, deterministic=weights.deterministic)
        return cls(packed, weights, exchange or Local())

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
        return self.exchange.mix(x, ids, factors, self.weights, residual, norm)


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """The feed-forward half of a layer with experts; see `lockstep_worker.models.decoder.FeedForward`."""

    norm: Norm
    experts: Experts

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
) -> ExpertMlp:
    """A layer's feed-forward half behind the norm of that name. Reads experts one at a time, straight into their stack.

    Below `prefix` ("model.layers.3.mlp.") stand gate.weight [E, d], with `corrected` gate.e_score_correction_bias [E], the
    routed experts (experts.N.gate_proj.weight and so on, or the stacks experts.gate_up_proj [E, 2i, d] and experts.down_proj
    [E, d, i]) and with `shared` shared_experts.gate_proj.weight and so on, `shared` experts wide. Experts are of 8 bits if
    all are stored so.
    """
    gate = weights.tensor(f"{prefix}gate.weight", routing.experts, hidden)
    correction = None
    if corrected:
        correction = weights.tensor(f"{prefix}gate.e_score_correction_bias", routing.experts, dtype=torch.float32)
    count = routing.experts
    stack = ExpertStack(
        count + shared, hidden, width, weights.dtype, weights.device, deterministic=weights.deterministic
    )
    read: Callable[[str, int, int], Weight] = weights.tensor
    if f"{prefix}experts.gate_up_proj" in weights.checkpoint:
        _put_stacked(weights, prefix, stack, count, hidden, width)
    else:
        modules = [(f"{prefix}experts.{e}.", names) for e in range(count)]
        if shared:
            modules.append((f"{prefix}shared_experts.", ExpertNames()))
        if _are_fp8(weights, modules, whole=shared < 2 or width % BLOCK == 0):
            read = weights.weight
        for e, (module, _) in enumerate(modules[:count]):
            stack.put(e, *_read(read, module, names, hidden, width))
    if shared:
        joint = _read(read, f"{prefix}shared_experts.", ExpertNames(), hidden, shared * width)
        gates, ups, downs = (split(weight, shared, dim) for weight, dim in zip(joint, (0, 0, 1), strict=True))
        for s, parts in enumerate(zip(gates, ups, downs, strict=True)):
            stack.put(count + s, *parts)
    experts = Experts.pack(routing, gate, stack.finish(), correction=correction)
    return ExpertMlp(weights.norm(norm, hidden), experts)


def _read(
    read: Callable[[str, int, int], Weight], module: str, names: ExpertNames, hidden: int, width: int
) -> tuple[Weight, Weight, Weight]:
    """Gate, up and down of the expert whose tensors' names begin with `module`."""
    gate, up = (read(f"{module}{name}.weight", width, hidden) for name in (names.gate, names.up))
    return gate, up, read(f"{module}{names.down}.weight", hidden, width)


def _put_stacked(weights: WeightSource, prefix: str, stack: ExpertStack, experts: int, hidden: int, width: int) -> None:
    gate_up = weights.tensor(f"{prefix}experts.gate_up_proj", experts, 2 * width, hidden)
    down = weights.tensor(f"{prefix}experts.down_proj", experts, hidden, width)
    for e in range(experts):
        gate, up = gate_up[e].chunk(2)
        stack.put(e, gate, up, down[e])


def _are_fp8(weights: WeightSource, modules: Sequence[tuple[str, ExpertNames]], *, whole: bool) -> bool:
    """Whether all experts can stay of 8 bits: they are stored so, and `whole`: none ends within a block of scales."""
    stored = (f"{module}{name}.weight" for module, n in modules for name in (n.gate, n.up, n.down))
    return whole and all(weights.checkpoint.quantised(name) for name in stored)
