"""The mixture-of-experts layer: a gate, and experts wherever they are.

A token's way: `route` chooses its experts from the gate's logits; an `Exchange` brings it to those experts and adds what they
make of it, weighted, to the residual stream.
Shared experts are experts like the others, after the routed ones, that every live token goes to with weight 1: so one
grouped product serves both. Rows that are not live go to no expert and keep their residual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from lockstep_kernels import moe
from lockstep_kernels.linear import Packed
from lockstep_kernels.moe import ExpertStack, ExpertWeights, Routing
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
    "load_experts",
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

    routing: Routing
    gate: Packed  # [E, d]
    correction: torch.Tensor | None  # float32 [E]
    weights: ExpertWeights  # E routed experts, then the shared ones
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
        if correction is not None and correction.dtype != torch.float32:
            raise ValueError(f"the correction is {correction.dtype}, expected torch.float32")
        return cls(
            routing, moe.pack_gate(gate, deterministic=weights.deterministic), correction, weights, exchange or Local()
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, live: torch.Tensor | None, *, norm: Norm | None = None
    ) -> torch.Tensor:
        """x and residual [T, d], x to be normalised if there is a norm; live bool [T], None: all.

        A row's bits do not depend on the others; on CUDA that takes weights packed as deterministic.
        """
        if norm is not None and not moe.fuses_norm(x, self.weights):
            x, norm = rms_norm(x, *norm), None
        logits = moe.gate_logits(x, self.gate, norm=norm)
        shared = self.weights.experts - self.routing.experts
        ids, weights = moe.route(logits, self.routing, correction=self.correction, live=live, shared=shared)
        return self.exchange.mix(x, ids, weights, self.weights, residual, norm)


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
    """The feed-forward half behind the norm of that name, whose tensors' names begin with `prefix`; see `load_experts`."""

    def take(name: str, *shape: int) -> torch.Tensor:
        return weights.tensor(name, *shape, dtype=torch.float32 if name.endswith("correction_bias") else None)

    experts = load_experts(
        take,
        weights.checkpoint.__contains__,
        prefix,
        routing,
        hidden=hidden,
        width=width,
        dtype=weights.dtype,
        device=weights.device,
        shared=shared,
        corrected=corrected,
        names=names,
        deterministic=weights.deterministic,
    )
    return ExpertMlp(weights.norm(norm, hidden), experts)


def load_experts(
    take: Callable[..., torch.Tensor],
    has: Callable[[str], bool],
    prefix: str,
    routing: Routing,
    *,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    shared: int = 0,
    corrected: bool = False,
    names: ExpertNames = ExpertNames(),
    deterministic: bool = False,
) -> Experts:
    """Reads a layer's experts, one at a time, straight into their stack.

    take(name, *shape) yields a tensor on `device`, of float32 for the correction and of `dtype` otherwise; has(name) tells whether the checkpoint has it. Below `prefix`
    ("model.layers.3.mlp.") stand gate.weight [E, d], with `corrected` gate.e_score_correction_bias [E], the routed experts
    (experts.N.gate_proj.weight and so on, or the stacks experts.gate_up_proj [E, 2i, d] and experts.down_proj [E, d, i]) and
    with `shared` shared_experts.gate_proj.weight and so on, `shared` experts wide.
    """
    gate = take(f"{prefix}gate.weight", routing.experts, hidden)
    correction = take(f"{prefix}gate.e_score_correction_bias", routing.experts) if corrected else None
    stack = ExpertStack(routing.experts + shared, hidden, width, dtype, device, deterministic=deterministic)
    if has(f"{prefix}experts.gate_up_proj"):
        gate_up = take(f"{prefix}experts.gate_up_proj", routing.experts, 2 * width, hidden)
        down = take(f"{prefix}experts.down_proj", routing.experts, hidden, width)
        for e in range(routing.experts):
            gate_rows, up_rows = gate_up[e].chunk(2)
            stack.put(e, gate_rows, up_rows, down[e])
        del gate_up, down
    else:
        for e in range(routing.experts):
            expert = f"{prefix}experts.{e}."
            stack.put(
                e,
                take(f"{expert}{names.gate}.weight", width, hidden),
                take(f"{expert}{names.up}.weight", width, hidden),
                take(f"{expert}{names.down}.weight", hidden, width),
            )
    if shared:
        gates = take(f"{prefix}shared_experts.gate_proj.weight", shared * width, hidden).chunk(shared)
        ups = take(f"{prefix}shared_experts.up_proj.weight", shared * width, hidden).chunk(shared)
        downs = take(f"{prefix}shared_experts.down_proj.weight", hidden, shared * width).chunk(shared, 1)
        for s in range(shared):
            stack.put(routing.experts + s, gates[s], ups[s], downs[s])
    return Experts.pack(routing, gate, stack.finish(), correction=correction)
