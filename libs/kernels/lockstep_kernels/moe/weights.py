"""What a mixture-of-experts layer is made of: how tokens choose experts, and the experts' weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.fp8 import BLOCK, E4M3, Fp8Weight
from lockstep_kernels.linear import Packed, pack, pack_fp8, unpack
from lockstep_kernels.swiglu import GateUp, pack_gate_up, pack_gate_up_fp8

MAX_EXPERTS = 1024
MAX_CHOSEN = 32

Weight = torch.Tensor | Fp8Weight


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses `top_k` of `experts` routed experts from its logits [experts].

    score = softmax or sigmoid of the logits; a correction per expert, where there is one, counts for the choice only.
    With groups (of consecutive experts), only experts of the `top_groups` best groups can be chosen; a group is as good as
    its best expert ("max") or as the sum of its best two ("top2"). The weights are the chosen scores, divided by their sum
    if `renormalise`, times `scale`.
    """

    experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    renormalise: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"

    def __post_init__(self) -> None:
        """Raises ValueError if the numbers contradict each other."""
        if not 1 <= self.experts <= MAX_EXPERTS or self.experts % self.groups:
            raise ValueError(
                f"{self.experts} experts in {self.groups} groups: expected 1..{MAX_EXPERTS} in equal groups"
            )
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"{self.top_groups} of {self.groups} groups cannot be kept")
        choice = self.top_groups * self.group_size
        if not 1 <= self.top_k <= min(choice, MAX_CHOSEN):
            raise ValueError(f"{self.top_k} experts cannot be chosen among {choice} (and at most {MAX_CHOSEN})")
        if self.group_score == "top2" and self.groups > 1 and self.group_size < 2:
            raise ValueError(f"groups of {self.group_size} expert have no best two")

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.experts // self.groups


@dataclass(frozen=True, slots=True)
class Gate:
    """What chooses a token's experts: logits = x @ weight.T, then `routing`."""

    routing: Routing
    weight: Packed  # [E, d]
    correction: torch.Tensor | None  # float32 [E], added to the scores for the choice alone
    arrived: torch.Tensor  # int32 [1], always 0 between launches
    deterministic: bool


@dataclass(frozen=True, slots=True)
class Stack:
    """One weight [n, k] of each of E experts; of 8 bits if it has scales, as in `lockstep_kernels.fp8.Fp8Weight`."""

    values: torch.Tensor  # [E, n, k]
    scale: torch.Tensor | None = (
        None  # float32 [E, n], or a scale a block; gate and up have rows of blocks of their own
    )

    @property
    def scales(self) -> Literal["none", "rows", "blocks"]:
        """What scales belong to."""
        if self.scale is None:
            return "none"
        return "rows" if self.scale.dim() == 2 else "blocks"


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of E experts of width i over hidden states of width d, in the form their device computes with.

    Expert e maps x to silu(x @ gate[e].T) * (x @ up[e].T) @ down[e].T. `dtype` is that of x and of the results.
    `deterministic`: the bits of a row of results must not depend on the others, which costs speed on CUDA; on CPU they never do.
    """

    experts: int
    hidden: int
    width: int
    dtype: torch.dtype
    gate_up: Stack | None  # [E, 2i, d], each expert's gate rows before its up rows; None where packed
    down: Stack | None  # [E, d, i]
    packed: tuple[tuple[GateUp, Packed], ...] = ()  # on CPU: one pair an expert
    deterministic: bool = False

    def numbers(self, expert: int) -> tuple[torch.Tensor, ...]:
        """All that an expert is made of: where it lies in the stacks, or on CPU copies of gate, up and down. Of the same shapes
        for all experts."""
        if self.gate_up is None or self.down is None:
            (gate_up, down) = self.packed[expert]
            assert gate_up.up is not None
            return unpack(gate_up.gate), unpack(gate_up.up), unpack(down)
        tensors = (self.gate_up.values, self.down.values, self.gate_up.scale, self.down.scale)
        return tuple(tensor[expert] for tensor in tensors if tensor is not None)

    def replaced(self, experts: Mapping[int, tuple[Weight, Weight, Weight]]) -> ExpertWeights:
        """With other gates, ups and downs at some places. Stacks are written over, and are the same afterwards."""
        if self.gate_up is None or self.down is None:
            packed = list(self.packed)
            for expert, (gate, up, down) in experts.items():
                packed[expert] = _pack_expert(gate, up, down, self.dtype)
            return replace(self, packed=tuple(packed))
        for expert, (gate, up, down) in experts.items():
            _fill(self.gate_up, expert, gate, up)
            _fill(self.down, expert, down)
        return self


class ExpertStack:
    """Takes experts one after the other as a checkpoint yields them, without a second copy of them all."""

    def __init__(
        self,
        experts: int,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool = False,
    ) -> None:
        self._shape = (experts, hidden, width)
        self._dtype, self._device = dtype, device
        self._deterministic = deterministic
        self._packed: list[tuple[GateUp, Packed] | None] = [None] * experts
        self._gate_up: Stack | None = None
        self._down: Stack | None = None
        self._missing = set(range(experts))

    def put(self, expert: int, gate: Weight, up: Weight, down: Weight) -> None:
        """gate and up [i, d], down [d, i], of the stack's dtype or all of 8 bits. They may be freed afterwards."""
        _, hidden, width = self._shape
        for name, weight, shape in (
            ("gate", gate, (width, hidden)),
            ("up", up, (width, hidden)),
            ("down", down, (hidden, width)),
        ):
            check_shape(name, _values(weight), shape)
        self._missing.remove(expert)
        if self._device.type == "cpu":
            self._packed[expert] = _pack_expert(gate, up, down, self._dtype)
            return
        if self._gate_up is None or self._down is None:
            self._gate_up, self._down = (self._empty(*parts) for parts in ((gate, up), (down,)))
        _fill(self._gate_up, expert, gate, up)
        _fill(self._down, expert, down)

    def finish(self) -> ExpertWeights:
        """Raises ValueError if an expert was never put."""
        if self._missing:
            raise ValueError(f"experts {sorted(self._missing)} have no weights")
        packed = tuple(pair for pair in self._packed if pair is not None)
        dtype = packed[0][1].dtype if packed else self._dtype
        return ExpertWeights(*self._shape, dtype, self._gate_up, self._down, packed, self._deterministic)

    def _empty(self, *parts: Weight) -> Stack:
        """For all experts what `parts`, one below the other, are for one."""
        first, count = parts[0], len(parts)
        experts = self._shape[0]
        n, k = _values(first).shape
        if k * _values(first).itemsize % 16:
            raise ValueError(f"rows of {k} elements are no multiple of 16 bytes: the copy engine cannot read them")
        if isinstance(first, torch.Tensor):
            return Stack(torch.empty(experts, count * n, k, dtype=self._dtype, device=self._device))
        rows, *columns = first.scale.shape
        scale = torch.empty(experts, count * rows, *columns, device=self._device)
        return Stack(torch.empty(experts, count * n, k, dtype=E4M3, device=self._device), scale)


def pack_gate(
    weight: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None, *, deterministic: bool = False
) -> Gate:
    """weight [E, d]; correction float32 [E]; `deterministic` as in `lockstep_kernels.linear.pack`."""
    check_shape("gate", weight, (routing.experts, weight.shape[1]))
    if correction is not None:
        check_shape("correction", correction, (routing.experts,))
        if correction.dtype != torch.float32:
            raise ValueError(f"the correction is {correction.dtype}, expected torch.float32")
    packed = pack(weight, prompts=False, deterministic=deterministic)
    return Gate(routing, packed, correction, torch.zeros(1, dtype=torch.int32, device=weight.device), deterministic)


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor, *, deterministic: bool = False) -> ExpertWeights:
    """The weights of experts that are stacked already: gate_up [E, 2i, d] (gate rows first), down [E, d, i]."""
    experts, hidden, width = down.shape
    check_shape("gate_up", gate_up, (experts, 2 * width, hidden))
    if down.device.type != "cpu":
        stacks = Stack(gate_up.contiguous()), Stack(down.contiguous())
        return ExpertWeights(experts, hidden, width, down.dtype, *stacks, deterministic=deterministic)
    stack = ExpertStack(experts, hidden, width, down.dtype, down.device)
    for e in range(experts):
        gate, up = gate_up[e].chunk(2)
        stack.put(e, gate, up, down[e])
    return stack.finish()


def split(weight: Weight, parts: int, dim: int) -> tuple[Weight, ...]:
    """Equal parts of a weight along its rows (dim 0) or columns (dim 1). Raises ValueError if one would end within a block of
    scales."""
    if isinstance(weight, torch.Tensor):
        return weight.chunk(parts, dim)
    if parts == 1:
        return (weight,)
    scales: Sequence[torch.Tensor] = [weight.scale] * parts  # those of rows are the same for all columns
    if weight.blocks or dim == 0:
        if weight.blocks and weight.values.shape[dim] % (parts * BLOCK):
            raise ValueError(f"blocks of scales do not divide into {parts} parts of {tuple(weight.values.shape)}")
        scales = weight.scale.chunk(parts, dim)
    values = weight.values.chunk(parts, dim)
    return tuple(Fp8Weight(v, scale) for v, scale in zip(values, scales, strict=True))


def _fill(stack: Stack, expert: int, *parts: Weight) -> None:
    if len({part.scale.dim() if isinstance(part, Fp8Weight) else 0 for part in parts} | {_scale_dim(stack)}) > 1:
        raise ValueError(f"the weights of expert {expert} are not quantised as those of the others are")
    for target, part in zip(stack.values[expert].chunk(len(parts)), parts, strict=True):
        target.copy_(_values(part))
    if stack.scale is not None:
        for target, part in zip(stack.scale[expert].chunk(len(parts)), parts, strict=True):
            assert isinstance(part, Fp8Weight)
            target.copy_(part.scale)


def _scale_dim(stack: Stack) -> int:
    return 0 if stack.scale is None else stack.scale.dim() - 1


def _values(weight: Weight) -> torch.Tensor:
    return weight.values if isinstance(weight, Fp8Weight) else weight


def _pack_expert(gate: Weight, up: Weight, down: Weight, dtype: torch.dtype) -> tuple[GateUp, Packed]:
    return _pack_gate_up(gate, up, dtype), _pack(down, dtype)


def _pack(weight: Weight, dtype: torch.dtype) -> Packed:
    return pack_fp8(weight, None, dtype) if isinstance(weight, Fp8Weight) else pack(weight.contiguous())


def _pack_gate_up(gate: Weight, up: Weight, dtype: torch.dtype) -> GateUp:
    if isinstance(gate, Fp8Weight) and isinstance(up, Fp8Weight):
        return pack_gate_up_fp8(gate, up, dtype)
    assert isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor)
    return pack_gate_up(gate, up)
