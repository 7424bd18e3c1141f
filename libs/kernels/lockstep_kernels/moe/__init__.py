"""Mixtures of experts: which experts a token chooses, and what they make of it.

    ids, weights = choose(x, gate)
    y = mix(x, ids, weights, packed, plus=residual)

T tokens, d hidden, k chosen experts a token, i an expert's width. A token's expert id of -1 means none.
"""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.linear import linear
from lockstep_kernels.moe import cpu
from lockstep_kernels.moe.weights import (
    ExpertStack,
    ExpertWeights,
    Gate,
    Routing,
    Weight,
    pack_experts,
    pack_gate,
    split,
)
from lockstep_kernels.rms_norm import Norm, rms_norm

__all__ = [
    "ExpertStack",
    "ExpertWeights",
    "Gate",
    "Routing",
    "Weight",
    "choose",
    "combine",
    "experts",
    "fuses_norm",
    "gate_logits",
    "mix",
    "pack_experts",
    "pack_gate",
    "route",
    "split",
]


def fuses_norm(x: torch.Tensor, packed: ExpertWeights) -> bool:
    """Whether `choose` and `mix` of x [T, d] take a norm along for nothing; otherwise normalise once, before both."""
    return _are_few(x, packed.deterministic)


def choose(
    x: torch.Tensor,
    gate: Gate,
    *,
    live: torch.Tensor | None = None,
    shared: int = 0,
    norm: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` of `gate_logits` of x [T, d], which is normalised first if there is a norm."""
    check_shape("x", x, (x.shape[0], gate.weight.in_features))
    if _are_few(x, gate.deterministic):
        from lockstep_kernels.moe import skinny

        if live is not None:
            check_shape("live", live, (x.shape[0],))
        return skinny.choose(x, norm, gate, live, shared)
    logits = gate_logits(x, gate, norm=norm)
    return route(logits, gate.routing, correction=gate.correction, live=live, shared=shared)


def gate_logits(x: torch.Tensor, gate: Gate, *, norm: Norm | None = None) -> torch.Tensor:
    """x @ gate.weight.T, of x [T, d] normalised first if there is a norm: float32 [T, E], whatever x's dtype.

    A row's bits do not depend on T; on CUDA that takes a gate packed as deterministic.
    """
    return linear(x.to(gate.weight.dtype), gate.weight, norm=norm, wide=True)


def route(
    logits: torch.Tensor,
    routing: Routing,
    *,
    correction: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    shared: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [T, k] int32, weights [T, k] float32) with k = top_k + shared: the experts each token goes to.

    logits float32 [T, E]; correction float32 [E], added to the scores for the choice alone; live bool [T]: tokens that are
    not live go nowhere (ids -1). The last `shared` experts of a token are E, E + 1, ..., which every token goes to with
    weight 1. Any logits, NaN too, give distinct experts below E. Equal scores may fall either way.
    """
    tokens = logits.shape[0]
    check_shape("logits", logits, (tokens, routing.experts))
    if correction is not None:
        check_shape("correction", correction, (routing.experts,))
    if live is not None:
        check_shape("live", live, (tokens,))
    if logits.is_cuda:
        from lockstep_kernels.moe import kernel

        return kernel.route(logits, routing, correction, live, shared)
    return cpu.route(logits, routing, correction, live, shared)


def mix(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: ExpertWeights,
    *,
    plus: torch.Tensor,
    norm: Norm | None = None,
) -> torch.Tensor:
    """plus + the sum of what each token's experts make of it, times their weights: a new [T, d] of plus's dtype.

    x [T, d], normalised first if there is a norm; ids int32 [T, k]; weights float32 [T, k]; plus [T, d]. All experts of
    `packed` are on this device. Sums are float32, in a fixed order. A row's bits do not depend on the others; on CUDA that
    takes experts packed as deterministic.
    """
    if _are_few(x, packed.deterministic):
        from lockstep_kernels.moe import skinny

        _check(x, ids, weights, packed)
        check_shape("plus", plus, tuple(x.shape))
        return skinny.mix(x, ids, weights, packed, plus, norm)
    if norm is not None:
        x = rms_norm(x, *norm)
    return combine(experts(x, ids, weights, packed), ids, plus=plus)


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: ExpertWeights) -> torch.Tensor:
    """[T, k, d] of x's dtype: what each chosen expert makes of its token, times the weight. The first half of `mix`.

    Where the id is -1 the result is undefined: `combine` passes it over.
    """
    _check(x, ids, weights, packed)
    if x.is_cuda:
        from lockstep_kernels.moe import grouped

        return grouped.experts(x, ids, weights, packed)
    return cpu.experts(x, ids, weights, packed)


def combine(pairs: torch.Tensor, ids: torch.Tensor, *, plus: torch.Tensor) -> torch.Tensor:
    """plus [T, d] + the sum over j of pairs[:, j] where ids[:, j] is not -1: a new [T, d] of plus's dtype.

    pairs [T, k, d]; ids int32 [T, k]. Summed in float32 in the order of j, so its bits do not vary from run to run.
    """
    tokens, chosen, hidden = pairs.shape
    check_shape("ids", ids, (tokens, chosen))
    check_shape("plus", plus, (tokens, hidden))
    if pairs.is_cuda:
        from lockstep_kernels.moe import kernel

        return kernel.combine(pairs, ids, plus)
    return cpu.combine(pairs, plus)


def _are_few(x: torch.Tensor, deterministic: bool) -> bool:
    """Tokens that `skinny` serves; its sums are in another order than those of more tokens."""
    if not x.is_cuda or deterministic:
        return False
    from lockstep_kernels.moe import skinny

    return 0 < x.shape[0] <= skinny.MOST_TOKENS


def _check(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: ExpertWeights) -> None:
    tokens, chosen = ids.shape
    check_shape("x", x, (tokens, packed.hidden))
    check_shape("weights", weights, (tokens, chosen))
    if x.is_cuda and not (x.dtype == packed.dtype and x.is_contiguous()):
        raise ValueError(f"x is {x.dtype} with strides {x.stride()}, these experts take {packed.dtype} in whole rows")
