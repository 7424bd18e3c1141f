"""The attention half of a layer with grouped query heads, on one rank or on several that share the sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lockstep_common.steps import Kind
from lockstep_kernels import rope
from lockstep_kernels.attention import PagedBatch, Prepared, attention, prepare
from lockstep_kernels.fp8 import E4M3
from lockstep_kernels.linear import Packed, linear, split
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_worker.context import Mirrored, MirroredAttention, Pages, Replicated, Undivided
from lockstep_worker.kv import KvCache

if TYPE_CHECKING:
    from lockstep_worker.models.decoder import DecoderConfig


@dataclass(frozen=True, slots=True)
class KvScale:
    """What a cache of 8 bits keeps of a layer is divided by: float32 for each head, of keys and of values."""

    both: torch.Tensor  # [2, h]
    each: tuple[torch.Tensor, torch.Tensor]  # its rows


@dataclass(frozen=True, slots=True)
class Apart:
    """The first products of a layer for prompt tokens, apart: of the queries, and of what is cached."""

    queries: Packed
    cached: Packed


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv: query heads, then key heads, then value heads. `head_norm` has a gain [H + h, d] for each query and key head.

    `kv_scale` counts if the cache is of 8 bits; None: 1. `apart` is there if ranks compute prompts together.
    """

    norm: Norm
    qkv: Packed
    out: Packed
    head_norm: Norm | None
    kv_scale: KvScale | None = None
    apart: Apart | None = None

    def shared(self, ranks: int) -> AttentionWeights:
        """For so many ranks that share sequences."""
        if ranks == 1:
            return replace(self, apart=None)
        queries = self.out.in_features
        apart = Apart(*split(self.qkv.for_prompts, [queries, self.qkv.out_features - queries]))
        return replace(self, apart=apart)


class AttentionPass:
    """What all layers of one pass share: angles, slots, tables. `rows` is the number of rows the pass is computed with.

    Of a `Replicated` pass attention sees what is kept here, and the other ranks' parts are merged with it.
    """

    def __init__(
        self,
        c: DecoderConfig,
        tables: rope.Tables,
        division: Undivided,
        rows: int,
        kv: KvCache,
        dtype: torch.dtype,
        deterministic: bool,
    ) -> None:
        self._scale = c.head_dim**-0.5
        self._heads, self._head_dim = c.heads, c.head_dim
        self._together = together = division if isinstance(division, Replicated) else None
        inputs = division.inputs
        self._tokens = inputs.token_ids.shape[0]
        positions = padded(inputs.positions, rows)
        self._rope = rope.prepare(
            tables, positions, inputs.slots[0], kv_heads=c.kv_heads, block_size=kv.block_size, dtype=dtype
        )
        decode = inputs.kind is Kind.DECODE and len(inputs.seq_lens) == self._tokens  # not tokens that are replayed
        captured = inputs.kind is Kind.PREFILL and not inputs.query_lens
        batch = PagedBatch(
            inputs.query_lens,
            inputs.host_seq_lens,
            inputs.block_tables[0],
            kv.block_size,
            lens=inputs.seq_lens if decode or captured else None,
            max_seq_len=inputs.max_seq_len,
            query_starts=inputs.query_starts if captured else None,
            tokens=self._tokens if captured else 0,
        )
        self._takes_new_kv = not captured and together is None
        self._prepared: Prepared = prepare(
            batch,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            dtype=kv.layer(0, 0).dtype,
            device=positions.device,
            deterministic=deterministic,
            new_kv=self._takes_new_kv,
        )
        self._mixed: torch.Tensor | None = None  # attention has its own on CUDA, unless rows are padded
        if rows != self._tokens or not positions.is_cuda or together is not None:
            self._mixed = torch.empty(rows, c.heads * c.head_dim, dtype=dtype, device=positions.device)
            self._mixed[self._tokens :] = 0

    def attend(
        self, weights: AttentionWeights, hidden: torch.Tensor, cache: torch.Tensor, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The attention half of a layer: hidden [R, d], which may be overwritten, plus what attention adds to it.

        With `kept`, only of those rows; the keys and values of all are stored.
        """
        qkv = linear(hidden, weights.qkv, norm=weights.norm).view(hidden.shape[0], -1, self._head_dim)
        both, each = None, None
        if cache.dtype == E4M3 and (kept_as := weights.kv_scale) is not None:
            both, each = kept_as.both, kept_as.each
        rope.rotate_and_store_(qkv, cache, self._rope, weights.head_norm, kv_scale=both)
        kv_heads = cache.shape[2]
        q, k, v = torch.tensor_split(qkv[: self._tokens], (self._heads, self._heads + kv_heads), 1)
        if self._together is not None:
            mixed = self._merged(q, cache, self._together)
        else:
            mixed = attention(
                q,
                cache,
                self._prepared,
                scale=self._scale,
                out=self._mixed,
                new_kv=(k, v) if self._takes_new_kv else None,
                kv_scale=each,
            )
        return project(mixed, weights.out, hidden, kept)

    def _merged(self, q: torch.Tensor, cache: torch.Tensor, together: Replicated) -> torch.Tensor:
        assert self._mixed is not None

        def part(out: torch.Tensor, lse: torch.Tensor) -> None:
            attention(q, cache, self._prepared, scale=self._scale, out=out, lse=lse)

        together.attend(self._heads, self._head_dim, self._mixed, part)
        return self._mixed


class MirroredAttentionPass:
    """The same of a prompt pass that ranks compute together, each its chunks (see `lockstep_worker.context`).

    `cached` is projected before the queries are, as everybody waits for it. All layers share what lies in here.
    """

    def __init__(
        self,
        c: DecoderConfig,
        tables: rope.Tables,
        division: Mirrored,
        rows: int,
        kv: KvCache,
        dtype: torch.dtype,
        deterministic: bool,
    ) -> None:
        self._heads, self._kv_heads, self._head_dim = c.heads, c.kv_heads, c.head_dim
        self._tokens = division.rows
        positions = padded(division.positions, rows)
        nowhere = torch.zeros_like(positions)
        self._rope = rope.prepare(tables, positions, nowhere, kv_heads=c.kv_heads, block_size=1, dtype=dtype)
        cache = kv.layer(0, 0)
        pages = GroupedPages(c, kv.block_size, cache.dtype, cache.device, deterministic)
        self._attention = MirroredAttention(division, pages, cache, c.heads, c.head_dim)
        self._mixed = torch.empty(rows, c.heads * c.head_dim, dtype=dtype, device=positions.device)
        self._mixed[self._tokens :] = 0

    def attend(
        self, weights: AttentionWeights, hidden: torch.Tensor, cache: torch.Tensor, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `AttentionPass.attend`."""
        apart, norm, heads = weights.apart, weights.head_norm, self._heads
        assert apart is not None
        x = rms_norm(hidden, *weights.norm)
        new = self._project(x, apart.cached, self._kv_heads, norm and Norm(norm.gain[heads:], norm.eps))

        def queries() -> torch.Tensor:
            return self._project(x, apart.queries, heads, norm and Norm(norm.gain[:heads], norm.eps))

        self._attention(new, queries, cache, self._mixed)
        return project(self._mixed, weights.out, hidden, kept)

    def _project(self, x: torch.Tensor, weight: Packed, rotated: int, norm: Norm | None) -> torch.Tensor:
        """Heads [L, n, d] of the tokens computed here, the first of which are `rotated`."""
        y = linear(x, weight).view(len(x), -1, self._head_dim)
        rope.rotate_heads_(y, rotated, self._rope, norm)
        return y[: self._tokens]


class GroupedPages:
    """Attention to keys and values in blocks; see `lockstep_worker.context.PagedAttention`."""

    def __init__(
        self, c: DecoderConfig, block_size: int, dtype: torch.dtype, device: torch.device, deterministic: bool
    ) -> None:
        self._c = c
        self._block_size = block_size
        self._dtype, self._device, self._deterministic = dtype, device, deterministic

    def where(self, slots: torch.Tensor) -> torch.Tensor:
        return rope.kv_rows(slots, self._c.kv_heads, self._block_size)

    def store(self, new: torch.Tensor, cache: torch.Tensor, where: torch.Tensor) -> None:
        rope.store_kv(new, cache, where)

    def plan(self, pages: Pages) -> Any:
        c = self._c
        batch = PagedBatch(pages.query_lens, pages.seq_lens, pages.table, self._block_size, causal=pages.causal)
        return prepare(
            batch,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            dtype=self._dtype,
            device=self._device,
            deterministic=self._deterministic,
        )

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, plan: Any, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        attention(q, cache, plan, scale=self._c.head_dim**-0.5, out=out, lse=lse)


def padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    """[T], followed by zeros up to [rows]."""
    count = values.shape[0]
    return values if count == rows else torch.nn.functional.pad(values, (0, rows - count))


def project(mixed: torch.Tensor, out: Packed, hidden: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """What attention adds to the hidden states, of the `kept` rows; None: of all."""
    if kept is None:
        return linear(mixed, out, plus=hidden)
    return linear(mixed[kept], out, plus=hidden[kept])
