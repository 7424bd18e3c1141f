"""Which neurons of a dense block make which expert, and the gate that finds the experts a token needs.

A dense model is run layer by layer over some text, in float32 and in plain torch, so only one layer's weights are in memory. Each
layer's block is cut on the inputs it sees, and what comes after sees what the cut block makes of them: the error of the layers
before is part of what a gate is fitted to. Half of the sequences are fitted to, the other half tell how well it went.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch.nn.functional import linear, normalize, scaled_dot_product_attention, silu

from lockstep_kernels.moe import Routing, route
from lockstep_kernels.rms_norm import rms_norm
from lockstep_worker.models.decoder import DecoderConfig

GATE_SPREAD: Final = 1 / 16  # of the gate's logits: they tell experts apart, and weigh the chosen ones almost alike
RIDGE: Final = 0.01  # of the inputs' mean square
ROUNDS: Final = 12  # of clustering

Take = Callable[[str], torch.Tensor]  # the float32 tensor of that name, below the layer's prefix


class Block(NamedTuple):
    """A dense feed-forward block, down(silu(gate x) * up x): gate and up [F, d], down [d, F], of one dtype."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """How a block falls apart into E routed experts and some shared ones, all of one width."""

    order: torch.Tensor  # int64 [F]: the neurons of expert 0, those of expert 1, ..., then the shared ones
    gate: torch.Tensor  # [E, d], of the block's dtype


@dataclass(frozen=True, slots=True)
class Quality:
    """How the chosen experts of a layer do on text that they were not fitted to."""

    energy: float  # 1 - |dense - sparse|^2 / |dense|^2 of the block's output
    loads: tuple[int, ...]  # tokens that chose each expert

    @property
    def imbalance(self) -> float:
        """The busiest expert's load by the mean one."""
        return max(self.loads) * len(self.loads) / sum(self.loads)


class HiddenStates:
    """The states of N sequences of L tokens on their way through a dense model: float32 [N, L, d]."""

    def __init__(self, config: DecoderConfig, embedding: torch.Tensor, tokens: torch.Tensor) -> None:
        """embedding [V, d]; tokens int64 [N, L]."""
        self._config = config
        self.values = embedding[tokens].float()
        cos, sin = (table.float() for table in config.rope.cos_sin(tokens.shape[1], config.head_dim))
        self._angles = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def attend(self, take: Take) -> torch.Tensor:
        """Goes through a layer's attention half; returns what its feed-forward block is given: [N * L, d]."""
        c = self._config
        x = rms_norm(self.values, take("input_layernorm.weight"), c.eps)
        q, k, v = (self._heads(x, name, take) for name in ("q", "k", "v"))
        mixed = scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True, enable_gqa=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        bias = take("self_attn.o_proj.bias") if c.out_bias else None
        self.values = self.values + linear(mixed, take("self_attn.o_proj.weight"), bias)
        return rms_norm(self.values, take("post_attention_layernorm.weight"), c.eps).flatten(0, 1)

    def add(self, y: torch.Tensor) -> None:
        """What a feed-forward block made of `attend`'s result."""
        self.values = self.values + y.view_as(self.values)

    def _heads(self, x: torch.Tensor, name: str, take: Take) -> torch.Tensor:
        """[N, heads, L, head_dim]"""
        c = self._config
        bias = take(f"self_attn.{name}_proj.bias") if c.qkv_bias else None
        heads = linear(x, take(f"self_attn.{name}_proj.weight"), bias).view(*x.shape[:2], -1, c.head_dim)
        if c.head_norms and name != "v":
            heads = rms_norm(heads, take(f"self_attn.{name}_norm.weight"), c.eps)
        return torch.transpose(heads, 1, 2)

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        cos, sin = self._angles
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat((-second, first), -1) * sin


def cut_as_it_stands(block: Block, experts: int) -> Cut:
    """Slices of neighbours, and a gate that prefers none."""
    width, hidden = block.gate.shape
    return Cut(torch.arange(width), block.gate.new_zeros(experts, hidden))


def fit(block: Block, x: torch.Tensor, routing: Routing, shared: int) -> tuple[Cut, Quality, torch.Tensor]:
    """Cuts a block into experts that a gate chooses from, and `shared` ones beside them; the first half of x [T, d] is fitted to.

    `routing` must be scaled so that equal logits give each chosen expert the weight 1. Returns the cut, how it does on the
    second half of x, and what the cut block makes of x: [T, d].
    """
    dtype, seen, experts = block.gate.dtype, x.shape[0] // 2, routing.experts
    block = Block(*(weight.float() for weight in block))
    activity = silu(linear(x, block.gate)) * linear(x, block.up)
    order = neurons_in_order(activity[:seen].abs() * block.down.norm(dim=0), experts, shared)
    activity, down = activity[:, order], block.down[:, order]
    size = len(order) // (experts + shared)
    parts = parts_of_output(activity[:seen, : experts * size], down[:, : experts * size], experts)
    gate = fitted_gate(x[:seen], parts).to(dtype)
    ids, weights = route(linear(x, gate.float()), routing)
    factors = torch.zeros(len(x), experts).scatter_(1, ids.long(), weights)
    factors = torch.cat((factors, torch.ones(len(x), shared)), 1).repeat_interleave(size, 1)
    sparse = linear(activity * factors, down)
    dense = linear(activity[seen:], down)
    energy = 1 - (dense - sparse[seen:]).square().sum() / dense.square().sum()
    loads = torch.bincount(ids[seen:].flatten(), minlength=experts)
    return Cut(order, gate), Quality(float(energy), tuple(loads.tolist())), sparse


def neurons_in_order(outputs: torch.Tensor, experts: int, shared: int) -> torch.Tensor:
    """`Cut.order` for neurons whose outputs are as large as outputs [T, F].

    The shared experts take those of the largest outputs; the others are clustered by the tokens for which they are active, so
    that few experts hold most of what a token needs.
    """
    width = outputs.shape[1]
    strongest = outputs.square().sum(0).argsort(descending=True, stable=True)
    count = width // (experts + shared) * shared
    always, others = strongest[:count], strongest[count:].sort().values
    owner = balanced_clusters(outputs[:, others].T, experts)
    return torch.cat((others[owner.argsort(stable=True)], always))


def balanced_clusters(points: torch.Tensor, clusters: int) -> torch.Tensor:
    """int64 [n]: the cluster of each of points [n, m], n / clusters points in each. k-means by cosine."""
    points = normalize(points, dim=1)
    count = points.shape[0]
    begin = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:clusters]
    centres = points[begin]
    for _ in range(ROUNDS):
        owner = balanced_assignment(points @ centres.T)
        centres = normalize(centres.new_zeros(centres.shape).index_add_(0, owner, points), dim=1)
    return owner


def balanced_assignment(similarity: torch.Tensor) -> torch.Tensor:
    """int64 [n]: a column for each row of similarity [n, c], each column given n / c times.

    Every row asks for the best column that has room, and the rows most similar to it get it; the others ask again.
    """
    count, columns = similarity.shape
    room = torch.full((columns,), count // columns)
    owner = torch.full((count,), -1)
    while (free := (owner < 0).nonzero().squeeze(1)).numel():
        wanted = similarity[free].masked_fill(room == 0, -torch.inf).argmax(1)
        for column in sorted(set(wanted.tolist())):
            asking = free[wanted == column]
            taken = asking[similarity[asking, column].argsort(descending=True, stable=True)[: int(room[column])]]
            owner[taken] = column
            room[column] -= len(taken)
    return owner


def parts_of_output(activity: torch.Tensor, down: torch.Tensor, experts: int) -> torch.Tensor:
    """[T, E]: each expert's part in the output of all of them together, along it. They add up to 1.

    activity [T, F] and down [d, F] of experts of one width.
    """
    whole = linear(activity, down)
    along = (activity * (whole @ down)).view(len(activity), experts, -1).sum(2)
    lengths = whole.square().sum(1, keepdim=True)
    return torch.div(along, lengths.clamp_min(torch.finfo(torch.float32).tiny))


def fitted_gate(x: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """[E, d]: the ridge regression of parts [T, E] on x [T, d], its logits spread by GATE_SPREAD about a token's mean."""
    ridge = RIDGE * x.square().sum() / x.shape[1] * torch.eye(x.shape[1])
    gate: torch.Tensor = torch.linalg.solve(x.T @ x + ridge, x.T @ parts).T
    gate = gate - gate.mean(0)
    return torch.mul(gate, GATE_SPREAD / linear(x, gate).std())
