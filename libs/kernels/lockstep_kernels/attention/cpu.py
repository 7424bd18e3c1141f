"""Attention on CPU, with bits that depend on nothing but the sequence itself.

What makes it so:
- Keys are taken in tiles of TILE positions, counted from position 0. A query sees whole tiles: what lies beyond its own
  position gets the score -inf, so the weight exactly 0, and the values read there are those of its sequence's last
  position (finite whenever the sequence is), so the product adds exactly 0.
- A score is one product over the head's width. Softmax adds along a row in lanes that TILE is a multiple of, so a
  longer row of zero weights adds zeros to the same lanes.
- Weights times values is one product of inner length TILE for each tile, added tile after tile.
- Each product has a multiple of ROWS query rows. MKL's float32 kernels give a row the same bits for any such number and
  any number of threads; with fewer rows they do not.
- Decode and prefill differ only in how many query rows meet how many tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lockstep_kernels.attention.batch import PagedBatch

TILE = 64
ROWS = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """New tokens [first, first + count) of each sequence of a segment, against the first `keys` positions."""

    first: int
    count: int
    keys: int
    mask: torch.Tensor  # float32 0 or -inf, added to the scores of the last mask.shape[-1] of the keys
    queries: torch.Tensor  # workspace [kv_heads * B, rows, d] float32; rows beyond count * group are padding
    scores: torch.Tensor  # workspace [kv_heads * B, rows, keys] float32
    weights: torch.Tensor  # the same
    mixed: torch.Tensor  # workspace like queries


@dataclass(frozen=True, slots=True)
class Segment:
    """Sequences that are computed together: many with one new token each, or one with any number."""

    first_token: int
    sequences: int
    new: int  # new tokens of each sequence
    slots: torch.Tensor  # [sequences * keys] int64
    gathered: torch.Tensor  # workspace [2 * kv_heads, sequences * keys, d] of the cache's dtype
    wide: torch.Tensor  # the same in float32
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The segments of a pass, in the order of its tokens."""

    segments: tuple[Segment, ...]
    kv_heads: int
    group: int


def prepare(batch: PagedBatch, group: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Prepared:
    """See the public function; `group` is the number of query heads of a key/value head."""
    segments = []
    first_token = 0
    for start, end in _runs(batch.query_lens):
        new, lens = batch.query_lens[start], batch.seq_lens[start:end]
        keys = _whole(max(lens), TILE)
        slots = _slots(batch.block_table[start:end], lens, keys, batch.block_size)
        gathered = torch.empty(2 * kv_heads, slots.numel(), head_dim, dtype=dtype)
        wide = gathered if dtype == torch.float32 else torch.empty(gathered.shape, dtype=torch.float32)
        spans = _decode_spans(lens, keys) if new == 1 else _prefill_spans(lens[0] - new, new, group)
        tiles = _tiles(spans, kv_heads * (end - start), group, head_dim)
        segments.append(Segment(first_token, end - start, new, slots, gathered, wide, tiles))
        first_token += new * (end - start)
    return Prepared(tuple(segments), kv_heads, group)


def attention(q: torch.Tensor, cache: torch.Tensor, prepared: Prepared, scale: float, out: torch.Tensor) -> None:
    """See the public function."""
    kv_heads, group, width = prepared.kv_heads, prepared.group, q.shape[-1]
    flat = cache.view(2 * kv_heads, -1, width)
    for segment in prepared.segments:
        torch.index_select(flat, 1, segment.slots, out=segment.gathered)
        if segment.wide is not segment.gathered:
            segment.wide.copy_(segment.gathered)
        keys, values = segment.wide.view(2, kv_heads * segment.sequences, -1, width)
        tokens = slice(segment.first_token, segment.first_token + segment.sequences * segment.new)
        split = (segment.sequences, segment.new, kv_heads, group, width)
        heads_first = q[tokens].view(split).permute(2, 0, 1, 3, 4)
        results = out[tokens].view(split).permute(2, 0, 1, 3, 4)
        for tile in segment.tiles:
            rows, shape = tile.count * group, (kv_heads, segment.sequences, tile.count, group, width)
            part = slice(tile.first, tile.first + tile.count)
            tile.queries[:, :rows].view(shape).copy_(heads_first[:, :, part]).mul_(scale)
            _attend(tile, keys, values)
            results[:, :, part].copy_(tile.mixed[:, :rows].view(shape))


def _attend(tile: Tile, keys: torch.Tensor, values: torch.Tensor) -> None:
    """tile.mixed = softmax(queries . keys + mask) values, for each of the heads and sequences."""
    scores, weights, mixed = tile.scores, tile.weights, tile.mixed
    torch.bmm(tile.queries, keys[:, : tile.keys].transpose(1, 2), out=scores)
    per_sequence = scores.view(-1, *tile.mask.shape[:-2], scores.shape[1], tile.keys)
    per_sequence[..., tile.keys - tile.mask.shape[-1] :].add_(tile.mask)
    torch.softmax(scores, -1, out=weights)
    torch.bmm(weights[..., :TILE], values[:, :TILE], out=mixed)
    for start in range(TILE, tile.keys, TILE):
        mixed.baddbmm_(weights[..., start : start + TILE], values[:, start : start + TILE])


def _runs(query_lens: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Cuts the sequences into runs [start, end): neighbours with one new token each stay together, all others are alone."""
    start = 0
    for i, new in enumerate(query_lens, 1):
        if new > 1 or i == len(query_lens) or query_lens[i] > 1:
            yield start, i
            start = i


def _slots(table: torch.Tensor, lens: tuple[int, ...], keys: int, block_size: int) -> torch.Tensor:
    """Where positions 0 to keys - 1 of each sequence lie; those beyond its length read its last position instead."""
    last = torch.tensor(lens).sub_(1).unsqueeze(1)
    positions = torch.minimum(torch.arange(keys), last)
    blocks = positions // block_size
    return table.gather(1, blocks).sub_(blocks).mul_(block_size).add_(positions).flatten()


_Span = tuple[int, int, int, torch.Tensor]  # the first four fields of a tile


def _decode_spans(lens: tuple[int, ...], keys: int) -> list[_Span]:
    mask = torch.zeros(len(lens), 1, keys)
    mask.masked_fill_(torch.arange(keys) >= torch.tensor(lens).view(-1, 1, 1), -torch.inf)
    return [(0, 1, keys, mask)]


def _prefill_spans(start: int, new: int, group: int) -> list[_Span]:
    """Queries [start, start + new) cut at multiples of TILE, so that only a tile's last keys can lie in its future."""
    triangle = torch.full((TILE, TILE), -torch.inf).triu_(1).repeat_interleave(group, 0)
    spans = []
    position, end = start, start + new
    while position < end:
        base = position // TILE * TILE
        until = min(base + TILE, end)
        rows = triangle[(position - base) * group : (until - base) * group]
        mask = torch.zeros(_whole(rows.shape[0], ROWS), TILE)
        mask[: rows.shape[0]] = rows
        spans.append((position - start, until - position, base + TILE, mask))
        position = until
    return spans


def _tiles(spans: list[_Span], batches: int, group: int, head_dim: int) -> tuple[Tile, ...]:
    """The tiles of a segment; they run one after the other and so share their workspaces."""
    rows = [_whole(count * group, ROWS) for _, count, _, _ in spans]
    most_scores = max(n * keys for n, (_, _, keys, _) in zip(rows, spans, strict=True))
    queries, mixed = torch.zeros(2, batches * max(rows) * head_dim)
    scores, weights = torch.empty(2, batches * most_scores)

    def shaped(space: torch.Tensor, *shape: int) -> torch.Tensor:
        return space[: math.prod(shape)].view(shape)

    return tuple(
        Tile(
            *span,
            shaped(queries, batches, n, head_dim),
            shaped(scores, batches, n, span[2]),
            shaped(weights, batches, n, span[2]),
            shaped(mixed, batches, n, head_dim),
        )
        for n, span in zip(rows, spans, strict=True)
    )


def _whole(count: int, unit: int) -> int:
    """`count` rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit
