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

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lockstep_kernels.attention.batch import PagedBatch

TILE = 64
ROWS = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """New tokens [first, first + count) of each sequence of a segment, against the first whole tiles of its positions.

    Everything is a view of the segment's workspaces, made once, as views in every layer would cost as much as the sums.
    With N = kv_heads * sequences and a multiple of ROWS rows:
    """

    first: int
    count: int
    mask: torch.Tensor  # float32 0 or -inf
    masked: torch.Tensor  # the scores that `mask` is added to
    queries_in: torch.Tensor  # [kv_heads, sequences, count, group, d] of `queries`, whose other rows are padding
    queries: torch.Tensor  # [N, rows, d] float32
    keys: torch.Tensor  # [N, d, keys]
    scores: torch.Tensor  # [N, rows, keys]
    weights: torch.Tensor  # [N, rows, keys]
    products: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # weights and values of each tile of keys
    mixed: torch.Tensor  # [N, rows, d]
    mixed_out: torch.Tensor  # of `mixed` what `queries_in` is of `queries`


@dataclass(frozen=True, slots=True)
class Segment:
    """Sequences that are computed together: many with one new token each, or one with any number."""

    tokens: slice
    shape: tuple[int, int, int, int, int]  # sequences, new tokens of each, kv_heads, group, d
    rows: torch.Tensor  # which rows of the cache, of head_dim values each, are gathered
    gathered: torch.Tensor  # workspace [rows, d] of the cache's dtype
    wide: torch.Tensor  # the same in float32: keys then values, heads, sequences, positions
    tiles: tuple[Tile, ...]


Prepared = tuple[Segment, ...]  # in the order of the pass's tokens


def prepare(batch: PagedBatch, group: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Prepared:
    """See the public function; `group` is the number of query heads of a key/value head."""
    segments = []
    first = 0
    for start, end in _runs(batch.query_lens):
        sequences, new, lens = end - start, batch.query_lens[start], batch.seq_lens[start:end]
        keys = _whole(max(lens), TILE)
        rows = _cache_rows(batch.block_table[start:end], lens, keys, batch.block_size, kv_heads)
        gathered = torch.empty(rows.numel(), head_dim, dtype=dtype)
        wide = gathered if dtype == torch.float32 else torch.empty(gathered.shape)
        shape = (sequences, new, kv_heads, group, head_dim)
        spans = _decode_spans(lens, keys) if new == 1 else _prefill_spans(lens[0] - new, new, group)
        tiles = _tiles(spans, shape, *wide.view(2, kv_heads * sequences, keys, head_dim))
        segments.append(Segment(slice(first, first + sequences * new), shape, rows, gathered, wide, tiles))
        first += sequences * new
    return tuple(segments)


def attention(q: torch.Tensor, cache: torch.Tensor, prepared: Prepared, scale: float, out: torch.Tensor) -> None:
    """See the public function."""
    cache_rows = cache.view(-1, q.shape[-1])
    for segment in prepared:
        torch.index_select(cache_rows, 0, segment.rows, out=segment.gathered)
        if segment.wide is not segment.gathered:
            segment.wide.copy_(segment.gathered)
        queries = q[segment.tokens].view(segment.shape).permute(2, 0, 1, 3, 4)
        results = out[segment.tokens].view(segment.shape).permute(2, 0, 1, 3, 4)
        for tile in segment.tiles:
            part = slice(tile.first, tile.first + tile.count)
            tile.queries_in.copy_(queries[:, :, part])
            _attend(tile, scale)
            results[:, :, part].copy_(tile.mixed_out)


def _attend(tile: Tile, scale: float) -> None:
    """tile.mixed = softmax(scale * queries . keys + mask) values, for each of the heads and sequences."""
    tile.scores.baddbmm_(tile.queries, tile.keys, beta=0, alpha=scale)
    tile.masked.add_(tile.mask)
    torch.softmax(tile.scores, -1, out=tile.weights)
    (weights, values), *others = tile.products
    torch.bmm(weights, values, out=tile.mixed)
    for weights, values in others:
        tile.mixed.baddbmm_(weights, values)


def _runs(query_lens: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Cuts the sequences into runs [start, end): neighbours with one new token each stay together, all others are alone."""
    start = 0
    for i, new in enumerate(query_lens, 1):
        if new > 1 or i == len(query_lens) or query_lens[i] > 1:
            yield start, i
            start = i


def _cache_rows(table: torch.Tensor, lens: tuple[int, ...], keys: int, block_size: int, kv_heads: int) -> torch.Tensor:
    """Which rows of a layer's cache hold (key or value, head, sequence, position), flat.

    Positions beyond a sequence's length read its last position instead.
    """
    positions = torch.minimum(torch.arange(keys), torch.tensor(lens).sub_(1).unsqueeze(1))
    columns = positions // block_size
    heads = torch.arange(2 * kv_heads).view(-1, 1, 1)
    blocks = table.gather(1, columns).mul_(2 * kv_heads)
    return (blocks + heads).mul_(block_size).add_(positions - columns * block_size).flatten()


_Span = tuple[int, int, int, torch.Tensor]  # first, count, keys and mask of a tile


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


def _tiles(
    spans: list[_Span], shape: tuple[int, int, int, int, int], keys: torch.Tensor, values: torch.Tensor
) -> tuple[Tile, ...]:
    """The tiles of a segment; they run one after the other and so share their workspaces."""
    sequences, _, kv_heads, group, head_dim = shape
    batches = kv_heads * sequences
    rows = [_whole(count * group, ROWS) for _, count, _, _ in spans]
    most = max(n * seen for n, (_, _, seen, _) in zip(rows, spans, strict=True))
    queries_space, mixed_space = torch.zeros(2, batches * max(rows) * head_dim)
    scores_space, weights_space = torch.empty(2, batches * most)
    tiles = []
    for n, (first, count, seen, mask) in zip(rows, spans, strict=True):
        queries, mixed = (s[: batches * n * head_dim].view(batches, n, -1) for s in (queries_space, mixed_space))
        scores, weights = (s[: batches * n * seen].view(batches, n, -1) for s in (scores_space, weights_space))
        inner = (kv_heads, sequences, count, group, head_dim)
        tiles.append(
            Tile(
                first,
                count,
                mask,
                masked=scores.view(-1, *mask.shape[:-2], n, seen)[..., seen - mask.shape[-1] :],
                queries_in=queries[:, : count * group].view(inner),
                queries=queries,
                keys=keys[:, :seen].transpose(1, 2),
                scores=scores,
                weights=weights,
                products=tuple((weights[..., i : i + TILE], values[:, i : i + TILE]) for i in range(0, seen, TILE)),
                mixed=mixed,
                mixed_out=mixed[:, : count * group].view(inner),
            )
        )
    return tuple(tiles)


def _whole(count: int, unit: int) -> int:
    """`count` rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit
