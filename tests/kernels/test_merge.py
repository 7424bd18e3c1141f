"""Attention to parts of the keys and a merge is attention to all of them, however context parallelism deals keys out; on CPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels import attention as gqa
from lockstep_kernels import mla
from lockstep_kernels.attention import PagedBatch
from lockstep_kernels.merge import merge
from lockstep_kernels.mla import LatentBatch
from tests.kernels import splits
from tests.kernels.device import requires_equal_bits

SCALE = 0.3
RANKS = st.integers(1, 4)
SIZES = st.sampled_from([1, 4, 16])  # tokens of a block on one rank
LENGTHS = st.one_of(st.sampled_from([1, 4, 15, 16, 17, 63, 64, 65, 128]), st.integers(1, 150))


@dataclass(frozen=True)
class Gqa:
    """Some key/value heads, and the queries, keys and values of a sequence's positions."""

    kv_heads: int = 2
    group: int = 3
    width: int = 24

    @property
    def mixed(self) -> tuple[int, int]:
        """Heads and width of the result."""
        return self.kv_heads * self.group, self.width

    def sequence(self, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """q [n, H, d] and rows of a cache [n, 2, h, d]."""
        return randn(length, *self.mixed, seed=seed), randn(length, 2, self.kv_heads, self.width, seed=seed + 1)

    def cache(self, blocks: int, size: int) -> torch.Tensor:
        return torch.full((blocks, 2, self.kv_heads, size, self.width), torch.nan)

    def put(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        size = cache.shape[3]
        cache[slots // size, :, :, slots % size] = rows

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        spans: list[tuple[int, int]],
        table: torch.Tensor,
        *,
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T, H, d], lse) of the op; spans are query and sequence lengths."""
        new, lens = tuple(n for n, _ in spans), tuple(n for _, n in spans)
        prepared = gqa.prepare(
            PagedBatch(new, lens, table, cache.shape[3], causal=causal),
            heads=self.kv_heads * self.group,
            kv_heads=self.kv_heads,
            head_dim=self.width,
            dtype=cache.dtype,
            device=q.device,
        )
        lse = torch.full((len(q), q.shape[1]), torch.nan)
        out = gqa.attention(q, cache, prepared, scale=SCALE, lse=lse)
        return out.view(-1, *self.mixed), lse

    def exact(self, q: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = rows.repeat_interleave(self.group, 2).unbind(1)
        return splits.exact(q, keys, values, seen, SCALE)


@dataclass(frozen=True)
class Latent:
    """The same of latent attention; rows are finished latents."""

    heads: int = 3
    nope: int = 20
    rope: int = 6
    value: int = 12
    rank: int = 16

    @property
    def mixed(self) -> tuple[int, int]:
        return self.heads, self.value

    @property
    def expansion(self) -> mla.Expansion:
        weight = randn(self.heads * (self.nope + self.value), self.rank, seed=99) * self.rank**-0.5
        return mla.pack(weight, self.heads, self.nope)

    def sequence(self, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        q = randn(length, self.heads, self.nope + self.rope, seed=seed)
        return q, randn(length, self.rank + self.rope, seed=seed + 1)

    def cache(self, blocks: int, size: int) -> torch.Tensor:
        return torch.full((blocks, 1, 1, size, self.rank + self.rope), torch.nan)

    def put(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        mla.store(rows, cache, slots)

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        spans: list[tuple[int, int]],
        table: torch.Tensor,
        *,
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new, lens = tuple(n for n, _ in spans), tuple(n for _, n in spans)
        decode = causal and all(n == 1 for n in new)
        batch = LatentBatch(decode, new, lens, torch.tensor(lens), table, cache.shape[3], causal=causal)
        plan = mla.plan(batch, self.expansion, rope=self.rope, dtype=q.dtype)
        out, lse = torch.full((len(q), self.heads * self.value), torch.nan), torch.full((len(q), self.heads), torch.nan)
        mla.attend(q, cache, plan, self.expansion, scale=SCALE, out=out, lse=lse)
        return out.view(-1, *self.mixed), lse

    def exact(self, q: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = rows.double()
        expanded = torch.einsum("sr,hdr->shd", latents[:, : self.rank], self.expansion.weight.double())
        rotated = latents[:, None, self.rank :].expand(-1, self.heads, -1)
        return splits.exact(
            q, torch.cat((expanded[..., : self.nope], rotated), -1), expanded[..., self.nope :], seen, SCALE
        )


Kind = Gqa | Latent
KINDS = st.sampled_from([Gqa(), Gqa(1, 1, 8), Latent()])


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def tables(lengths: list[int], size: int) -> torch.Tensor:
    """[B, W] of blocks in random order, which no two sequences share, with `size` tokens each."""
    widths = [-(-n // size) for n in lengths]
    ids = iter((torch.randperm(sum(widths), generator=torch.Generator().manual_seed(3)) + 1).tolist())
    table = torch.zeros(len(lengths), max(*widths, 1), dtype=torch.int64)
    for row, width in zip(table, widths, strict=True):
        row[:width] = torch.tensor([next(ids) for _ in range(width)])
    return table


def decode_parts(kind: Kind, lengths: list[int], ranks: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """outs and lses of the ranks' attention, each to what it keeps, for the last token of each sequence."""
    table = tables(lengths, size * ranks)
    caches = [kind.cache(int(table.max()) + 1, size) for _ in range(ranks)]
    queries = []
    for i, n in enumerate(lengths):
        q, rows = kind.sequence(n, seed=10 * i)
        queries.append(q[-1:])
        positions = torch.arange(n)
        at, own = splits.slots(table[i], positions, size, ranks), splits.owner(positions, size, ranks)
        for rank, cache in enumerate(caches):
            kind.put(cache, at[own == rank], rows[own == rank])
    spans = [[(1, splits.local_length(n, rank, size, ranks)) for n in lengths] for rank in range(ranks)]
    parts = [kind.attend(torch.cat(queries), cache, own, table) for cache, own in zip(caches, spans, strict=True)]
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


@settings(max_examples=40, deadline=None)
@given(kind=KINDS, lengths=st.lists(LENGTHS, min_size=1, max_size=4), ranks=RANKS, size=SIZES)
def test_decode_of_dealt_out_keys(kind: Kind, lengths: list[int], ranks: int, size: int) -> None:
    out, lse = merge(*decode_parts(kind, lengths, ranks, size))
    for i, n in enumerate(lengths):
        q, rows = kind.sequence(n, seed=10 * i)
        want, want_lse = kind.exact(q[-1:], rows, torch.tensor([n]))
        close(out[i : i + 1], want)
        close(lse[i : i + 1], want_lse)


@requires_equal_bits
@settings(max_examples=20, deadline=None)
@given(kind=KINDS, lengths=st.lists(LENGTHS, min_size=2, max_size=6), ranks=RANKS, threads=st.sampled_from([1, 2, 5]))
def test_bits_of_a_merged_step_depend_on_the_sequence_alone(
    kind: Kind, lengths: list[int], ranks: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = merge(*decode_parts(kind, lengths, ranks, 16))
        alone = merge(*decode_parts(kind, lengths[:1], ranks, 16))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(together, alone, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    kind=KINDS,
    spans=st.lists(st.tuples(st.integers(0, 150), LENGTHS), min_size=1, max_size=3),
    ranks=RANKS,
    size=SIZES,
    piece=st.sampled_from([16, 64, 1000]),
)
def test_chunks_of_prompts_after_pieces_of_their_prefix(
    kind: Kind, spans: list[tuple[int, int]], ranks: int, size: int, piece: int
) -> None:
    """Of (cached, new) tokens each rank has mirrored chunks: against all new tokens up to its own, and all cached ones in pieces."""
    sequences = [kind.sequence(before + new, seed=10 * i) for i, (before, new) in enumerate(spans)]
    want = [
        kind.exact(q[before:], rows, torch.arange(before, len(q)) + 1)
        for (q, rows), (before, _) in zip(sequences, spans, strict=True)
    ]
    for rank in range(ranks):
        chunks = [(i, *chunk) for i, (_, new) in enumerate(spans) for chunk in splits.mirrored(new, ranks)[rank]]
        if not chunks:
            continue
        owners = [i for i, _, _ in chunks]
        q = torch.cat([sequences[i][0][spans[i][0] + start : spans[i][0] + end] for i, start, end in chunks])

        def workspace(parts: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
            """A cache of positions [first, end) of each sequence, and the chunks' tables."""
            table = tables([end - first for first, end in parts], size)
            cache = kind.cache(int(table.max()) + 1, size)
            for row, (first, end), (_, rows) in zip(table, parts, sequences, strict=True):
                kind.put(cache, splits.slots(row, torch.arange(end - first), size, 1), rows[first:end])
            return cache, table[owners]  # noqa: B023

        cache, table = workspace([(before, before + new) for before, new in spans])
        first, lse = kind.attend(q, cache, [(end - start, end) for _, start, end in chunks], table)
        outs, lses = torch.stack((first, first)), torch.stack((lse, lse))
        for start in range(0, max(before for before, _ in spans), piece):
            parts = [(min(start, before), min(start + piece, before)) for before, _ in spans]
            cache, table = workspace(parts)
            lens = [(end - begin, parts[i][1] - parts[i][0]) for i, begin, end in chunks]
            outs[1], lses[1] = kind.attend(q, cache, lens, table, causal=False)
            merge(outs, lses, outs[0], lses[0])
        token = 0
        for i, begin, end in chunks:
            part = slice(token, token + end - begin)
            close(outs[0, part], want[i][0][begin:end])
            close(lses[0, part], want[i][1][begin:end])
            token += end - begin


@settings(max_examples=30, deadline=None)
@given(kind=KINDS, new=st.integers(1, 80), total=st.integers(0, 140))
def test_earlier_keys_are_all_seen(kind: Kind, new: int, total: int) -> None:
    """By each of any number of queries, of which there may be more than keys, and none at all."""
    q, _ = kind.sequence(new, seed=0)
    _, rows = kind.sequence(total, seed=5)
    table = tables([total], 16)
    cache = kind.cache(int(table.max()) + 1, 16)
    kind.put(cache, splits.slots(table[0], torch.arange(total), 16, 1), rows)
    out, lse = kind.attend(q, cache, [(new, total)], table, causal=False)
    want, want_lse = kind.exact(q, rows, torch.full((new,), total))
    close(out, want)
    close(lse, want_lse)
    if total == 0:
        assert not out.any() and (lse == -torch.inf).all()


def test_parts_without_keys_are_not_looked_at() -> None:
    outs, lses = randn(3, 2, 2, 5, seed=1), randn(3, 2, 2, seed=2)
    outs[1, 0, 0], lses[1, 0, 0] = torch.nan, -torch.inf
    outs[:, 1, 1], lses[:, 1, 1] = torch.nan, -torch.inf
    out, lse = merge(outs, lses)
    weights = torch.softmax(lses[::2, 0, 0], 0)
    torch.testing.assert_close(out[0, 0], weights[0] * outs[0, 0, 0] + weights[1] * outs[2, 0, 0])
    assert not out[1, 1].any() and lse[1, 1] == -torch.inf
    assert out.isfinite().all()
    outs[2, 0, 1] = torch.nan
    assert merge(outs, lses)[0][0, 1].isnan().all()


def test_a_merge_is_checked_and_rounds_once() -> None:
    outs, lses = randn(2, 3, 2, 4, seed=1), randn(2, 3, 2, seed=2)
    assert torch.equal(merge(outs, lses, dtype=torch.bfloat16)[0], merge(outs, lses)[0].bfloat16())
    with pytest.raises(ValueError, match=r"lses has shape \(2, 2, 3\)"):
        merge(outs, lses.mT.contiguous())
    with pytest.raises(ValueError, match="contiguous lse in float32"):
        merge(outs, lses.double())
    with pytest.raises(ValueError, match=r"out is .*float32, not .*bfloat16"):
        merge(outs, lses, outs[0], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="lse must be contiguous float32"):
        q, cache = torch.zeros(1, 1, 8), torch.zeros(2, 2, 1, 16, 8)
        gqa.attention(
            q, cache, PagedBatch((1,), (1,), torch.ones(1, 1).long(), 16), scale=1, lse=torch.zeros(1, 1).half()
        )


def test_lengths_of_parts() -> None:
    table = torch.ones(1, 2, dtype=torch.int64)
    PagedBatch((1,), (0,), table, 16)
    PagedBatch((40,), (0,), table, 16, causal=False)
    for lens, causal in (((0,), True), ((33,), False), ((-1,), False)):
        with pytest.raises(ValueError, match="does not fit"):
            PagedBatch((2,), lens, table, 16, causal=causal)
    with pytest.raises(ValueError, match="captured prefill pass is causal"):
        PagedBatch((), (), table, 16, torch.ones(1).long(), query_starts=torch.arange(2), tokens=2, causal=False)
    one = torch.ones(1, dtype=torch.int64)
    LatentBatch(True, (1,), (0,), one, table, 16)
    LatentBatch(False, (40,), (0,), one, table, 16, causal=False)
    with pytest.raises(ValueError, match="does not fit"):
        LatentBatch(False, (1,), (0,), one, table, 16)
    captured = LatentBatch(False, (), (), one, table, 16, query_starts=torch.arange(2), tokens=2)
    with pytest.raises(ValueError, match="cannot attend to several caches"):
        mla.plan(captured, Latent().expansion, rope=6, dtype=torch.float32)
