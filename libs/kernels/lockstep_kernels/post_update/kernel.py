"""The end of a step in Triton: one program, as all its work is a few loads and stores a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait
from lockstep_kernels.post_update.state import RowState

_ROWS = 256  # that are done at a time


@triton.jit
def _finish(
    index_ptr,
    tokens_ptr,
    bad_ptr,
    last_ptr,
    lengths_ptr,
    alive_ptr,
    limits_ptr,
    history_ptr,
    stop_ids_ptr,
    counts_ptr,
    ring_ptr,
    cursor_ptr,
    size,
    RING_DEPTH: tl.constexpr,
    RING_WIDTH: tl.constexpr,
    HISTORY: tl.constexpr,
    STOP_IDS: tl.constexpr,
    VOCAB: tl.constexpr,
    ROW_SHIFT: tl.constexpr,
    STOP_BIT: tl.constexpr,
    LENGTH_BIT: tl.constexpr,
    FAULT_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    cursor = tl.load(cursor_ptr)
    line = ring_ptr + (cursor % RING_DEPTH) * RING_WIDTH
    for first in range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        listed = i < size
        row = tl.load(index_ptr + i, mask=listed, other=0)
        live = listed & (tl.load(alive_ptr + row, mask=listed, other=0) != 0)
        token = tl.load(tokens_ptr + i, mask=live, other=0)
        length = tl.load(lengths_ptr + row, mask=live, other=0)
        limit = tl.load(limits_ptr + row, mask=live, other=0)
        end = tl.where(length + 1 >= limit, LENGTH_BIT, 0).to(tl.int64)
        for s in tl.static_range(STOP_IDS):  # loads that do not wait for each other
            stop = tl.load(stop_ids_ptr + row * STOP_IDS + s, mask=live, other=-1)
            end = tl.where(token == stop, STOP_BIT, end)
        if bad_ptr is not None:
            end = tl.where(tl.load(bad_ptr + i, mask=live, other=0) != 0, FAULT_BIT, end)
        word = token | (row << ROW_SHIFT) | end
        tl.store(line + i, tl.where(live, word, -1), mask=listed)
        column = tl.minimum(length, HISTORY - 1)
        tl.store(history_ptr + row * HISTORY + column, token, mask=live)
        tl.store(last_ptr + row, token, mask=live)
        tl.store(lengths_ptr + row, length + 1, mask=live)
        tl.store(alive_ptr + row, end == 0, mask=live)
        if counts_ptr is not None:
            count = counts_ptr + row * VOCAB + token
            tl.store(count, tl.load(count, mask=live, other=0) + 1, mask=live)
    tl.debug_barrier()  # every thread has read the cursor
    tl.store(cursor_ptr, cursor + 1)


def finish(
    index: torch.Tensor,
    tokens: torch.Tensor,
    bad: torch.Tensor | None,
    state: RowState,
    ring: torch.Tensor,
    cursor: torch.Tensor,
    bits: tuple[int, int, int, int],
) -> None:
    """`bits`: row_shift, stop_bit, length_bit, fault_bit."""
    row_shift, stop_bit, length_bit, fault_bit = bits
    pdl = dependent.supported(index.device)
    block = min(_ROWS, max(32, triton.next_power_of_2(len(index))))
    _finish[(1,)](
        index,
        tokens,
        bad,
        state.last,
        state.lengths,
        state.alive,
        state.limits,
        state.history,
        state.stop_ids,
        state.counts,
        ring,
        cursor,
        len(index),
        RING_DEPTH=ring.shape[0],
        RING_WIDTH=ring.shape[1],
        HISTORY=state.history.shape[1],
        STOP_IDS=state.stop_ids.shape[1],
        VOCAB=0 if state.counts is None else state.counts.shape[1],
        ROW_SHIFT=row_shift,
        STOP_BIT=stop_bit,
        LENGTH_BIT=length_bit,
        FAULT_BIT=fault_bit,
        BLOCK=block,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=block // 32,
    )
