"""What a mixture-of-experts layer is made of: how tokens choose experts, and the experts' weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.linear import Packed, pack
from lockstep_kernels.swiglu import GateUp, pack_gate_up

MAX_EXPERTS = 1024
MAX_CHOSEN = 32


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
class ExpertWeights:
    """The weights of E experts of width i over hidden states of width d, in the form their device computes with.

    Expert e maps x to silu(x @ gate[e].T) * (x @ up[e].T) @ down[e].T. `dtype` is that of x and of the results.
    `deterministic`: the bits of a row of results must not depend on the others, which costs speed on CUDA; on CPU they never do.
    """

    experts: int
    hidden: int
    width: int
    dtype: torch.dtype
    gate_up: torch.Tensor | None  # [E, 2i, d], each expert's gate rows before its up rows; None where packed
    down: torch.Tensor | None  # [E, d, i]
    packed: tuple[tuple[GateUp, Packed], ...] = ()  # on CPU: one pair an expert
    deterministic: bool = False


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
        self._deterministic = deterministic
        self._packed: list[tuple[GateUp, Packed] | None] = [None] * experts
        self._gate_up = self._down = None
        if device.type != "cpu":
            self._gate_up = torch.empty(experts, 2 * width, hidden, dtype=dtype, device=device)
            self._down = torch.empty(experts, hidden, width, dtype=dtype, device=device)
        self._missing = set(range(experts))

    def put(self, expert: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """gate and up [i, d], down [d, i]. They may be freed afterwards."""
        _, hidden, width = self._shape
        for name, weight, shape in (
            ("gate", gate, (width, hidden)),
            ("up", up, (width, hidden)),
            ("down", down, (hidden, width)),
        ):
            check_shape(name, weight, shape)
        self._missing.remove(expert)
        if self._gate_up is None or self._down is None:
            self._packed[expert] = (pack_gate_up(gate, up), pack(down.contiguous()))
        else:
            self._gate_up[expert, :width].copy_(gate)
            self._gate_up[expert, width:].copy_(up)
            self._down[expert].copy_(down)

    def finish(self) -> ExpertWeights:
        """Raises ValueError if an expert was never put."""
        if self._missing:
            raise ValueError(f"experts {sorted(self._missing)} have no weights")
        packed = tuple(pair for pair in self._packed if pair is not None)
        dtype = packed[0][1].dtype if self._down is None else self._down.dtype
        return ExpertWeights(*self._shape, dtype, self._gate_up, self._down, packed, self._deterministic)


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor, *, deterministic: bool = False) -> ExpertWeights:
    """The weights of experts that are stacked already: gate_up [E, 2i, d] (gate rows first), down [E, d, i]."""
    experts, hidden, width = down.shape
    check_shape("gate_up", gate_up, (experts, 2 * width, hidden))
    if down.device.type != "cpu":
        stacks = gate_up.contiguous(), down.contiguous()
        return ExpertWeights(experts, hidden, width, down.dtype, *stacks, deterministic=deterministic)
    stack = ExpertStack(experts, hidden, width, down.dtype, down.device)
    for e in range(experts):
        gate, up = gate_up[e].chunk(2)
        stack.put(e, gate, up, down[e])
    return stack.finish()
