"""`all2all` in Triton, for windows that are mapped into each GPU's address space.

Senders: programs go through (row, block of columns), read each once and store it in the windows that it is for. The program that
comes last to the counter tells all ranks. Each comes with acquire and release for the whole system: what it stored elsewhere is
there before its turn is counted, and so before anybody is told.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from lockstep_kernels import dependent
from lockstep_kernels.all2all import Peers
from lockstep_kernels.dependent import release
from lockstep_kernels.dependent import wait as wait_before

BLOCK: Final = 1024  # columns of a row at a time: 16 bytes of bfloat16 a thread
RESIDENT: Final = 8  # programs of a sender on a processor; nothing waits for them, so there may be any number
INTERPRETED: Final = 4  # programs where there are no processors


@triton.jit
def _tell(counters, flags, epoch, KIND: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """After a program's last store. The last program tells everybody."""
    tl.debug_barrier()
    before = tl.atomic_add(counters + 1 + KIND, 1, sem="acq_rel", scope="sys")
    if before == tl.num_programs(0) - 1:
        tl.store(counters + 1 + KIND, 0)
        tl.store(counters, epoch)
        for rank in tl.static_range(SIZE):
            tl.atomic_xchg(flags[rank] + KIND * SIZE + RANK, epoch, sem="release", scope="sys")


@triton.jit
def _until_told(
    flags, counters, failed, fault, limit,
    KIND: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Until all ranks have told; or for `limit` ns (polls, without a clock), or until anybody has given up."""
    epoch = tl.load(counters)
    rank = tl.arange(0, WIDE)
    inside = rank < SIZE
    missing = 1
    waited = tl.zeros((), tl.int64)
    longest = waited + limit
    start = globaltimer().to(tl.int64) if CLOCK else waited
    while (missing != 0) & (waited < longest):
        told = tl.atomic_add(flags + KIND * SIZE + rank, 0, mask=inside, sem="acquire", scope="sys")
        missing = tl.sum(tl.where(inside & (told - epoch < 0), 1 << rank, 0))
        if CLOCK:
            waited = globaltimer().to(tl.int64) - start
        else:
            waited += 1
        if tl.load(failed, volatile=True) != 0:
            waited = longest
    if missing != 0:
        tl.atomic_or(failed, missing)
        tl.store(fault, missing)
    tl.debug_barrier()


@triton.jit
def _send_tokens(
    x_ptr, ids_ptr, weights_ptr, to_x, to_ids, to_weights, to_flags, counters, tokens, capacity,
    RANK: tl.constexpr, SIZE: tl.constexpr, LOCAL: tl.constexpr, HIDDEN: tl.constexpr, CHOSEN: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release(PDL)
    blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    choice, width = tl.arange(0, WIDE), tl.full((), HIDDEN, tl.int64)
    wait_before(PDL)
    epoch = tl.load(counters) + 1
    for item in range(tl.program_id(0), capacity * blocks, tl.num_programs(0)):
        token, block = item // blocks, item % blocks
        column = block * BLOCK + tl.arange(0, BLOCK)
        live = token < tokens
        inside = (column < HIDDEN) & live
        chosen = tl.load(ids_ptr + token * CHOSEN + choice, mask=(choice < CHOSEN) & live, other=-1)
        factors = tl.load(weights_ptr + token * CHOSEN + choice, mask=(choice < CHOSEN) & live, other=0.0)
        row = tl.load(x_ptr + token * width + column, mask=inside, other=0.0)
        place = RANK * capacity + token
        first = (choice < CHOSEN) & (block == 0)
        for rank in tl.static_range(SIZE):
            here = tl.where((chosen >= rank * LOCAL) & (chosen < (rank + 1) * LOCAL), chosen - rank * LOCAL, -1)
            wanted = tl.max(here) >= 0
            tl.store(to_x[rank] + place * width + column, row, mask=inside & wanted)
            tl.store(to_ids[rank] + place * CHOSEN + choice, here, mask=first)
            tl.store(to_weights[rank] + place * CHOSEN + choice, factors, mask=first)
    _tell(counters, to_flags, epoch, 0, RANK, SIZE)


@triton.jit
def _wait(
    flags, counters, failed, fault, limit, SIZE: tl.constexpr, WIDE: tl.constexpr, CLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    release(PDL)
    wait_before(PDL)
    _until_told(flags, counters, failed, fault, limit, 0, SIZE, WIDE, CLOCK)


@triton.jit
def _send_results(
    results_ptr, ids_ptr, to_results, to_flags, counters, capacity,
    RANK: tl.constexpr, SIZE: tl.constexpr, HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, WIDE: tl.constexpr,
    APART: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release(PDL)
    blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    each: tl.constexpr = CHOSEN if APART else 1  # results of a token
    choice, width = tl.arange(0, WIDE), tl.full((), HIDDEN, tl.int64)
    wait_before(PDL)
    epoch = tl.load(counters)
    for item in range(tl.program_id(0), SIZE * capacity * each * blocks, tl.num_programs(0)):
        row, block = item // blocks, item % blocks
        column = block * BLOCK + tl.arange(0, BLOCK)
        source = row // (capacity * each)
        place = row - source * capacity * each
        if APART:
            wanted = tl.load(ids_ptr + row) >= 0
        else:
            wanted = tl.max(tl.load(ids_ptr + row * CHOSEN + choice, mask=choice < CHOSEN, other=-1)) >= 0
            place += RANK * capacity
        inside = (column < HIDDEN) & wanted
        result = tl.load(results_ptr + row * width + column, mask=inside, other=0.0)
        for rank in tl.static_range(SIZE):
            tl.store(to_results[rank] + place * width + column, result, mask=inside & (source == rank))
    _tell(counters, to_flags, epoch, 1, RANK, SIZE)


@triton.jit
def _add_results(
    ids_ptr, plus_ptr, then_ptr, results_ptr, out_ptr, flags, counters, failed, fault, limit, capacity,
    SIZE: tl.constexpr, LOCAL: tl.constexpr, HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, WIDE: tl.constexpr,
    RANKS: tl.constexpr, APART: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr, CLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    choice = tl.arange(0, WIDE)
    wait_before(PDL)
    _until_told(flags, counters, failed, fault, limit, 1, SIZE, RANKS, CLOCK)
    total = tl.load(plus_ptr + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    if APART:
        for j in tl.static_range(CHOSEN):
            present = tl.load(ids_ptr + token * CHOSEN + j) >= 0
            row = token * CHOSEN + j
            total += tl.load(results_ptr + row * HIDDEN + column, mask=inside & present, other=0.0).to(tl.float32)
    else:
        chosen = tl.load(ids_ptr + token * CHOSEN + choice, mask=choice < CHOSEN, other=-1)
        for rank in tl.static_range(SIZE):
            present = tl.max(tl.where((chosen >= rank * LOCAL) & (chosen < (rank + 1) * LOCAL), 1, 0)) > 0
            row = rank * capacity + token
            total += tl.load(results_ptr + row * HIDDEN + column, mask=inside & present, other=0.0).to(tl.float32)
    if LAST:
        total += tl.load(then_ptr + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def send_tokens(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, peers: Peers, capacity: int, *, pdl: bool | None = None
) -> None:
    """See the public function."""
    (hidden, chosen), windows = (x.shape[1], ids.shape[1]), peers.windows
    pdl = dependent.supported(x.device) if pdl is None else pdl
    block = min(triton.next_power_of_2(hidden), BLOCK)
    _send_tokens[_programs(capacity * triton.cdiv(hidden, block), x.device)](
        x, ids, weights, tuple(w.x for w in windows), tuple(w.ids for w in windows), tuple(w.weights for w in windows),
        tuple(w.flags for w in windows), peers.state.counters, len(ids), capacity,
        RANK=peers.rank, SIZE=len(windows), LOCAL=peers.local, HIDDEN=hidden, CHOSEN=chosen,
        WIDE=triton.next_power_of_2(chosen), BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def wait(peers: Peers, *, pdl: bool | None = None, clock: bool | None = None) -> None:
    """See the public function. `clock`: False where there is none, as in the interpreter; then the limit is in polls."""
    state, size, mine = peers.state, len(peers.windows), peers.mine
    pdl = dependent.supported(mine.x.device) if pdl is None else pdl
    _wait[(1,)](
        mine.flags, state.counters, state.failed, state.fault, peers.limit, SIZE=size,
        WIDE=triton.next_power_of_2(size), CLOCK=mine.x.is_cuda if clock is None else clock, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def send_results(results: torch.Tensor, peers: Peers, capacity: int, *, pdl: bool | None = None) -> None:
    """See the public function."""
    (hidden, chosen), windows = (results.shape[-1], peers.mine.ids.shape[1]), peers.windows
    pdl = dependent.supported(results.device) if pdl is None else pdl
    block = min(triton.next_power_of_2(hidden), BLOCK)
    rows = len(windows) * capacity * (chosen if peers.apart else 1)
    _send_results[_programs(rows * triton.cdiv(hidden, block), results.device)](
        results, peers.mine.ids, tuple(w.results for w in windows), tuple(w.flags for w in windows),
        peers.state.counters, capacity, RANK=peers.rank, SIZE=len(windows), HIDDEN=hidden, CHOSEN=chosen,
        WIDE=triton.next_power_of_2(chosen), APART=peers.apart, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def add_results(
    ids: torch.Tensor, plus: torch.Tensor, then: torch.Tensor | None, peers: Peers, capacity: int,
    *, pdl: bool | None = None, clock: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """See the public function. A rank without a token waits all the same: others' tokens of the next exchange must not come before
    it knows that this one is over."""
    state, mine, size = peers.state, peers.mine, len(peers.windows)
    tokens, hidden = plus.shape
    pdl = dependent.supported(plus.device) if pdl is None else pdl
    block = min(triton.next_power_of_2(hidden), BLOCK)
    out = torch.empty_like(plus)
    given = ids, plus, then, out
    if tokens == 0:
        one = torch.empty(1, hidden, dtype=plus.dtype, device=plus.device)
        given = ids.new_full((1, ids.shape[1]), -1), one, None, one
    _add_results[(max(1, tokens), triton.cdiv(hidden, block))](
        *given[:3], mine.results, given[3], mine.flags, state.counters, state.failed, state.fault, peers.limit, capacity,
        SIZE=size, LOCAL=peers.local, HIDDEN=hidden, CHOSEN=ids.shape[1],
        WIDE=triton.next_power_of_2(ids.shape[1]), RANKS=triton.next_power_of_2(size), APART=peers.apart,
        LAST=given[2] is not None, BLOCK=block, CLOCK=plus.is_cuda if clock is None else clock, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _programs(items: int, device: torch.device) -> tuple[int]:
    """A sender's grid: as many programs as fit at a time."""
    if device.type != "cuda":
        return (max(1, min(items, INTERPRETED)),)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return (max(1, min(items, processors * RESIDENT)),)
