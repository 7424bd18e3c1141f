"""Latent attention on CPU: absorbed in prefill and decode alike, with bits that depend on nothing but the sequence itself.

As in `lockstep_kernels.attention.cpu`: keys come in whole tiles from position 0 on, a tile's inner length is fixed, tiles are
added one after the other, and every product has a multiple of ROWS query rows. What lies beyond a query's position gets the
weight exactly 0, and is read from the sequence's last position, which is finite whenever the sequence is. Of the log-sum-exp,
the sum is 1 / the weight of the highest score.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lockstep_kernels.mla.batch import Expansion, LatentBatch

TILE = 64
ROWS = 4


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence of a pass: its new tokens, what they see, and where its latents lie."""

    tokens: slice
    start: int  # position of the first new token if `causal`
    total: int  # positions, which all see if not
    causal: bool
    slots: torch.Tensor  # [whole tiles of positions] int64; beyond the last position, that of the last position


Prepared = tuple[Sequence, ...]


def prepare(batch: LatentBatch) -> Prepared:
    """See the public function."""
    if len(batch.query_lens) != len(batch.block_table):
        raise ValueError("latent attention on CPU needs the lengths on the host: query_lens and host_seq_lens")
    sequences = []
    first = 0
    for i, (new, total) in enumerate(zip(batch.query_lens, batch.host_seq_lens, strict=True)):
        positions = torch.arange(_whole(total, TILE)).clamp_(max=total - 1)  # none of a sequence without any
        columns = positions // batch.block_size
        slots = batch.block_table[i][columns] * batch.block_size + (positions - columns * batch.block_size)
        sequences.append(Sequence(slice(first, first + new), total - new, total, batch.causal, slots))
        first += new
    return tuple(sequences)


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    prepared: Prepared,
    expansion: Expansion,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """See the public function."""
    tokens, heads, _ = q.shape
    rank, nope, width = expansion.rank, expansion.nope, cache.shape[-1]
    wide = torch.zeros(heads, _whole(tokens, ROWS), nope)
    wide[:, :tokens] = q[..., :nope].transpose(0, 1)
    queries = torch.empty(tokens, heads, width)
    queries[..., :rank] = torch.bmm(wide, expansion.keys)[:, :tokens].transpose(0, 1)
    queries[..., rank:] = q[..., nope:]
    mixed = torch.zeros(heads, wide.shape[1], rank)
    rows = cache.view(-1, width)
    if lse is not None:
        lse.fill_(-torch.inf)
    for sequence in prepared:
        latents = rows[sequence.slots].float()
        for part, seen in _spans(sequence):
            own_lse = None if lse is None else lse[part]
            mixed[:, part] = _attend(queries[part], latents[:seen], sequence, part, rank, scale, own_lse)
    values = torch.bmm(mixed, expansion.values)[:, :tokens]
    out[:tokens].view(tokens, heads, -1).copy_(values.transpose(0, 1))


def _attend(
    queries: torch.Tensor,
    latents: torch.Tensor,
    sequence: Sequence,
    part: slice,
    rank: int,
    scale: float,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """[H, count, rank]: softmax(scale * queries . latents) latents, of queries [count, H, width] up to their positions; their
    log-sum-exp to lse [count, H]."""
    count, heads, width = queries.shape
    padded = torch.zeros(1, _whole(count * heads, ROWS), width)
    padded[0, : count * heads] = queries.flatten(0, 1)
    scores = torch.bmm(padded, latents.T.unsqueeze(0)).mul_(scale)
    if sequence.causal:
        positions = torch.arange(part.start, part.stop) - sequence.tokens.start + sequence.start
        hidden = torch.arange(len(latents)) > positions.repeat_interleave(heads).unsqueeze(1)
    else:
        hidden = torch.arange(len(latents)) >= sequence.total
    scores[0, : count * heads].masked_fill_(hidden, -torch.inf)
    weights = torch.softmax(scores, -1)
    if lse is not None:
        logs = scores.amax(-1) - weights.amax(-1).log_()
        lse.copy_(logs[0, : count * heads].view(count, heads))
    values = latents[:, :rank].unsqueeze(0)
    mixed = torch.bmm(weights[..., :TILE], values[:, :TILE])
    for i in range(TILE, len(latents), TILE):
        mixed.baddbmm_(weights[..., i : i + TILE], values[:, i : i + TILE])
    return mixed[0, : count * heads].view(count, heads, rank).transpose(0, 1)


def _spans(sequence: Sequence) -> Iterator[tuple[slice, int]]:
    """Tokens of a pass cut where their positions enter a new tile, and how many positions they see in whole tiles."""
    token, position = sequence.tokens.start, sequence.start if sequence.causal else 0
    while token < sequence.tokens.stop and sequence.total:
        seen = position // TILE * TILE + TILE
        until = min(token + seen - position, sequence.tokens.stop)
        yield slice(token, until), seen if sequence.causal else len(sequence.slots)
        position += until - token
        token = until


def _whole(count: int, unit: int) -> int:
    """`count` rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit
