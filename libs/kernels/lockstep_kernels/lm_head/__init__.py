"""From hidden states to logits: the one product whose result is float32, as bfloat16 would make ties of close logits."""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.linear import Packed, linear, pack
from lockstep_kernels.lm_head import cpu
from lockstep_kernels.lm_head.cpu import Half

__all__ = ["Half", "Head", "lm_head", "pack_head"]

Head = Packed | Half


def pack_head(weight: torch.Tensor) -> Head:
    """The weight [vocab, d] in the order that `lm_head` reads fastest on its device. The weight may be freed."""
    return cpu.pack(weight) if cpu.can_pack(weight) else pack(weight)


def lm_head(hidden: torch.Tensor, weight: Head) -> torch.Tensor:
    """hidden @ weight.T as float32 [S, vocab], of hidden [S, d]. A row's bits do not depend on S."""
    check_shape("hidden", hidden, (hidden.shape[0], weight.in_features))
    if isinstance(weight, Half):
        return cpu.lm_head(hidden, weight)
    return linear(hidden, weight).float()
