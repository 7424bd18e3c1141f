"""Latent attention on CUDA: chooses kernels and their shapes, and lays out a pass's work for all layers.

- Decode: `plan_decode` once a step; in each layer `finish` (norm, rotation, cache write, and the queries absorbed), then `decode`:
  softmax(q . latents) latents in parts of the sequences, and the parts' sum times the weights of the values. No length is
  needed on the host.
- Prompts: the new tokens of a pass attend to themselves, expanded. What lies in the cache before them is gathered and expanded
  in pieces of bounded size, one after the other, each merged into the result by log-sum-exp. So memory depends on the pass,
  not on the context.
- Captured prompts: the same by lengths on the device. What lies in the cache before them is one piece of fixed size, of which
  `expand_kernel` fills as much as there is, and a program attends to that first and then to its own tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import triton

from lockstep_kernels import dependent
from lockstep_kernels.attention.kernel import tasks_kernel
from lockstep_kernels.mla import kernel
from lockstep_kernels.mla.batch import Expansion, LatentBatch, Prepared, takes_width
from lockstep_kernels.rms_norm import Norm

MANY: Final = 16  # sequences from which on merging and expanding values are two kernels
PARTS: Final = 16  # that a program merges at a time, at most
PIECE_BYTES: Final = 1 << 27  # of a piece's keys and values

Span = tuple[int, int, int, int, int]  # first query, queries, first key, keys, keys that the first query sees


@dataclass(frozen=True, slots=True)
class Split:
    """How a decode step cuts its work: among programs, in tiles of keys for some of the heads."""

    programs: int
    heads: int  # of a program
    keys: int  # of a tile
    least: int  # tiles that a program takes of long sequences: merging costs as much as reading a few more
    warps: int
    stages: int
    registers: int | None = None  # of a thread at most
    ahead: int = 2  # tiles that a program asks for before the queries are there


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Which program attends to what: the tiles of all sequences one after the other, in equal shares.

    A sequence is in as many parts as programs have a share of it. Program p's part of sequence b is part p + b, as each
    next part is of the next program or of the next sequence. `plan` int32: for each program its first sequence, that one's first tile,
    its end and its length [programs, 4]; tiles a share [1]; first tile of each sequence and the end [B + 1]. Made on the device, so that a captured step follows the lengths.
    """

    split: Split
    plan: torch.Tensor
    seq_lens: torch.Tensor  # [B] int64
    table: torch.Tensor  # [B, W] int64
    block_size: int
    parts: torch.Tensor  # workspace float32 [programs + B, H, rank]
    lse: torch.Tensor  # workspace float32 [programs + B, H], of base 2

    @property
    def sequences(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How prompts cut their work: tiles of queries by tiles of keys."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Cached positions that are expanded together: their slots in the cache [n] int64, and the spans that see them."""

    slots: torch.Tensor
    spans: torch.Tensor


@dataclass(frozen=True, slots=True)
class Cached:
    """The one piece of a captured pass: which of its room is taken is known on the device."""

    slots: torch.Tensor  # [n] int64
    count: torch.Tensor  # [] int64: of them
    expanded: torch.Tensor  # workspace [n, H * (nope + value) + rope]


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The work of a pass. `spans` int32 [N, 5]: tiles of queries against keys, see `Span`; the longest come first.

    Of a captured pass they are [N, 7], see `attend_kernel`, and there are no pieces."""

    tiling: Tiling
    spans: torch.Tensor
    pieces: tuple[Piece, ...]
    cached: Cached | None = None


def check_widths(expansion: Expansion, rope: int) -> None:
    """Raises ValueError naming what the kernels do not have."""
    for name, width in (("kv_lora_rank", expansion.rank), ("qk_rope_head_dim", rope)):
        if not takes_width(width):
            raise ValueError(f"{name} is {width}: on CUDA it must be a power of two from 16 on")


def prepare(batch: LatentBatch, expansion: Expansion, rope: int, dtype: torch.dtype) -> DecodePlan | PromptPlan:
    """The plan of a pass."""
    if batch.query_starts is not None:
        return plan_captured(batch, batch.query_starts, expansion, rope, dtype, choose_tiling(dtype))
    if batch.decode:
        device = batch.seq_lens.device
        split = choose_split(expansion.heads, batch.block_size, dtype, device)
        return plan_decode(batch.seq_lens, batch.block_table, batch.block_size, expansion, split)
    return plan_prompts(batch, expansion, dtype, choose_tiling(dtype))


def attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    norm: Norm,
    cache: torch.Tensor,
    prepared: Prepared,
    expansion: Expansion,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """See the public function."""
    plan = prepared.plan
    if isinstance(plan, DecodePlan):
        absorbed = finish(q, latents, norm, cache, prepared, expansion)
        assert absorbed is not None
        decode(q, absorbed, cache, plan, expansion, scale, out, lse=lse)
        return
    assert isinstance(plan, PromptPlan)
    finish(q, latents, norm, cache, prepared)
    attend(q, latents, cache, plan, expansion, scale, out, lse)


@functools.cache
def choose_split(heads: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Split:
    """A few heads: tiles of 36 KiB, two of them on their way for each of two programs that a multiprocessor holds at a time.
    Many heads: matrix instructions at their full height, and the registers are full of results.
    """
    units = torch.cuda.get_device_properties(device).multi_processor_count
    if dtype.itemsize > 2:
        return Split(units, 16, 32, 2, warps=4, stages=2)
    if heads <= 16:
        return Split(2 * units, 16, 32, 2, warps=4, stages=3 + (block_size < 32))
    return Split(max(1, units // triton.cdiv(heads, 32)), 32, 64, 1, warps=8, stages=2)


def plan_decode(
    seq_lens: torch.Tensor, table: torch.Tensor, block_size: int, expansion: Expansion, split: Split
) -> DecodePlan:
    """`split`: of `choose_split`, unless others are tried."""
    sequences, slots = seq_lens.shape[0], split.programs + seq_lens.shape[0]
    plan = seq_lens.new_empty(4 * split.programs + sequences + 2, dtype=torch.int32)
    kernel.plan_kernel[(split.programs,)](
        seq_lens,
        plan,
        sequences,
        table.shape[1] * block_size,
        LEAST=split.least,
        TILE=split.keys,
        BLOCK=triton.next_power_of_2(sequences),
        num_warps=4,
    )
    parts = torch.empty(slots, expansion.heads, expansion.rank, dtype=torch.float32, device=seq_lens.device)
    return DecodePlan(split, plan, seq_lens, table, block_size, parts, torch.empty_like(parts[..., 0]))


def finish(
    q: torch.Tensor,
    latents: torch.Tensor,
    norm: Norm,
    cache: torch.Tensor,
    prepared: Prepared,
    expansion: Expansion | None = None,
) -> torch.Tensor | None:
    """Norm, rotation and cache write; with an `expansion`, also the absorbed queries [T, H, rank]."""
    tokens, heads, width = q.shape
    rank = norm.gain.shape[0]
    rope = latents.shape[1] - rank
    nope = width - rope
    absorbed = None if expansion is None else torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
    weight = q if expansion is None else expansion.weight
    rows, columns = absorbed_tile(tokens, rank)
    tiles = 0 if expansion is None else triton.cdiv(tokens, rows) * heads * (rank // columns)
    pdl = dependent.supported(q.device)
    kernel.finish_kernel[(tokens + tiles,)](
        q, latents, norm.gain, prepared.cos, prepared.sin, cache, prepared.slots, weight, q if absorbed is None else absorbed,
        tokens, q.stride(0), q.stride(1), latents.stride(0), 0 if expansion is None else weight.stride(0), norm.eps,
        HEADS=heads, BLOCK_H=triton.next_power_of_2(heads), NOPE=nope, BLOCK_NOPE=max(16, triton.next_power_of_2(nope)),
        ROPE=rope, RANK=rank, INTERLEAVED=prepared.interleaved, ROWS=rows, COLUMNS=columns, PRECISION=precision(q),
        PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return absorbed


def absorbed_tile(tokens: int, rank: int) -> tuple[int, int]:
    """Rows and columns of a tile of absorbed queries."""
    return _tile_rows(tokens), min(rank, 64 if tokens <= 64 else 128)


def decode(
    q: torch.Tensor,
    absorbed: torch.Tensor,
    cache: torch.Tensor,
    plan: DecodePlan,
    expansion: Expansion,
    scale: float,
    out: torch.Tensor,
    many: int = MANY,
    lse: torch.Tensor | None = None,
) -> None:
    """See `attention`; `absorbed` of `finish` or `absorb`. A sequence without positions gets zeros."""
    heads, rank, nope, value = expansion.heads, expansion.rank, expansion.nope, expansion.value
    split, pdl = plan.split, dependent.supported(q.device)
    kernel.decode_kernel[(split.programs, triton.cdiv(heads, split.heads))](
        absorbed, q, cache, plan.table, plan.seq_lens, plan.plan, plan.parts, plan.lse,
        plan.sequences, q.stride(0), q.stride(1), plan.table.stride(0), scale * math.log2(math.e),
        NOPE=nope, HEADS=heads, BLOCK_H=split.heads, RANK=rank, ROPE=q.shape[2] - nope, BLOCK_SIZE=plan.block_size,
        TILE=split.keys, STAGES=split.stages, AHEAD=split.ahead, PRECISION=precision(q), PDL=pdl, launch_pdl=pdl,
        num_warps=split.warps, maxnreg=split.registers,
    )  # fmt: skip
    parts, tokens = (plan.parts, plan.lse, plan.plan), plan.sequences
    if tokens < many:
        columns = min(32, triton.next_power_of_2(value))
        kernel.merged_values_kernel[(heads, tokens, triton.cdiv(value, columns))](
            *parts, expansion.weight, out, lse, split.programs, out.stride(0),
            HEADS=heads, NOPE=nope, VALUE=value, RANK=rank, COLUMNS=columns, PARTS=PARTS, STAGES=3,
            PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip
        return
    merged = torch.empty_like(absorbed)
    expected = min(PARTS, triton.next_power_of_2(split.programs // tokens + 1))  # of sequences of one length
    kernel.merge_kernel[(heads, tokens)](
        *parts, merged, lse, split.programs, HEADS=heads, RANK=rank, PARTS=expected, PDL=pdl, launch_pdl=pdl
    )
    side = 32 if tokens <= 64 else 64
    rows, columns = min(side, _tile_rows(tokens)), max(16, min(side, triton.next_power_of_2(value)))
    kernel.values_kernel[(heads, triton.cdiv(tokens, rows), triton.cdiv(value, columns))](
        merged, expansion.weight, out, tokens, out.stride(0),
        HEADS=heads, NOPE=nope, VALUE=value, RANK=rank, ROWS=rows, COLUMNS=columns, PRECISION=precision(q),
        PDL=pdl, launch_pdl=pdl, num_warps=8,
    )  # fmt: skip


def _tile_rows(tokens: int) -> int:
    """Rows of a tile of a product of so many."""
    return min(64, max(16, int(triton.next_power_of_2(tokens))))


def precision(operand: torch.Tensor) -> str:
    return "ieee" if operand.dtype == torch.float32 else "tf32"


def choose_tiling(dtype: torch.dtype) -> Tiling:
    """By the registers and the shared memory that a program needs."""
    return Tiling(64, 32, 4, 2) if dtype.itemsize > 2 else Tiling(128, 64, 8, 3)


def plan_prompts(
    batch: LatentBatch, expansion: Expansion, dtype: torch.dtype, tiling: Tiling, piece: int | None = None
) -> PromptPlan:
    """`tiling`: of `choose_tiling`, unless others are tried; so is `piece`, the positions of one at most."""
    device = batch.seq_lens.device
    if piece is None:
        piece = max(1, PIECE_BYTES // (expansion.weight[..., 0].numel() * dtype.itemsize))
    own: list[Span] = []
    pieces: list[list[Span]] = []
    owners: list[tuple[int, int]] = []  # sequences with cached positions, and how many
    first, room = 0, 0
    for i, (new, total) in enumerate(zip(batch.query_lens, batch.host_seq_lens, strict=True)):
        own += tiles(tiling.rows, first, new, first, new, 1)
        left = total - new
        if left:
            owners.append((i, left))
        while left:
            if not room:
                pieces.append([])
                room = piece
            count = min(left, room)
            pieces[-1] += tiles(tiling.rows, first, new, piece - room, count, count)
            left, room = left - count, room - count
        first += new
    spans, *others = uploaded([own, *pieces], device)
    slots = torch.split(cached_slots(batch, owners), piece) if owners else ()
    return PromptPlan(tiling, spans, tuple(Piece(*pair) for pair in zip(slots, others, strict=True)))


def plan_captured(
    batch: LatentBatch,
    query_starts: torch.Tensor,
    expansion: Expansion,
    rope: int,
    dtype: torch.dtype,
    tiling: Tiling,
) -> PromptPlan:
    """As many spans as any lengths need; those that these do not need are empty."""
    sequences, device = batch.seq_lens.shape[0], query_starts.device
    listed = (batch.tokens + (sequences + 1) * (tiling.rows - 1)) // tiling.rows  # rows of no sequence are one more
    tasks = torch.zeros(listed, 4, dtype=torch.int32, device=device)
    tasks_kernel[(listed,)](
        query_starts, batch.seq_lens, tasks, sequences, batch.tokens, EACH=tiling.rows,
        WIDTH=triton.next_power_of_2(sequences + 1),
    )  # fmt: skip
    before = batch.seq_lens - query_starts.diff()  # cached positions of each
    ends = before.cumsum(0)
    token, position, rows, owner = tasks.long().unbind(1)
    cached = before[owner].where(position >= 0, 0)
    ahead = position - cached
    spans = (token, rows, token - ahead, ahead + rows, (ahead + 1).clamp(min=0), (ends - before)[owner], cached)
    row = torch.arange(batch.cached, device=device)
    own = torch.searchsorted(ends, row, right=True).clamp(max=sequences - 1)
    position = (row - (ends - before)[own]).minimum(before[own] - 1).clamp(min=0)
    size = batch.block_size
    slots = batch.block_table[own, position // size] * size + position % size
    width = expansion.heads * (expansion.nope + expansion.value) + rope
    expanded = torch.empty(batch.cached, width, dtype=dtype, device=device)
    return PromptPlan(tiling, torch.stack(spans, 1).int(), (), Cached(slots, ends[-1], expanded))


def attend(
    q: torch.Tensor,
    latents: torch.Tensor,
    cache: torch.Tensor,
    plan: PromptPlan,
    expansion: Expansion,
    scale: float,
    out: torch.Tensor,
    whole_lse: torch.Tensor | None = None,
) -> None:
    """See `attention`."""
    tokens, heads, _ = q.shape
    if whole_lse is not None and plan.cached is not None:
        raise ValueError("a captured prefill pass does not give the log-sum-exp")
    state = lse = out
    merge = bool(plan.pieces) or whole_lse is not None
    if merge:
        state = torch.empty(tokens, heads * expansion.value, dtype=torch.float32, device=q.device)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if whole_lse is None else whole_lse
        lse.fill_(-torch.inf)
    cached = cache.view(-1, cache.shape[-1])
    for piece in plan.pieces:
        launch(q, cached[piece.slots], piece.spans, plan.tiling, expansion, scale, state, lse, state, True)
    if plan.cached is not None:
        _expand(cached, plan.cached, expansion)
    launch(q, latents, plan.spans, plan.tiling, expansion, scale, state, lse, out, merge, plan.cached)
    if whole_lse is not None:
        whole_lse.mul_(math.log(2))


def launch(
    q: torch.Tensor,
    latents: torch.Tensor,
    spans: torch.Tensor,
    tiling: Tiling,
    expansion: Expansion,
    scale: float,
    state: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    merge: bool,
    cached: Cached | None = None,
) -> None:
    """Attends to the expanded latents [S, rank + rope]; with `merge` on top of what (state, lse) have, updating lse."""
    rank, heads, nope, value = expansion.rank, expansion.heads, expansion.nope, expansion.value
    expanded = torch.nn.functional.linear(latents[:, :rank], expansion.weight.view(-1, rank))
    pdl = dependent.supported(q.device)
    before = expanded if cached is None else cached.expanded
    kernel.attend_kernel[(heads, spans.shape[0])](
        q, expanded, latents, before, spans, state, lse, out,
        q.stride(0), q.stride(1), expanded.stride(0), latents.stride(0), before.stride(0), out.stride(0),
        scale * math.log2(math.e),
        HEADS=heads, NOPE=nope, BLOCK_NOPE=max(16, triton.next_power_of_2(nope)), ROPE=q.shape[2] - nope, RANK=rank,
        VALUE=value, BLOCK_VALUE=max(16, triton.next_power_of_2(value)), MERGE=merge, CAPTURED=cached is not None,
        ROWS=tiling.rows, TILE=tiling.keys, STAGES=tiling.stages, PRECISION=precision(q), PDL=pdl, launch_pdl=pdl, num_warps=tiling.warps,
    )  # fmt: skip


def _expand(cache: torch.Tensor, cached: Cached, expansion: Expansion) -> None:
    """Keys and values of what a captured pass has before its new tokens; cache [slots, rank + rope]."""
    heads, rank, width = expansion.heads, expansion.rank, expansion.nope + expansion.value
    pdl, tall = dependent.supported(cache.device), cache.dtype.itemsize <= 2
    rows, inner = (128, 64) if tall else (32, 32)
    kernel.expand_kernel[(heads, triton.cdiv(len(cached.slots), rows))](
        cache, cached.slots, cached.count, expansion.weight, cached.expanded,
        HEADS=heads, WIDTH=width, BLOCK_WIDTH=max(16, triton.next_power_of_2(width)), RANK=rank,
        ROPE=cache.shape[1] - rank, ROWS=rows, INNER=min(inner, rank), PRECISION=precision(cache),
        PDL=pdl, launch_pdl=pdl, num_warps=8,
    )  # fmt: skip


def tiles(rows: int, first: int, new: int, first_key: int, keys: int, seen: int) -> Iterator[Span]:
    """Of `new` queries, of which the first sees `seen` of the keys, and each other one more than the one before it."""
    for start in range(0, new, rows):
        count = min(rows, new - start)
        visible = min(keys, seen + start)
        yield first + start, count, first_key, min(keys, visible + count - 1), visible


def uploaded(groups: list[list[Span]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Each group as int32 [n, 5] on the device, the longest first."""
    groups = [sorted(spans, key=lambda span: -_work(span)) for spans in groups]
    flat = _upload([value for spans in groups for span in spans for value in span], torch.int32, device).view(-1, 5)
    return torch.split(flat, [len(spans) for spans in groups])


def _work(span: Span) -> int:
    return span[3]


def cached_slots(batch: LatentBatch, owners: list[tuple[int, int]]) -> torch.Tensor:
    """Slots of the first positions of sequences: pairs of a sequence and how many."""
    device, size = batch.seq_lens.device, batch.block_size
    sequences, counts = _upload([value for pair in owners for value in pair], torch.int64, device).view(-1, 2).unbind(1)
    total = sum(count for _, count in owners)
    starts = counts.cumsum(0) - counts
    owner = torch.repeat_interleave(torch.arange(len(owners), device=device), counts, output_size=total)
    positions = torch.arange(total, device=device) - starts[owner]
    return batch.block_table[sequences[owner], positions // size] * size + positions % size


def _upload(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Through page-locked memory, so that the host does not wait for the device."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
