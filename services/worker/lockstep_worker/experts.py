"""The mixture-of-experts layer: gate, dispatch, experts, combine.

A token's way: `route` chooses its experts from the gate's logits; `Exchange.dispatch` brings it to the worker that has
them; the experts compute; `Exchange.combine` brings the weighted results back and adds them to the residual stream.
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
    "Parcel",
    "Routing",
    "load_expert_mlp",
    "load_experts",
    "read_routing",
]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Rows and where they go: what dispatch hands to the experts of this worker.

    rows [R, d]; ids int32 [R, k] in this worker's numbering, -1: elsewhere or nowhere; weights float32 [R, k].
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Exchange(Protocol):
    """The way of rows to the experts and back. Its calls come in the same order on all workers."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Parcel:
        """x [T, d] of this worker with ids int32 [T, k] over all experts, and weights float32 [T, k]."""

    def combine(self, parcel: Parcel, pairs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual [T, d] plus what became of x: pairs [R, k, d] are the weighted results for the parcel's rows."""


class Local:
    """All experts are here."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Parcel:
        return Parcel(x, ids, weights)

    def combine(self, parcel: Parcel, pairs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return moe.combine(pairs, parcel.ids, plus=residual)


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
        return cls(routing, moe.pack_gate(gate), correction, weights, exchange or Local())

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
        """x (normed) and residual [T, d]; live bool [T], None: all. On CPU a row's bits do not depend on the others."""
        logits = moe.gate_logits(x, self.gate)
        shared = self.weights.experts - self.routing.experts
        ids, weights = moe.route(logits, self.routing, correction=self.correction, live=live, shared=shared)
        parcel = self.exchange.dispatch(x, ids, weights)
        pairs = moe.experts(parcel.rows, parcel.ids, parcel.weights, self.weights)
        return self.exchange.combine(parcel, pairs, residual)


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """The feed-forward half of a layer with experts; see `lockstep_worker.models.decoder.FeedForward`."""

    norm: Norm
    experts: Experts

    def __call__(self, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return self.experts(rms_norm(hidden, *self.norm), hidden, tokens.live)


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
) -> Experts:
    """Reads a layer's experts, one at a time, straight into their stack.

    take(name, *shape) yields a tensor on `device`, of float32 for the correction and of `dtype` otherwise; has(name) tells whether the checkpoint has it. Below `prefix`
    ("model.layers.3.mlp.") stand gate.weight [E, d], with `corrected` gate.e_score_correction_bias [E], the routed experts
    (experts.N.gate_proj.weight and so on, or the stacks experts.gate_up_proj [E, 2i, d] and experts.down_proj [E, d, i]) and
    with `shared` shared_experts.gate_proj.weight and so on, `shared` experts wide.
    """
    gate = take(f"{prefix}gate.weight", routing.experts, hidden)
    correction = take(f"{prefix}gate.e_score_correction_bias", routing.experts) if corrected else None
    stack = ExpertStack(routing.experts + shared, hidden, width, dtype, device)
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
