"""Attention on CUDA: chooses kernels and their shapes, and lays out a pass's work for all layers.

- Decode: `schedule_kernel` once a pass, then `decode_kernel` in each layer. Neither needs a length on the host.
- Prefill: sequences whose whole context is in the pass go to cuDNN as far as `DENSE_UNIT` divides them, over the keys and
  values as they were just computed; everything else is `prefill_kernel` over the cache, one launch for the whole pass.
- Captured prefill: `tasks_kernel` lists the work once a pass by lengths on the device, and all of it is `prefill_kernel`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep_kernels import dependent
from lockstep_kernels.attention import kernel
from lockstep_kernels.attention.batch import PagedBatch

MOST_WHOLE: Final = 8  # programs a processor, if each has a pair of its own
MERGED: Final = 8192  # partial sums that a program merges at a time
DENSE_FROM: Final = 512  # tokens from which on cuDNN is faster
DENSE_WIDEST: Final = 128  # head that cuDNN takes
DENSE_UNIT: Final = 512  # cuDNN prepares a plan for each length it meets: let there be few


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One new token a sequence: who does what, and workspaces that all layers share."""

    batch: PagedBatch
    starts: torch.Tensor  # these as `decode_kernel` names them
    sequences: torch.Tensor
    arrived: torch.Tensor
    sums: torch.Tensor
    stats: torch.Tensor
    constants: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Split:
    """How a decode step cuts its work: among programs, in tiles of keys."""

    processors: int
    keys: int  # of a tile
    resident: int = 3  # programs for each multiprocessor, which holds them all at a time
    cut: int = 4  # tiles that a program could read while a pair is merged
    whole: bool = True  # where it is faster, no program works on two pairs
    fixed: int = 0  # not 0: tiles of a split whose bounds depend on its sequence's length alone
    most: int = 16  # of those a sequence has; longer ones have longer splits
    stages: int = 3
    registers: int = 168  # of a thread: 512 among all programs that a multiprocessor holds
    ahead: bool = True  # as `decode_kernel` says

    @property
    def programs(self) -> int:
        return self.processors * self.resident


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


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the prefill kernel cuts its work: rows of queries by keys."""

    rows: int
    keys: int
    warps: int
    stages: int
    described: bool  # tiles come through the copy engine, where a block holds whole ones
    parts: int = 1  # tiles that are taken at once


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """New tokens of any number a sequence."""

    batch: PagedBatch
    tasks: torch.Tensor  # [n, 4] int32, as `prefill_kernel` names them, the longest first
    tiling: Tiling
    dense: tuple[Dense, ...]


Plan = DecodePlan | PrefillPlan
Scales = tuple[torch.Tensor, torch.Tensor] | None


def prepare(
    batch: PagedBatch,
    *,
    group: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
    new_kv: bool,
    split: Split | None = None,
    tiling: Tiling | None = None,
) -> Plan:
    """See the public function. The `split` of a decode step and the `tiling` of a prefill pass are chosen if not given."""
    if batch.query_starts is not None or batch.lens is None:
        tiling = tiling or choose_tiling(head_dim, dtype, batch.block_size)
        if batch.query_starts is not None:
            return _plan_captured_prefill(batch, batch.query_starts, group, tiling)
        dense = new_kv and batch.causal and not deterministic and _cudnn_takes(dtype, head_dim)
        return _plan_prefill(batch, group, device, dense, tiling)
    split = split or choose_split(len(batch.lens) * kv_heads, head_dim, dtype, device, deterministic)
    return _plan_decode(batch, batch.lens, group, kv_heads, head_dim, split)


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: Plan,
    scale: float,
    out: torch.Tensor | None,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None,
    kv_scale: Scales = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the public function."""
    tokens, heads, width = q.shape
    if q.stride()[1:] != (width, 1) or (out is not None and out.stride(1) != 1) or not cache.is_contiguous():
        raise ValueError("heads of q and rows of out must be contiguous, and the whole cache")
    if isinstance(plan, PrefillPlan) and plan.dense:
        if new_kv is None:
            raise ValueError("the pass was prepared for new keys and values as given, and they are not given")
        if lse is not None:
            raise ValueError("there is no log-sum-exp of a pass that was prepared for new keys and values as given")
        mixed = [_dense(part.of(q), part.of(new_kv[0]), part.of(new_kv[1]), scale) for part in plan.dense]
        if out is None and mixed[0].numel() == q.numel():
            return mixed[0].reshape(tokens, heads * width)
        out = q.new_empty(tokens, heads * width) if out is None else out
        for part, computed in zip(plan.dense, mixed, strict=True):
            part.of(out.view(-1, heads, width)).copy_(computed)
    elif out is None:
        out = q.new_empty(tokens, heads * width)
    if isinstance(plan, DecodePlan):
        _launch_decode(q, cache, plan, scale, out, kv_scale, lse)
    elif len(plan.tasks):
        _launch_prefill(q, cache, plan, scale, out, kv_scale, lse)
    return out


@functools.cache
def choose_split(pairs: int, head_dim: int, dtype: torch.dtype, device: torch.device, deterministic: bool) -> Split:
    """For so many pairs of a sequence and a key/value head, at most.

    Usually tiles of up to 16 KiB of 16-bit keys and as much of values, two of them on their way for each of three programs, or
    three smaller ones. Where pairs are a few more than such programs, each pair has a program of its own instead, which spares
    beginning and merging in the middle of them: as many as a processor can hold, of smaller tiles; or more, some of them after
    others.
    """
    columns = _columns(head_dim)
    keys = min(64, 8192 // columns)
    if dtype.itemsize > 2:
        keys = 16  # products of float32 are not for tensor cores: they take registers
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    usual = Split(processors, keys, fixed=256 // keys if deterministic else 0, stages=3 if head_dim > 64 else 4)
    if deterministic or columns != 128 or dtype.itemsize != 2 or not usual.programs < pairs <= MOST_WHOLE * processors:
        return usual
    if pairs <= 4 * processors:
        return replace(usual, resident=4, keys=32, stages=4, registers=128, cut=8)
    return replace(usual, resident=MOST_WHOLE)


def choose_tiling(head_dim: int, dtype: torch.dtype, block_size: int) -> Tiling:
    """By the registers and the shared memory that a program needs: narrow heads leave room for two programs side by side.

    Fewer registers than a program asks for are no bargain: the assembler then lets each tensor-core instruction wait for the
    one before it.
    """
    if dtype.itemsize > 2:
        return Tiling(16, 16, 4, 2, described=False)
    if head_dim > 128:
        return Tiling(64, 32, 4, 2, described=False)
    if block_size % 64 == 0 and head_dim == _columns(head_dim):
        return Tiling(128, 64, 8, 2, described=True, parts=1 if head_dim <= 64 else 2)
    return Tiling(128, 64, 8, 3, described=False)


def _plan_decode(
    batch: PagedBatch, lens: torch.Tensor, group: int, kv_heads: int, head_dim: int, split: Split
) -> DecodePlan:
    count, device = len(lens), lens.device
    few_rows = triton.next_power_of_2(group)
    fixed = {"FIXED": split.fixed > 0, "UNIT": split.fixed, "MOST": split.most}
    starts = torch.empty(split.programs, 8, dtype=torch.int32, device=device)
    sequences = torch.empty(count, 2, dtype=torch.int32, device=device)
    kernel.schedule_kernel[(split.programs,)](
        lens,
        starts,
        sequences,
        count,
        batch.max_seq_len,
        split.processors,
        split.cut,
        RESIDENT=split.resident,
        WHOLE=split.whole and not split.fixed,
        KV_HEADS=kv_heads,
        TILE=split.keys,
        WIDTH=max(16, triton.next_power_of_2(count)),
        **fixed,
    )
    slots = 2 * split.programs
    if split.fixed:
        slots = count * kv_heads * min(split.most, -(-batch.max_seq_len // (split.keys * split.fixed)))
    return DecodePlan(
        batch,
        starts,
        sequences,
        torch.zeros(count * kv_heads, dtype=torch.int32, device=device),  # after the schedule: see `decode_kernel`
        torch.empty(slots, group, head_dim, dtype=torch.float32, device=device),
        torch.empty(slots, 2, group, dtype=torch.float32, device=device),
        {
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "D": head_dim,
            "BLOCK_SIZE": batch.block_size,
            "ROWS": max(16, few_rows),
            "FEW_ROWS": few_rows,
            "COLUMNS": _columns(head_dim),
            "TILE": split.keys,
            "CHUNK": max(2, min(16, MERGED // (few_rows * _columns(head_dim)))),
            "STAGES": split.stages,
            "AHEAD": split.ahead and dependent.supported(device),
            "PDL": dependent.supported(device),
            "launch_pdl": dependent.supported(device),
            "maxnreg": split.registers,
            **fixed,
        },
    )


def _launch_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    out: torch.Tensor,
    kv_scale: Scales,
    lse: torch.Tensor | None,
) -> None:
    k_scale, v_scale = kv_scale or (None, None)
    table = plan.batch.block_table
    kernel.decode_kernel[(plan.starts.shape[0],)](
        q,
        cache,
        out,
        table,
        plan.starts,
        plan.sequences,
        plan.arrived,
        plan.sums,
        plan.stats,
        k_scale,
        v_scale,
        lse,
        table.shape[0],
        scale * math.log2(math.e),
        q.stride(0),
        out.stride(0),
        table.stride(0),
        **plan.constants,
    )


def _plan_prefill(batch: PagedBatch, group: int, device: torch.device, dense: bool, tiling: Tiling) -> PrefillPlan:
    parts = tuple(_dense_parts(batch)) if dense else ()
    done = {part.first + i * part.length: part.tokens for part in parts for i in range(part.sequences)}
    each = tiling.rows // group
    tasks: list[tuple[int, int, int, int]] = []
    first = 0
    for sequence, (new, total) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        for start in range(done.get(first, 0), new, each):
            position = total - new + start if batch.causal else total
            tasks.append((first + start, position, min(each, new - start), sequence))
        first += new
    tasks.sort(key=lambda task: -task[1])
    listed = torch.tensor(tasks, dtype=torch.int32).view(len(tasks), 4)
    if device.type == "cuda":
        listed = listed.pin_memory().to(device, non_blocking=True)
    return PrefillPlan(batch, listed, tiling, parts)


def _plan_captured_prefill(batch: PagedBatch, query_starts: torch.Tensor, group: int, tiling: Tiling) -> PrefillPlan:
    """As many tasks as any lengths need; those that these do not need are empty."""
    each, sequences = tiling.rows // group, len(batch.block_table)
    listed = (batch.tokens + (sequences + 1) * (each - 1)) // each  # rows that belong to no sequence are one more
    tasks = torch.empty(listed, 4, dtype=torch.int32, device=query_starts.device)
    kernel.tasks_kernel[(listed,)](
        query_starts,
        batch.lens,
        tasks,
        sequences,
        batch.tokens,
        EACH=each,
        WIDTH=triton.next_power_of_2(sequences + 1),
    )
    return PrefillPlan(batch, tasks, tiling, ())


def _cudnn_takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN has a kernel for operands beside a cache of this dtype: of 16 bits, heads of whole 16-byte pieces."""
    return dtype.itemsize <= 2 and head_dim % 8 == 0 and head_dim <= DENSE_WIDEST


def _dense_parts(batch: PagedBatch) -> Iterator[Dense]:
    """Neighbours of one length without a prefix, as far as cuDNN takes them."""
    first, start, lengths = 0, 0, batch.query_lens
    for end in range(1, len(lengths) + 1):
        if end < len(lengths) and lengths[end] == lengths[start] and batch.seq_lens[end] == batch.seq_lens[start]:
            continue
        length = lengths[start]
        if length >= DENSE_FROM and batch.seq_lens[start] == length:
            yield Dense(first, end - start, length, length // DENSE_UNIT * DENSE_UNIT)
        first += (end - start) * length
        start = end


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of tokens [sequences, tokens, heads, d] among themselves, laid out as q is."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=True
        )
    return mixed.transpose(1, 2)


def _launch_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    out: torch.Tensor,
    kv_scale: Scales,
    lse: torch.Tensor | None,
) -> None:
    k_scale, v_scale = kv_scale or (None, None)
    table, tiling = plan.batch.block_table, plan.tiling
    kv_heads, block_size, width = cache.shape[2:]
    described = TensorDescriptor.from_tensor(cache.view(-1, width), [tiling.keys, width]) if tiling.described else None
    kernel.prefill_kernel[(len(plan.tasks) * kv_heads,)](
        q,
        cache,
        described,
        out,
        table,
        plan.tasks,
        k_scale,
        v_scale,
        lse,
        scale * math.log2(math.e),
        q.stride(0),
        out.stride(0),
        table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=q.shape[1] // kv_heads,
        D=width,
        BLOCK_SIZE=block_size,
        ROWS=tiling.rows,
        COLUMNS=_columns(width),
        TILE=tiling.keys,
        PARTS=tiling.parts,
        DESCRIBED=tiling.described,
        CAUSAL=plan.batch.causal,
        STAGES=tiling.stages,
        PDL=dependent.supported(q.device),
        launch_pdl=dependent.supported(q.device),
        num_warps=tiling.warps,
    )


def _columns(head_dim: int) -> int:
    """A head's width in the kernels: a power of two that tensor cores take."""
    return max(16, int(triton.next_power_of_2(head_dim)))
