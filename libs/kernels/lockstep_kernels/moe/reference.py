"""What the ops of a mixture-of-experts layer mean, in plain torch and float32."""

from __future__ import annotations

import torch

from lockstep_kernels.moe.plan import Plan, plan_blocks
from lockstep_kernels.moe.weights import Routing


def route(
    logits: torch.Tensor,
    routing: Routing,
    correction: torch.Tensor | None,
    live: torch.Tensor | None,
    shared: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the public function."""
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    return choose(scores, routing, correction, live, shared)


def choose(
    scores: torch.Tensor,
    routing: Routing,
    correction: torch.Tensor | None,
    live: torch.Tensor | None,
    shared: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route`, from the scores float32 [T, E] of the logits."""
    tokens = scores.shape[0]
    choice = scores if correction is None else scores + correction
    if routing.groups > 1:
        choice = choice.masked_fill(~_kept(choice, routing), -torch.inf)
    ids = choice.topk(routing.top_k, -1).indices
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routing.scale
    if shared:
        always = torch.arange(routing.experts, routing.experts + shared, device=ids.device)
        ids = torch.cat((ids, always.expand(tokens, -1)), 1)
        weights = torch.cat((weights, weights.new_ones(tokens, shared)), 1)
    if live is not None:
        ids = ids.masked_fill(~live[:, None], -1)
    return ids.to(torch.int32), weights


def plan(ids: torch.Tensor, experts: int, block_m: int) -> Plan:
    """The pairs of ids int32 [T, k] by expert, in blocks of at most block_m."""
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)[(flat < 0).sum() :]
    counts = torch.bincount(flat[flat >= 0], minlength=experts)
    ends = counts.cumsum(0)
    blocks = torch.full((3, plan_blocks(flat.numel(), experts, block_m)), -1)
    i = 0
    for e, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
        for begin in range(end - count, end, block_m):
            blocks[:, i] = torch.tensor((e, begin, min(begin + block_m, end)))
            i += 1
    return Plan(order.int(), ends.int(), blocks.to(ids.device, torch.int32), block_m)


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """[T, k, d] float32: what each chosen expert makes of the token, times its weight; zeros where no expert is chosen.

    x [T, d]; ids [T, k], -1: none; weights [T, k]; gate_up [E, 2i, d]; down [E, d, i]. Token by token.
    """
    pairs = torch.zeros(*ids.shape, x.shape[1], device=x.device)
    for t, chosen in enumerate(ids.tolist()):
        for j, e in enumerate(chosen):
            if e >= 0:
                gate, up = (gate_up[e].float() @ x[t].float()).chunk(2)
                pairs[t, j] = down[e].float() @ (torch.nn.functional.silu(gate) * up) * weights[t, j]
    return pairs


def _kept(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[T, E] bool: the expert's group is one of the best."""
    grouped = choice.view(-1, routing.groups, routing.group_size)
    best = grouped.topk(2, -1).values.sum(-1) if routing.group_score == "top2" else grouped.amax(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.top_groups, -1).indices, True)
    return kept.repeat_interleave(routing.group_size, 1)
