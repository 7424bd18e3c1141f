"""The ops around the expert products in Triton: choosing experts, ordering pairs by expert, adding up results.

A pair is a token with one of its chosen experts; pair p = t * k + j is token t's j-th.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait
from lockstep_kernels.moe.plan import Plan, plan_blocks
from lockstep_kernels.moe.weights import Routing

LOWEST, LOWEST_KEY = tl.constexpr(-(2**31)), tl.constexpr(-(2**63))
FEW_PAIRS, MANY_PAIRS = 1024, 4096  # beyond the many, every expert's program looking at all pairs takes too long
FEW_TOKENS = 2048  # up to which a processor has room for a warp a token
CHUNK, PART = 256, 64  # of pairs, if they are many
AT_ONCE = 512  # chunks


@triton.jit
def _ordered(x):
    """float32 as int32 in the same order; a NaN lies beyond infinity. No number and no NaN of a computation is LOWEST."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best_groups(
    choice,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):
    """[ROWS, GROUP_PAD, SIZE_PAD] bool: the experts of the best groups."""
    grouped = tl.reshape(choice, (ROWS, GROUP_PAD, SIZE_PAD))
    score, first = tl.max(grouped, 2, return_indices=True, return_indices_tie_break_left=True)
    if TOP2:
        others = tl.arange(0, SIZE_PAD)[None, None, :] != first[:, :, None]
        score += tl.max(tl.where(others, grouped, float("-inf")), 2)
    group = tl.arange(0, GROUP_PAD)[None, :]
    key = tl.where(group < GROUPS, _ordered(score), LOWEST)
    kept = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        _, best = tl.max(key, 1, return_indices=True, return_indices_tie_break_left=True)
        found = group == best[:, None]
        kept |= found
        key = tl.where(found, LOWEST, key)
    return tl.broadcast_to(kept[:, :, None], (ROWS, GROUP_PAD, SIZE_PAD))


@triton.jit
def choose_from(
    logits_ptr, correction_ptr, live_ptr, ids_ptr, weights_ptr, rows, tokens, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, CORRECTED: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, GROUP_PAD: tl.constexpr, SIZE_PAD: tl.constexpr, CHOSEN_PAD: tl.constexpr,
):  # fmt: skip
    """Writes the choice of the tokens `rows` [ROWS] from their logits, which another program may just have written.

    Each group of experts has SIZE_PAD places, of which the last ones may be empty, and so may the last groups.
    """
    in_batch = rows < tokens
    place = tl.arange(0, GROUP_PAD * SIZE_PAD)
    expert = _expert_at(place, EXPERTS // GROUPS, SIZE_PAD)
    there = (place // SIZE_PAD < GROUPS) & (place % SIZE_PAD < EXPERTS // GROUPS)
    at = logits_ptr + rows[:, None] * EXPERTS + expert[None, :]
    present = in_batch[:, None] & there[None, :]
    logits = tl.load(at, mask=present, other=float("-inf"), cache_modifier=".cg")
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores /= tl.sum(scores, 1)[:, None]
    choice = scores
    if CORRECTED:
        choice += tl.load(correction_ptr + expert, mask=there, other=0.0)[None, :]
    choice = tl.where(there[None, :], choice, float("-inf"))
    order = tl.where(there[None, :], _ordered(choice), LOWEST)
    if GROUPS > 1:
        kept = _best_groups(choice, ROWS, GROUPS, TOP_GROUPS, TOP2, GROUP_PAD, SIZE_PAD)
        order = tl.where(tl.reshape(kept, (ROWS, GROUP_PAD * SIZE_PAD)), order, LOWEST)
    # One maximum of 64 bits finds the best expert and, of equals, the first: a third quicker than a maximum with its index.
    last: tl.constexpr = GROUP_PAD * SIZE_PAD - 1
    key = (order.to(tl.int64) << 32) | (last - place)[None, :]
    column = tl.arange(0, CHOSEN_PAD)[None, :]
    ids = tl.where(column < TOP_K + SHARED, EXPERTS + column - TOP_K, 0) + tl.zeros((ROWS, 1), tl.int32)
    weights = tl.where(column < TOP_K + SHARED, 1.0, 0.0) + tl.zeros((ROWS, 1), tl.float32)
    for j in tl.static_range(TOP_K):
        best_key = tl.max(key, 1)
        best = last - best_key.to(tl.int32)
        found = place[None, :] == best[:, None]
        key = tl.where(found, LOWEST_KEY, key)
        weight = tl.sum(tl.where(found, scores, 0.0), 1)
        ids = tl.where(column == j, _expert_at(best, EXPERTS // GROUPS, SIZE_PAD)[:, None], ids)
        weights = tl.where(column == j, weight[:, None], weights)
    routed = column < TOP_K
    if RENORMALISE:
        total = tl.sum(tl.where(routed, weights, 0.0), 1) + 1e-20
        weights = tl.where(routed, weights / total[:, None], weights)
    weights = tl.where(routed, weights * scale, weights)
    if MASKED:
        ids = tl.where(tl.load(live_ptr + rows, mask=in_batch, other=0)[:, None] != 0, ids, -1)
    at = rows[:, None] * (TOP_K + SHARED) + column
    stored = in_batch[:, None] & (column < TOP_K + SHARED)
    tl.store(ids_ptr + at, ids, mask=stored)
    tl.store(weights_ptr + at, weights, mask=stored)


@triton.jit
def _expert_at(place, GROUP_SIZE: tl.constexpr, SIZE_PAD: tl.constexpr):
    return place // SIZE_PAD * GROUP_SIZE + place % SIZE_PAD


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits_ptr, correction_ptr, live_ptr, ids_ptr, weights_ptr, tokens, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, CORRECTED: tl.constexpr, MASKED: tl.constexpr,
    GROUP_PAD: tl.constexpr, SIZE_PAD: tl.constexpr, CHOSEN_PAD: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wait(PDL)
    choose_from(
        logits_ptr, correction_ptr, live_ptr, ids_ptr, weights_ptr, rows, tokens, scale,
        EXPERTS, TOP_K, SHARED, SIGMOID, RENORMALISE, GROUPS, TOP_GROUPS, TOP2, CORRECTED, MASKED,
        ROWS, GROUP_PAD, SIZE_PAD, CHOSEN_PAD,
    )  # fmt: skip


@triton.jit
def _list_blocks(
    counts, expert, ends_ptr, blocks_ptr, blocks,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Writes an expert's end and its blocks, by the counts [EXPERTS_PAD] of all; returns where its pairs begin."""
    number = tl.arange(0, EXPERTS_PAD)
    block_counts = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(number < expert, counts, 0))
    first_block = tl.sum(tl.where(number < expert, block_counts, 0))
    end = first + tl.sum(tl.where(number == expert, counts, 0))
    tl.store(ends_ptr + expert, end)
    item = tl.arange(0, LIST)
    end_block = first_block + (end - first + BLOCK_M - 1) // BLOCK_M
    for start in range(first_block, end_block, LIST):
        block = start + item
        begin = first + (block - first_block) * BLOCK_M
        mine = block < end_block
        tl.store(blocks_ptr + block, tl.zeros_like(block) + expert, mask=mine)
        tl.store(blocks_ptr + blocks + block, begin, mask=mine)
        tl.store(blocks_ptr + 2 * blocks + block, tl.minimum(begin + BLOCK_M, end), mask=mine)
    if expert == EXPERTS - 1:
        for start in range(end_block, blocks, LIST):
            tl.store(blocks_ptr + start + item, tl.full((LIST,), -1, tl.int32), mask=start + item < blocks)
    return first


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _plan(
    ids_ptr, order_ptr, ends_ptr, blocks_ptr, pairs, blocks,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, LIST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program an expert: where its pairs and blocks begin follows from everyone's counts, which each program takes itself."""
    release(PDL)
    expert = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    wait(PDL)
    counts = tl.zeros((EXPERTS_PAD,), tl.int32)
    for start in range(0, pairs, CHUNK):
        ids = tl.load(ids_ptr + start + at, mask=start + at < pairs, other=-1)
        counts += tl.histogram(ids, EXPERTS_PAD, mask=ids >= 0)
    place = _list_blocks(counts, expert, ends_ptr, blocks_ptr, blocks, EXPERTS, EXPERTS_PAD, BLOCK_M, LIST)
    for start in range(0, pairs, CHUNK):
        mine = (tl.load(ids_ptr + start + at, mask=start + at < pairs, other=-1) == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0) - mine
        tl.store(order_ptr + place + rank, start + at, mask=mine != 0)
        place += tl.sum(mine)


@triton.jit(do_not_specialize=["pairs"])
def _count(
    ids_ptr, counts_ptr, totals_ptr, pairs, EXPERTS_PAD: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """counts [chunks, EXPERTS_PAD]: each expert's pairs among those of a chunk; totals: among all. A program: one chunk."""
    release(PDL)
    chunk, number = tl.program_id(0), tl.arange(0, EXPERTS_PAD)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1)
    counts = tl.histogram(ids, EXPERTS_PAD, mask=ids >= 0)
    tl.store(counts_ptr + chunk * EXPERTS_PAD + number, counts)
    tl.atomic_add(totals_ptr + number, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["chunks", "blocks"])
def _places(
    counts_ptr, totals_ptr, places_ptr, ends_ptr, blocks_ptr, chunks, blocks,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr, LIST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """places [chunks, EXPERTS_PAD]: where in the order each chunk's pairs of an expert begin. A program: one expert."""
    release(PDL)
    expert, item = tl.program_id(0), tl.arange(0, AT_ONCE)
    wait(PDL)
    totals = tl.load(totals_ptr + tl.arange(0, EXPERTS_PAD))
    place = _list_blocks(totals, expert, ends_ptr, blocks_ptr, blocks, EXPERTS, EXPERTS_PAD, BLOCK_M, LIST)
    for start in range(0, chunks, AT_ONCE):
        chunk = start + item
        own = tl.load(counts_ptr + chunk * EXPERTS_PAD + expert, mask=chunk < chunks, other=0)
        tl.store(places_ptr + chunk * EXPERTS_PAD + expert, place + tl.cumsum(own, 0) - own, mask=chunk < chunks)
        place += tl.sum(own)


@triton.jit(do_not_specialize=["pairs"])
def _order(
    ids_ptr, places_ptr, order_ptr, pairs,
    EXPERTS_PAD: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The order, from where each chunk's pairs begin. A program: a part of a chunk."""
    release(PDL)
    pair = tl.program_id(0) * PART + tl.arange(0, PART)
    chunk = tl.program_id(0) * PART // CHUNK
    other = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1)
    others = tl.load(ids_ptr + other, mask=other < pairs, other=-1)
    earlier = (others[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])
    place = tl.load(places_ptr + chunk * EXPERTS_PAD + expert, mask=expert >= 0, other=0)
    tl.store(order_ptr + place + tl.sum(earlier.to(tl.int32), 1), pair, mask=expert >= 0)


@triton.jit
def _combine(
    pairs_ptr, ids_ptr, plus_ptr, out_ptr,
    HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = plus[t] + the results of the token's pairs, in their order; those without an expert were never written."""
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    wait(PDL)
    total = tl.load(plus_ptr + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(CHOSEN):
        pair = token * CHOSEN + j
        result = tl.load(pairs_ptr + pair * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(tl.load(ids_ptr + pair) >= 0, result, 0.0)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def routing_constants(
    routing: Routing, correction: torch.Tensor | None, live: torch.Tensor | None, shared: int
) -> dict[str, int | bool]:
    """The compile-time arguments of a choice."""
    return {
        "EXPERTS": routing.experts,
        "TOP_K": routing.top_k,
        "SHARED": shared,
        "SIGMOID": routing.scoring == "sigmoid",
        "RENORMALISE": routing.renormalise,
        "GROUPS": routing.groups,
        "TOP_GROUPS": routing.top_groups,
        "TOP2": routing.group_score == "top2",
        "CORRECTED": correction is not None,
        "MASKED": live is not None,
        "GROUP_PAD": triton.next_power_of_2(routing.groups),
        "SIZE_PAD": triton.next_power_of_2(routing.group_size),
        "CHOSEN_PAD": triton.next_power_of_2(routing.top_k + shared),
    }


def route(
    logits: torch.Tensor,
    routing: Routing,
    correction: torch.Tensor | None,
    live: torch.Tensor | None,
    shared: int,
    *,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the public function. A warp has a token, or four if there are many, so that no step of the choice waits for another
    warp."""
    tokens = logits.shape[0]
    shape = (tokens, routing.top_k + shared)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    pdl = dependent.supported(logits.device) if pdl is None else pdl
    rows = 1 if tokens <= FEW_TOKENS else 4
    if tokens:
        _route[(triton.cdiv(tokens, rows),)](
            logits, correction, live, ids, weights, tokens, routing.scale, ROWS=rows, PDL=pdl, num_warps=1, launch_pdl=pdl,
            **routing_constants(routing, correction, live, shared),
        )  # fmt: skip
    return ids, weights


def plan(ids: torch.Tensor, experts: int, block_m: int, *, pdl: bool | None = None) -> Plan:
    """The pairs of ids int32 [T, k] by expert, in blocks of at most block_m."""
    pairs = ids.numel()
    blocks = plan_blocks(pairs, experts, block_m)
    pdl = dependent.supported(ids.device) if pdl is None else pdl
    sizes = (
        -(-pairs // 4) * 4,
        -(-experts // 4) * 4,
        3 * blocks,
    )  # each part begins at 16 bytes, for any number of pairs
    order, ends, table = torch.empty(sum(sizes), dtype=torch.int32, device=ids.device).split(sizes)
    common = {"EXPERTS_PAD": max(32, triton.next_power_of_2(experts)), "PDL": pdl, "launch_pdl": pdl}
    if pairs <= MANY_PAIRS:
        few = pairs <= FEW_PAIRS
        _plan[(experts,)](
            ids, order, ends, table, pairs, blocks, EXPERTS=experts, BLOCK_M=block_m,
            CHUNK=FEW_PAIRS if few else 2 * FEW_PAIRS, LIST=128, num_warps=4 if few else 8, **common,
        )  # fmt: skip
    else:
        _plan_many(ids, order, ends, table, pairs, experts, blocks, block_m, common)
    return Plan(order[:pairs], ends[:experts], table.view(3, blocks), block_m)


def _plan_many(
    ids: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
    table: torch.Tensor,
    pairs: int,
    experts: int,
    blocks: int,
    block_m: int,
    common: dict[str, int | bool],
) -> None:
    """`plan` for many pairs: count by chunks, see where each expert's pairs of each chunk begin, put them there."""
    chunks, width = triton.cdiv(pairs, CHUNK), int(common["EXPERTS_PAD"])
    counts, places = torch.empty(2, chunks, width, dtype=torch.int32, device=ids.device)
    totals = torch.zeros(width, dtype=torch.int32, device=ids.device)
    _count[(chunks,)](ids, counts, totals, pairs, CHUNK=CHUNK, num_warps=4, **common)
    _places[(experts,)](
        counts, totals, places, ends, table, chunks, blocks, EXPERTS=experts, BLOCK_M=block_m, AT_ONCE=AT_ONCE, LIST=128,
        num_warps=4, **common,
    )  # fmt: skip
    _order[(triton.cdiv(pairs, PART),)](ids, places, order, pairs, CHUNK=CHUNK, PART=PART, num_warps=4, **common)


def combine(pairs: torch.Tensor, ids: torch.Tensor, plus: torch.Tensor, *, pdl: bool | None = None) -> torch.Tensor:
    """See the public function."""
    tokens, chosen, hidden = pairs.shape
    pdl = dependent.supported(plus.device) if pdl is None else pdl
    out = torch.empty_like(plus)
    if tokens:
        block = min(triton.next_power_of_2(hidden), 1024)
        _combine[(tokens, triton.cdiv(hidden, block))](
            pairs, ids, plus, out, HIDDEN=hidden, CHOSEN=chosen, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out
