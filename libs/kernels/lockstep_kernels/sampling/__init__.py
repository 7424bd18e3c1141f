"""How a token is chosen from the logits of a row. Each op is defined in `reference`; here the fastest equal one is chosen."""

from __future__ import annotations

import torch

from lockstep_kernels.sampling import cpu, reference
from lockstep_kernels.sampling.reference import (
    LOWEST_LOGPROB,
    add_bias,
    gumbel,
    keep_min_p,
    keep_top_k,
    penalise,
    suppress,
    temper,
    token_logprobs,
    top_logprobs,
)

__all__ = [
    "LOWEST_LOGPROB",
    "add_bias",
    "draw",
    "greedy",
    "gumbel",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "penalise",
    "suppress",
    "temper",
    "token_logprobs",
    "top_logprobs",
]


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [n] int64, values [n]): the first largest logit of each row [n, V]. A NaN counts as the largest."""
    return cpu.greedy(logits) if logits.device.type == "cpu" else reference.greedy(logits)


def draw(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """[n] int64: a token of softmax(scores [n, V]), given Gumbel noise [n, V]."""
    return cpu.draw(scores, noise) if scores.device.type == "cpu" else reference.draw(scores, noise)


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the fewest best tokens whose probability reaches top_p [n], and those equal to the last of them."""
    return cpu.keep_top_p(scores, top_p) if scores.device.type == "cpu" else reference.keep_top_p(scores, top_p)
