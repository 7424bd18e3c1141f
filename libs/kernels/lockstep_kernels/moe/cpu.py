"""Experts on CPU: one after the other, each over the tokens that chose it.

A token's bits do not depend on the others: the products give a row the same bits in any company (`lockstep_kernels.linear`),
each chosen expert's result is kept apart, and they are added in the order in which the token chose.
"""

from __future__ import annotations

import torch

from lockstep_kernels.linear import linear
from lockstep_kernels.moe import reference
from lockstep_kernels.moe.weights import ExpertWeights, Routing
from lockstep_kernels.swiglu import swiglu

ROW_UNIT = 16  # many rows are rounded up: oneDNN compiles a product for every number of rows it meets


def route(
    logits: torch.Tensor,
    routing: Routing,
    correction: torch.Tensor | None,
    live: torch.Tensor | None,
    shared: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the public function."""
    scores = logits.softmax(-1) if routing.scoring == "softmax" else _sigmoid(logits)
    return reference.choose(scores, routing, correction, live, shared)


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: ExpertWeights) -> torch.Tensor:
    """[T, k, d] of x's dtype: what each chosen expert makes of the token, times its weight; zeros where none is chosen."""
    tokens, chosen = ids.shape
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten() + 1, minlength=packed.experts + 1).tolist()
    pairs = x.new_zeros(tokens * chosen, packed.hidden)
    factors = weights.view(-1, 1)
    start = counts[0]  # pairs without an expert
    for count, (gate_up, down) in zip(counts[1:], packed.packed, strict=True):
        if count:
            mine = order[start : start + count]
            rows = _gathered(x, mine.div(chosen, rounding_mode="floor"))
            results = linear(swiglu(rows, gate_up), down)[:count]
            pairs.index_copy_(0, mine, (results * factors[mine]).to(x.dtype))
            start += count
    return pairs.view(tokens, chosen, packed.hidden)


def combine(pairs: torch.Tensor, plus: torch.Tensor) -> torch.Tensor:
    """plus [T, d], then the pairs [T, k, d] in their order."""
    total = plus.to(torch.float32, copy=True)
    for pair in pairs.unbind(1):
        total += pair
    return total.to(plus.dtype)


def _gathered(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    count = tokens.shape[0]
    if count <= ROW_UNIT:
        return x[tokens]
    rows = x.new_zeros(-(-count // ROW_UNIT) * ROW_UNIT, x.shape[1])
    torch.index_select(x, 0, tokens, out=rows[:count])
    return rows


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Over whole vectors only, for every thread: torch's vector loop and its scalar tail compute exp differently."""
    unit = 64 * torch.get_num_threads()
    whole = x.new_zeros(-(-x.numel() // unit) * unit)
    whole[: x.numel()] = x.flatten()
    return whole.sigmoid_()[: x.numel()].view_as(x)
