"""Context parallelism: R ranks keep a sequence's keys and values together, and compute its tokens together.

The runner of each of these ranks calls the model with the same tokens in the same order (`StepInputs`); how they divide the work is
hidden here. Every rank makes the same collective calls in the same order: which follows from lengths that all of them know.

Prompts (`Mirrored`): a rank computes its chunks of the new tokens (see `mirror`). In each layer the keys and values of all new
tokens are gathered while the queries are projected, and laid out as a cache in natural order; each rank also stores those that it
keeps. What the sequences have in the cache already is gathered in pieces of PIECE_BYTES at most, of which two exist at a time,
and attended to piece by piece: so memory does not grow with the prefix. After the last layer the rows that need logits are gathered.

Generated tokens (`Replicated`): all ranks compute all tokens, each attends to what it keeps of their sequences, and the parts are
merged by log-sum-exp. Row i goes to the experts from rank i mod R only.

Layers that see a sliding window would gather here, beside the chunks' new keys, only the W - 1 positions before each chunk (its
halo) instead of the whole prefix; no family has such layers yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from lockstep_common.steps import Kind
from lockstep_kernels.merge import merge
from lockstep_kernels.prepare import Share
from lockstep_worker import mirror
from lockstep_worker.collectives import Communicator
from lockstep_worker.exchange.layer import ShardedExperts
from lockstep_worker.inputs import StepInputs, one_token_each
from lockstep_worker.kv import KvCache, KvSpec
from lockstep_worker.overlap import Stages
from lockstep_worker.protocol import spans

if TYPE_CHECKING:
    from lockstep_worker.models.decoder import FeedForward, Tokens

PIECE_BYTES: Final = 1 << 26  # of one layer's keys and values that are gathered at a time
_PLANS: Final = 2  # of pieces, kept: most pieces are alike


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows of hidden states that are still needed behind the last layer's attention."""

    index: torch.Tensor  # int64 into the rows
    mine: torch.Tensor | None  # bool: those that this rank computes, the others are filled with any row; None: all


class Undivided:
    """One rank computes all tokens of a pass: `token_ids` and `positions` int64 [L], and `live` bool [L] or None, of these."""

    def __init__(self, inputs: StepInputs, *, routed_once: bool = False) -> None:
        """`routed_once`: a row that is computed twice goes to the experts once."""
        self.inputs = inputs
        self._routed_once = routed_once
        self.token_ids, self.positions, self.live = inputs.token_ids, inputs.positions, inputs.live

    def feed_forward(self, half: FeedForward, hidden: torch.Tensor, tokens: Tokens) -> Stages[torch.Tensor]:
        """The second half of a layer, of hidden [rows, d], which may be overwritten."""
        return _in_stages(half, hidden, tokens)

    def kept(self, rows: int) -> Kept | None:
        """Of `rows` rows; None: all."""
        index, mine = self.inputs.logits_index, self.inputs.logits_live
        if self.inputs.kind is Kind.DECODE and len(index) == len(self.token_ids):
            return None
        twice = _at_least_two(index, rows)
        if len(twice) > len(index) and (self._routed_once or mine is not None):
            mine = torch.ones_like(index, dtype=torch.bool) if mine is None else mine
            mine = torch.nn.functional.pad(mine, (0, 1))
        return Kept(twice, mine)

    def wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, d], in the order of logits_index, of the kept rows of hidden states."""
        return hidden[: len(self.inputs.logits_index)]


class Replicated(Undivided):
    """All ranks compute all tokens, one of each sequence, and attend to their own parts of the sequences.

    `inputs` are as the pass's, but for the lengths: those of what is kept here. A token's position stays that in its sequence.
    """

    def __init__(self, cp: Communicator, inputs: StepInputs, block_size: int) -> None:
        """block_size: tokens of a block on one rank."""
        inputs = one_token_each(inputs)
        share, size = Share(cp.size, cp.rank), block_size * cp.size
        longest, *lens = share.held(np.array([inputs.max_seq_len, *inputs.host_seq_lens], np.int64), size).tolist()
        super().__init__(
            replace(
                inputs,
                seq_lens=share.held(inputs.seq_lens, size),
                host_seq_lens=tuple(lens),
                max_seq_len=max(1, longest),
            ),
            routed_once=True,
        )
        self._cp = cp
        self._shares: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def feed_forward(self, half: FeedForward, hidden: torch.Tensor, tokens: Tokens) -> Stages[torch.Tensor]:
        if not half.routed:
            return half(hidden, tokens)
        index, mine = self._share_of(len(hidden))
        routed = yield from _in_stages(half, hidden[index], tokens.of(index, mine))
        rows = self._cp.all_gather("routed rows", routed)
        return rows.transpose(0, 1).flatten(0, 1)[: len(hidden)]

    def attend(
        self,
        heads: int,
        width: int,
        out: torch.Tensor,
        attend: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        """Attention to everybody's parts: out [T', heads * width], of which the first T rows are written.

        `attend` writes this rank's part: float32 [T, heads * width], and its log-sum-exp float32 [T, heads].
        """
        tokens = len(self.token_ids)
        parts = out.new_empty(tokens * heads * (width + 1), dtype=torch.float32)
        values = tokens * heads * width
        attend(parts[:values].view(tokens, heads * width), parts[values:].view(tokens, heads))
        every = self._cp.all_gather("parts of attention", parts)
        outs = every[:, :values].view(-1, tokens, heads, width)
        merge(outs, every[:, values:].view(-1, tokens, heads), out[:tokens].view(tokens, heads, width))

    def _share_of(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of `rows` rows go to the experts from here: (index, whether there is one), as many on every rank."""
        if (found := self._shares.get(rows)) is None:
            ranks = self._cp.size
            index = torch.arange(-(-rows // ranks), device=self.positions.device) * ranks + self._cp.rank
            found = self._shares[rows] = index.clamp(max=rows - 1), index < rows
        return found


@dataclass(frozen=True, slots=True)
class Pages:
    """Tokens and the keys that they see in a cache: sequences one after the other, as in `lockstep_kernels.attention.PagedBatch`."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    table: torch.Tensor  # [n, W] int64
    causal: bool


class PagedAttention(Protocol):
    """What a family does with keys and values that lie in blocks like its cache's. A token's are a tensor [...]."""

    def where(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots as `store` takes them."""
        ...

    def store(self, new: torch.Tensor, cache: torch.Tensor, where: torch.Tensor) -> None:
        """Writes the keys and values [n, ...] of n tokens to where they belong."""
        ...

    def plan(self, pages: Pages) -> Any:
        """What all layers share."""
        ...

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, plan: Any, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """out [T', heads * width], and lse float32 [T, heads] if it is asked for: then out is float32."""
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of the cached prefixes, on the device."""

    blocks: torch.Tensor  # of this rank's cache
    rows: slice  # of the rows that this rank computes
    pages: Pages  # within what is gathered: rank by rank, block by block

    @property
    def key(self) -> tuple[object, ...]:
        return self.rows.start, self.pages.query_lens, self.pages.seq_lens


class Mirrored:
    """A prompt pass whose new tokens are computed by all ranks, each of them its chunks; attributes and methods as of `Undivided`."""

    def __init__(self, cp: Communicator, inputs: StepInputs, block_size: int, block_bytes: int) -> None:
        """block_size: tokens of a block on one rank; block_bytes: what they take in one layer."""
        if not inputs.query_lens:
            raise ValueError("a prefill pass over several ranks needs the lengths on the host")
        self.cp = cp
        self.inputs = inputs
        self.block_size = block_size
        lens = np.array(inputs.query_lens, np.int64)
        starts = np.array(inputs.host_seq_lens, np.int64) - lens
        prompts, positions = mirror.local_rows(lens, cp.size, cp.rank)
        real = positions < lens[prompts]
        padded = np.minimum(positions, lens[prompts] - 1)  # padding computes its prompt's last token again
        index = self._put((np.cumsum(lens) - lens)[prompts] + padded)
        self.rows = len(positions)
        self.token_ids, self.positions = inputs.token_ids[index], inputs.positions[index]
        self.live = self._put(real)
        if inputs.live is not None:
            self.live &= inputs.live[index]
        self._choose_kept(lens)
        self._lay_out_new(lens, starts)
        self.pieces = self._cut(lens, starts, max(1, PIECE_BYTES // (cp.size * block_bytes)))

    def feed_forward(self, half: FeedForward, hidden: torch.Tensor, tokens: Tokens) -> Stages[torch.Tensor]:
        return _in_stages(half, hidden, tokens)

    def kept(self, rows: int) -> Kept | None:
        if len(self._gathered) > self.rows:
            return None
        mine = self._gathered // self.rows == self.cp.rank
        index = _at_least_two((self._gathered % self.rows).where(mine, 0), rows)
        return Kept(index, torch.nn.functional.pad(mine, (0, len(index) - len(mine))))

    def wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        count = len(self._gathered)
        if count == 0:
            return hidden[:0]
        if count > self.rows:
            return self.cp.all_gather("hidden states", hidden[: self.rows]).flatten(0, 1)[self._gathered]
        every = self.cp.all_gather("hidden states", hidden[:count])
        return every[self._gathered // self.rows, torch.arange(count, device=hidden.device)]

    def _choose_kept(self, lens: mirror.I64) -> None:
        self._natural = mirror.gathered_index(lens, self.cp.size)
        self._gathered = self._put(self._natural)[self.inputs.logits_index]  # [S] where these rows are among all ranks'

    def _lay_out_new(self, lens: mirror.I64, starts: mirror.I64) -> None:
        """New keys and values arrive rank by rank. They go to a workspace in natural order, and those kept here to the cache."""
        ranks, size = self.cp.size, self.block_size
        chunks = mirror.chunk_sizes(lens, ranks)
        blocks = -(-2 * ranks * chunks // size)
        first = 1 + np.cumsum(blocks) - blocks  # block 0 is the null block, as in a cache
        self.workspace_blocks = 1 + int(blocks.sum())
        prompts, positions = mirror.gathered_rows(lens, ranks)
        self.workspace_slots = self._put(first[prompts] * size + positions)
        _, positions = spans(starts, lens)
        own = np.flatnonzero(Share(ranks, self.cp.rank).holds(positions, size * ranks))
        self.own = self._put(self._natural[own])
        self.own_slots = self.inputs.slots[0][self._put(own)]
        columns = np.arange(blocks.max(initial=0))
        table = np.where(columns < blocks[:, None], first[:, None] + columns, 0).repeat(2, 0)
        seen = np.array([self.cp.rank + 1, 2 * ranks - self.cp.rank])  # chunks, of the low and the high one
        self.new = Pages(
            tuple(chunks.repeat(2).tolist()), tuple((chunks[:, None] * seen).flatten().tolist()), self._put(table), True
        )

    def _cut(self, lens: mirror.I64, starts: mirror.I64, most_blocks: int) -> tuple[_Piece, ...]:
        chunks, ranks = mirror.chunk_sizes(lens, self.cp.size), self.cp.size
        ends = 2 * np.cumsum(chunks)
        found = []
        for piece in mirror.prefix_pieces(starts, self.block_size * ranks, most_blocks):
            counts, last = np.array(piece.counts), piece.first + len(piece.counts)
            prompts, columns = spans(piece.starts, counts)
            blocks = self.inputs.block_tables[0][self._put(prompts + piece.first), self._put(columns)]
            before = (np.cumsum(counts) - counts)[:, None, None]
            column, rank = np.arange(counts.max())[:, None], np.arange(ranks)
            table = np.where(column < counts[:, None, None], rank * counts.sum() + before + column, 0)
            pages = Pages(
                tuple((2 * chunks[piece.first : last]).tolist()),
                piece.tokens,
                self._put(table.reshape(len(counts), -1)),
                False,
            )
            rows = slice(int(ends[piece.first] - 2 * chunks[piece.first]), int(ends[last - 1]))
            found.append(_Piece(blocks, rows, pages))
        return tuple(found)

    def _put(self, array: Any) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        device = self.inputs.token_ids.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


Division = Undivided | Mirrored


def divide(cp: Communicator, inputs: StepInputs, kv: KvCache) -> Division:
    """The work of a pass over several ranks."""
    if inputs.kind is Kind.DECODE:
        return Replicated(cp, inputs, kv.block_size)
    return Mirrored(cp, inputs, kv.block_size, kv.layer(0, 0)[0].nbytes)


def bytes_held(ranks: int, specs: Sequence[KvSpec], block_size: int, tokens: int) -> int:
    """The most bytes that a prompt pass over `tokens` new tokens holds because ranks share it, beside what its rows take.

    Two pieces of a prefix, and of one layer's new keys and values what is sent, what arrives, and the workspace. The rows
    take less than in a pass on one rank, as there are 1 / ranks of them: so much less that parts of attention fit too.
    """
    block = max(spec.bytes_per_block(block_size) // spec.layers for spec in specs)
    return 2 * max(PIECE_BYTES, ranks * block) + (2 * ranks + 2) * tokens * block // (ranks * block_size)


class MirroredAttention:
    """The attention of the layers of one mirrored pass."""

    def __init__(self, division: Mirrored, ops: PagedAttention, cache: torch.Tensor, heads: int, width: int) -> None:
        """`cache`: of any layer; a token's attention gives [heads, width]."""
        self._division = division
        self._ops = ops
        self._heads, self._width = heads, width
        self._workspace = cache.new_empty(division.workspace_blocks, *cache.shape[1:])
        self._workspace_where = ops.where(division.workspace_slots)
        self._own_where = ops.where(division.own_slots)
        self._new = ops.plan(division.new)
        self._plans: dict[tuple[object, ...], Any] = {}
        rows = division.rows
        if division.pieces:
            self._parts = cache.new_empty(2, rows, heads * width, dtype=torch.float32)
            self._lses = cache.new_empty(2, rows, heads, dtype=torch.float32)

    def __call__(
        self, new: torch.Tensor, queries: Callable[[], torch.Tensor], cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """new [L, ...]: keys and values of the tokens computed here. Queries [L, ...] are projected while everybody's travel.

        Stores what this rank keeps in the layer's cache; writes the first L rows of out [L', heads * width].
        """
        division, ops, cp = self._division, self._ops, self._division.cp
        coming = cp.all_gather_later("new keys and values", new.to(cache.dtype).contiguous())
        piece_coming = self._gather(cache, 0)
        q = queries()
        every = coming().flatten(0, 1)
        ops.store(every, self._workspace, self._workspace_where)
        ops.store(every[division.own], cache, self._own_where)
        del every
        if not division.pieces:
            ops.attend(q, self._workspace, self._new, out, None)
            return
        ops.attend(q, self._workspace, self._new, self._parts[0], self._lses[0])
        for i, piece in enumerate(division.pieces):
            gathered = piece_coming().flatten(0, 1)
            piece_coming = self._gather(cache, i + 1)
            self._add(q, gathered, piece)
        out[: division.rows] = self._parts[0]

    def _gather(self, cache: torch.Tensor, i: int) -> Callable[[], torch.Tensor]:
        """Begins to gather piece i of the prefixes, if there is one."""
        pieces = self._division.pieces
        if i >= len(pieces):
            return lambda: cache.new_empty(0)
        return self._division.cp.all_gather_later("cached keys and values", cache[pieces[i].blocks])

    def _add(self, q: torch.Tensor, gathered: torch.Tensor, piece: _Piece) -> None:
        rows = piece.rows
        parts, lses = self._parts[:, rows], self._lses[:, rows]
        self._ops.attend(q[rows], gathered, self._plan_of(piece), parts[1], lses[1])
        shape = (2, -1, self._heads, self._width)
        merge(parts.view(shape), lses, parts[0].view(shape[1:]), lses[0])

    def _plan_of(self, piece: _Piece) -> Any:
        if (plan := self._plans.pop(piece.key, None)) is None:
            plan = self._ops.plan(piece.pages)
        self._plans[piece.key] = plan  # the last one used
        if len(self._plans) > _PLANS:
            del self._plans[next(iter(self._plans))]
        return plan


def _in_stages(half: FeedForward, hidden: torch.Tensor, tokens: Tokens) -> Stages[torch.Tensor]:
    """Only tokens whose experts are on other workers wait for anything."""
    if isinstance(half, ShardedExperts):
        return (yield from half.stages(hidden, tokens))
    return half(hidden, tokens)


def _at_least_two(index: torch.Tensor, rows: int) -> torch.Tensor:
    """Products of one row add in another order: one of several rows is computed twice."""
    return index.repeat(2) if len(index) == 1 and rows > 1 else index
