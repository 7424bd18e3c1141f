"""Prompts without a prefix by cuDNN: neighbours in a pass that are equally long are one dense, causal batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

UNIT: Final = 512  # tokens: cuDNN prepares a plan for each length it meets, so let there be few


@dataclass(frozen=True, slots=True)
class Dense:
    """The first `tokens` tokens of each of `sequences` neighbours with `length` new tokens and no prefix."""

    first: int
    sequences: int
    length: int
    tokens: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """[sequences, tokens, heads, d], a view of x [T, heads, d]."""
        stride, *others = x.stride()
        shape = (self.sequences, self.tokens, *x.shape[1:])
        return x[self.first :].as_strided(shape, (self.length * stride, stride, *others))


def parts(query_lens: Sequence[int], seq_lens: Sequence[int], *, shortest: int) -> Iterator[Dense]:
    """Neighbours of one length, `shortest` or longer, without a prefix: whole units of them. Lengths of a pass in its order."""
    first, start = 0, 0
    for end in range(1, len(query_lens) + 1):
        length = query_lens[start]
        if end < len(query_lens) and query_lens[end] == length and seq_lens[end] == seq_lens[start]:
            continue
        if length >= max(shortest, UNIT) and seq_lens[start] == length:
            yield Dense(first, end - start, length, length // UNIT * UNIT)
        first += (end - start) * length
        start = end


def done(dense: Sequence[Dense]) -> dict[int, int]:
    """How many tokens of the sequences that begin at these tokens of a pass the parts cover."""
    return {part.first + i * part.length: part.tokens for part in dense for i in range(part.sequences)}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of tokens among themselves, laid out as q is.

    q [sequences, tokens, heads, d], k [.., h, d] and v [.., h, e], where h divides the query heads: [.., heads, e].
    """
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return mixed.transpose(1, 2)
