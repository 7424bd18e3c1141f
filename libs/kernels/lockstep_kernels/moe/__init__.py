"""Mixtures of experts: which experts a token chooses, what they make of it, and the sum.

    ids, weights = route(gate_logits(x, gate), routing)
    y = combine(experts(x, ids, weights, packed), ids, plus=residual)

T tokens, d hidden, k chosen experts a token, i an expert's width. A token's expert id of -1 means none.
"""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.linear import Packed, linear, pack
from lockstep_kernels.moe import cpu
from lockstep_kernels.moe.weights import ExpertStack, ExpertWeights, Routing, pack_experts

__all__ = [
    "ExpertStack",
    "ExpertWeights",
    "Routing",
    "combine",
    "experts",
    "gate_logits",
    "pack_experts",
    "pack_gate",
    "route",
]


def pack_gate(weight: torch.Tensor) -> Packed:
    """The weight [E, d] of the gate, for `gate_logits`."""
    return pack(weight, prompts=False)


def gate_logits(x: torch.Tensor, gate: Packed) -> torch.Tensor:
    """x @ gate.T: float32 [T, E] of x [T, d], whatever x's dtype. On CPU a row's bits do not depend on T."""
    if x.is_cuda:
        assert isinstance(gate.weight, torch.Tensor)
        return torch.mm(x, gate.weight.T, out_dtype=torch.float32)
    return linear(x.to(gate.dtype), gate).float()


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


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: ExpertWeights) -> torch.Tensor:
    """[T, k, d] of x's dtype: what each chosen expert makes of its token, times the weight.

    x [T, d] of `packed.dtype`; ids int32 [T, k] below `packed.experts`; weights float32 [T, k]. Where the id is -1 the
    result is undefined: `combine` passes it over. A token's bits on CPU do not depend on the others.
    """
    tokens, chosen = ids.shape
    check_shape("x", x, (tokens, packed.hidden))
    check_shape("weights", weights, (tokens, chosen))
    if x.is_cuda:
        if x.dtype != packed.dtype:
            raise ValueError(f"x is {x.dtype}, these experts take {packed.dtype}")
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
