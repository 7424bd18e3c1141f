"""Attention on CPU, with bits that depend on nothing but the sequence itself.

What makes it so:
- Keys are taken in tiles of TILE positions, counted from position 0. A query sees whole tiles: what lies beyond its own
  position gets the score -inf, so the weight exactly 0, and the values read there are finite whenever the sequence is (its
  own, or zeros), so the product adds exactly 0.
- A score is one product over the head's width. Softmax adds along a row in lanes that TILE is a multiple of, so a
  longer row of zero weights adds zeros to the same lanes.
- Weights times values is one product of inner length INNER for every so many positions, added one after the other. MKL adds
  along an inner length up to INNER in one order, so the last product may be shorter: zeros would add nothing.
- Each product has a multiple of ROWS query rows. MKL's float32 kernels give a row the same bits for any such number and
  any number of threads; with fewer rows they do not.
- Decode and prefill differ only in how many query rows meet how many tiles.
- Of the log-sum-exp, the sum is 1 / the weight of the highest score.

What makes it fast beside few calls: each thread goes on with what it has in its cache. All workspaces have the parts (sequences,
or shares of one sequence's queries) as their first dimension, and every operation gives each thread one run of it. Two cores
that do not share their last cache need three times as long for keys that the other one has written.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from lockstep_kernels.attention.batch import PagedBatch
from lockstep_kernels.scripted import scripted

TILE = 64
INNER = 128
ROWS = 4
MOST_PARTS = 4


class Tile(NamedTuple):
    """Some new tokens of each sequence of a segment, against the first whole tiles of its positions.

    They come in parts: one for each of many sequences, or a few that share one sequence's keys. Everything is a view of the
    segment's workspaces, made once, as views in every layer would cost as much as the sums. With N = parts * kv_heads and a
    multiple of ROWS rows:
    """

    first: int  # of the pass's tokens
    mask: torch.Tensor  # float32 0 or -inf
    masked: torch.Tensor  # the scores that `mask` is added to
    queries_in: torch.Tensor  # [parts, kv_heads, tokens of a part, group, d] of `queries`, whose other rows are padding
    queries: torch.Tensor  # [N, rows, d] float32
    keys: torch.Tensor  # [N, d, keys]
    scores: torch.Tensor  # [N, rows, keys]
    weights: torch.Tensor  # [N, rows, keys]
    products: list[tuple[torch.Tensor, torch.Tensor]]  # weights and values of INNER positions each
    mixed: torch.Tensor  # [N, rows, d]
    mixed_out: torch.Tensor  # of `mixed` what `queries_in` is of `queries`
    row_shape: list[int]  # [parts, kv_heads, tokens of a part, group], as the rows that are not padding are [N, rows]


class Segment(NamedTuple):
    """Sequences that are computed together: many with one new token each, or one with any number."""

    blocks: torch.Tensor  # which blocks of the cache are gathered, whole
    gathered: torch.Tensor  # workspace [blocks, 2 * kv_heads * block_size * d] of the cache's dtype
    widened: list[
        tuple[torch.Tensor, torch.Tensor]
    ]  # keys, values: workspace in float32, and what of `gathered` is in it,
    # [parts, kv_heads, blocks of each, block_size * d]
    vectors: torch.Tensor  # both workspaces, one row a key or value
    unused: torch.Tensor  # which of `vectors` lie beyond the end of their sequence
    keyless: torch.Tensor  # which of the pass's tokens have no key: they meet zeros
    tiles: list[Tile]


Prepared = tuple[Segment, ...]  # in the order of the pass's tokens


def prepare(batch: PagedBatch, group: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Prepared:
    """See the public function; `group` is the number of query heads of a key/value head."""
    segments = []
    first = 0
    for start, end in _runs(batch.query_lens):
        new, lens, table = batch.query_lens[start], batch.seq_lens[start:end], batch.block_table[start:end]
        parts = len(lens) if new == 1 else _parts(kv_heads)
        heads = (kv_heads, parts, group, head_dim)
        segments.append(_segment(first, new, lens, table, batch.block_size, heads, dtype, batch.causal))
        first += new * len(lens)
    return tuple(segments)


def _of_tile(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The tokens of a tile in x, which has the heads of a token one after the other, as `Tile.queries_in`; a view."""
    shape = tile.queries_in.size()
    count, group, width = shape[2], shape[3], shape[4]
    token = x.stride(0)
    strides = [count * token, group * width, token, width, 1]
    return x.as_strided(shape, strides, x.storage_offset() + tile.first * token)


def _rows_of_tile(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The tokens of a tile in x [T, H] contiguous, as `Tile.row_shape`; a view."""
    count, group, heads = tile.row_shape[2], tile.row_shape[3], x.shape[1]
    return x.as_strided(tile.row_shape, [count * heads, group, heads, 1], x.storage_offset() + tile.first * heads)


def _note(tile: Tile, highest: torch.Tensor, most: torch.Tensor) -> None:
    """Of each query of a tile the highest score and the highest weight, to [T, H] each."""
    size = tile.row_shape
    for to, of in ((highest, tile.scores), (most, tile.weights)):
        rows = of.amax(-1)[:, : size[2] * size[3]]
        _rows_of_tile(to, tile).copy_(rows.view(size))


@scripted
def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    segment: Segment,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    most: torch.Tensor | None,
) -> None:
    """cache [blocks, what a block holds]; with `lse`, that gets the highest scores, and `most` the highest weights."""
    torch.index_select(cache, 0, segment.blocks, out=segment.gathered)
    for wide, part in segment.widened:
        wide.copy_(part)
    segment.vectors.index_fill_(0, segment.unused, 0)
    for tile in segment.tiles:
        tile.queries_in.copy_(_of_tile(q, tile))
        tile.scores.baddbmm_(tile.queries, tile.keys, beta=0, alpha=scale)
        tile.masked.add_(tile.mask)
        torch.softmax(tile.scores, -1, out=tile.weights)
        weights, values = tile.products[0]
        torch.bmm(weights, values, out=tile.mixed)
        for weights, values in tile.products[1:]:
            tile.mixed.baddbmm_(weights, values)
        _of_tile(out, tile).copy_(tile.mixed_out)
        if lse is not None and most is not None:
            _note(tile, lse, most)


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    prepared: Prepared,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """See the public function."""
    blocks = cache.flatten(1)
    most = None if lse is None else torch.empty_like(lse)
    for segment in prepared:
        _attend(q, blocks, segment, scale, out, lse, most)
    if lse is not None and most is not None:
        lse.sub_(most.log_())
        for segment in prepared:
            lse.index_fill_(0, segment.keyless, -torch.inf)


def _runs(query_lens: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Cuts the sequences into runs [start, end): neighbours with one new token each stay together, all others are alone."""
    start = 0
    for i, new in enumerate(query_lens, 1):
        if new > 1 or i == len(query_lens) or query_lens[i] > 1:
            yield start, i
            start = i


def _parts(kv_heads: int) -> int:
    """Into how many parts the queries of a prompt are cut, so that its heads make work for all threads alike."""
    threads = torch.get_num_threads()
    parts = threads // math.gcd(threads, kv_heads)
    return parts if parts <= MOST_PARTS else 1


def _segment(
    first: int,
    new: int,
    lens: tuple[int, ...],
    table: torch.Tensor,
    block_size: int,
    heads: tuple[int, int, int, int],  # kv_heads, parts, group, d
    dtype: torch.dtype,
    causal: bool,
) -> Segment:
    kv_heads, parts, _, head_dim = heads
    sequences, ends = len(lens), torch.tensor(lens).unsqueeze(1)
    keys = _whole(max(*lens, 1), max(TILE, block_size))
    columns = torch.arange(0, keys, block_size)
    columns = columns.where(columns < ends, 0)  # beyond its end a sequence reads its first block again
    blocks = table.gather(1, columns // block_size).flatten()
    gathered = torch.empty(blocks.numel(), 2 * kv_heads * block_size * head_dim, dtype=dtype)
    arranged = gathered.view(sequences, -1, 2, kv_heads, block_size * head_dim).permute(2, 0, 3, 1, 4)
    wide = torch.empty(2, parts, kv_heads, keys // block_size, block_size * head_dim)
    beyond = (columns.unsqueeze(-1) + torch.arange(block_size)).flatten(1) >= ends
    keyless = [first + i * new + j for i, n in enumerate(lens) if n == 0 for j in range(new)]
    spans = _decode_spans(lens, keys, first) if new == 1 else _prefill_spans(lens[0], new, first, heads, causal)
    return Segment(
        blocks,
        gathered,
        list(zip(wide, arranged.expand(wide.shape), strict=True)),
        wide.view(-1, head_dim),
        beyond.unsqueeze(1).expand(2, parts, kv_heads, keys).flatten().nonzero().squeeze(1),
        torch.tensor(keyless, dtype=torch.int64),
        _tiles(spans, heads, *wide.view(2, parts, kv_heads, keys, head_dim)),
    )


_Span = tuple[int, int, int, int, torch.Tensor]  # first token, parts, tokens of a part, keys and mask of a tile


def _decode_spans(lens: tuple[int, ...], keys: int, first: int) -> list[_Span]:
    mask = torch.zeros(len(lens), 1, keys)
    ends = torch.tensor([n or keys for n in lens])  # without any key there is nothing to hide: all of them are zeros
    mask.masked_fill_(torch.arange(keys) >= ends.view(-1, 1, 1), -torch.inf)
    return [(first, len(lens), 1, keys, mask)]


def _prefill_spans(total: int, new: int, first: int, heads: tuple[int, int, int, int], causal: bool) -> list[_Span]:
    """The queries of a sequence of `total` positions, cut where their own are multiples of TILE, so that only a tile's last
    keys can lie in its future."""
    _, most_parts, group, _ = heads
    triangle = torch.full((TILE, TILE), -torch.inf).triu_(1).repeat_interleave(group, 0)
    spans = []
    start = total - new if causal else 0
    position, end = start, start + new
    while position < end:
        base = position // TILE * TILE
        until = min(base + TILE, end)
        parts = most_parts if (until - position) % most_parts == 0 else 1
        count = (until - position) // parts
        mask = torch.zeros(parts, _whole(count * group, ROWS), TILE)
        if causal:
            seen = base + TILE
            future = triangle[(position - base) * group : (until - base) * group]
            mask[:, : count * group] = future.view(parts, -1, TILE)
        else:
            seen = _whole(max(total, 1), TILE)
            mask.masked_fill_(torch.arange(seen - TILE, seen) >= (total or seen), -torch.inf)
        spans.append((first + position - start, parts, count, seen, mask))
        position = until
    return spans


def _tiles(
    spans: list[_Span], heads: tuple[int, int, int, int], keys: torch.Tensor, values: torch.Tensor
) -> list[Tile]:
    """The tiles of a segment; they run one after the other and so share their workspaces."""
    kv_heads, _, group, head_dim = heads
    sizes = [(kv_heads * parts, _whole(count * group, ROWS)) for _, parts, count, _, _ in spans]
    queries_space, mixed_space = torch.zeros(2, max(n * rows for n, rows in sizes) * head_dim)
    most = max(n * rows * seen for (n, rows), (_, _, _, seen, _) in zip(sizes, spans, strict=True))
    scores_space, weights_space = torch.empty(2, most)
    tiles = []
    for (n, rows), (first, parts, count, seen, mask) in zip(sizes, spans, strict=True):
        queries, mixed = (s[: n * rows * head_dim].view(n, rows, -1) for s in (queries_space, mixed_space))
        scores, weights = (s[: n * rows * seen].view(n, rows, -1) for s in (scores_space, weights_space))
        own_keys, own_values = (x[:parts, :, :seen].view(n, seen, head_dim) for x in (keys, values))
        shape = (parts, kv_heads, count, group, head_dim)
        tiles.append(
            Tile(
                first,
                mask.unsqueeze(1),
                masked=scores.view(parts, kv_heads, rows, seen)[..., seen - mask.shape[-1] :],
                queries_in=queries[:, : count * group].view(shape),
                queries=queries,
                keys=own_keys.transpose(1, 2),
                scores=scores,
                weights=weights,
                products=[(weights[..., i : i + INNER], own_values[:, i : i + INNER]) for i in range(0, seen, INNER)],
                mixed=mixed,
                mixed_out=mixed[:, : count * group].view(shape),
                row_shape=list(shape[:-1]),
            )
        )
    return tiles


def _whole(count: int, unit: int) -> int:
    """`count` rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit
