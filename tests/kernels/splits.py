"""How context parallelism deals a sequence's keys out, in plain numbers, and attention to all of them in float64."""

from __future__ import annotations

import torch


def owner(positions: torch.Tensor, size: int, ranks: int) -> torch.Tensor:
    """The rank that keeps each position: blocks of `size` in turn."""
    return positions // size % ranks


def local_length(length: int, rank: int, size: int, ranks: int) -> int:
    """How many of the first `length` positions a rank keeps."""
    return int((owner(torch.arange(length), size, ranks) == rank).sum())


def slots(table: torch.Tensor, positions: torch.Tensor, size: int, ranks: int) -> torch.Tensor:
    """Where their owners keep positions of a sequence with blocks `table` of size * ranks tokens."""
    return table[positions // (size * ranks)] * size + positions % size


def mirrored(new: int, ranks: int) -> list[list[tuple[int, int]]]:
    """For each rank the chunks [start, end) of `new` tokens that it computes: one from the front, one from the back."""
    size = -(-new // (2 * ranks))
    chunks = [(min(i * size, new), min((i + 1) * size, new)) for i in range(2 * ranks)]
    return [[chunk for chunk in (chunks[r], chunks[-1 - r]) if chunk[0] < chunk[1]] for r in range(ranks)]


def exact(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, v], lse [T, H]) in float64, of q [T, H, d], keys [n, H, d] and values [n, H, v]; query t sees seen[t] keys."""
    scores = torch.einsum("thd,shd->ths", q.double(), keys.double()) * scale
    hidden = torch.arange(len(keys), device=q.device) >= seen.to(q.device).view(-1, 1, 1)
    scores.masked_fill_(hidden, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0)
    return torch.einsum("ths,shv->thv", weights, values.double()), torch.logsumexp(scores, -1)
