"""Attention over the paged KV cache in Triton: one new token a sequence (decode), or many (prefill).

Both work on all query heads of a key/value head at once, so a key or value is read once for all of them. Softmax is kept
online in base 2: `scale` comes multiplied by log2(e). Keys that must not be seen are not loaded, and weigh exactly 0.

Decode, after the idea of stream-K: the tiles of keys of all (sequence, key/value head) pairs in a row are dealt out evenly to
a fixed number of programs by the lengths on the device, whatever the host's bound on them is; where pairs and programs are
about as many, each program gets one pair or an equal part of one. A pair that more than one program works on is merged by
the last of them to arrive.
"""

# Triton's language has no types, and a kernel's parameters none that Python knows.
from __future__ import annotations

import triton
import triton.language as tl

from lockstep_kernels.dependent import release, wait

MANY = tl.constexpr(64)  # parts of a pair whose weights are compared at a time
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)  # below every score, and finite: the difference of two is not NaN


@triton.jit
def _units(length, size, TILE: tl.constexpr, FIXED: tl.constexpr, UNIT: tl.constexpr, MOST: tl.constexpr):
    """Tiles of keys of a sequence, tiles a unit of work, and units. FIXED: by the sequence's own length alone, else of `size`."""
    tiles = tl.cdiv(tl.maximum(length, 1), TILE)
    own_size = tl.maximum(UNIT, tl.cdiv(tiles, MOST)) if FIXED else size
    return tiles, own_size, tl.cdiv(tiles, own_size)


@triton.jit(do_not_specialize=["count", "limit", "processors", "cut"])
def schedule_kernel(
    lens,  # [count] int64
    starts,  # out [programs, 8] int32: sequence, head and unit that a program starts at, units it takes; as `sequences`; size
    sequences,  # out [count, 2] int32: length; units of all heads of all earlier sequences
    count,
    limit,  # lengths beyond it are cut
    processors,
    cut,  # what it costs to merge a pair, in tiles
    RESIDENT: tl.constexpr,  # programs a processor
    WHOLE: tl.constexpr,  # whether a program may have one pair only
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    FIXED: tl.constexpr,
    UNIT: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,  # of the vectors over all sequences
):
    """Deals the work out to the decode kernel's programs. A program finds where one of them starts.

    Usually each has the same number of tiles, and nearly every pair is cut. Where that takes less time, pairs are cut into so
    few parts of one size that there is a program for each, so that none has two pairs to begin and to merge. Times are in
    eighths of what a processor takes to read a tile; a single program on it is a little slower than more.
    """
    index = tl.arange(0, WIDTH)
    present = index < count
    length = tl.load(lens + index, mask=present, other=0)
    length = tl.minimum(tl.maximum(length, 0), limit).to(tl.int32)
    tiles = tl.where(present, tl.cdiv(tl.maximum(length, 1), TILE), 0)
    longest = tl.max(tiles, 0)
    size = longest * 0 + 1
    share = tl.cdiv(tl.sum(tiles, 0) * KV_HEADS, RESIDENT * processors)
    if WHOLE:
        pairs = tl.sum((length > 0).to(tl.int32), 0) * KV_HEADS
        empty = count * KV_HEADS - pairs
        pairs = tl.maximum(pairs, 1)
        least = 8 * RESIDENT * share + 16 * cut  # a program begins and ends in the middle of a pair
        for resident in tl.static_range(1, RESIDENT + 1):
            most = tl.maximum((resident * processors - empty) // pairs, 0)
            part = tl.cdiv(longest, tl.maximum(most, 1))
            parts = tl.cdiv(longest, part)
            time = part * (9 if resident == 1 else 8 * resident) + tl.where(parts > 1, 8 * cut + parts // 2, 0)
            uncut = longest * (9 if resident == 1 else 8 * resident)
            part, time = tl.where(uncut <= time, longest, part), tl.minimum(uncut, time)
            better = (most > 0) & (time < least)
            least = tl.where(better, time, least)
            size = tl.where(better, part, size)
            share = tl.where(better, 1, share)
    _, _, units = _units(length, size, TILE, FIXED, UNIT, MOST)
    units = tl.where(present, units, 0)
    ends = tl.cumsum(units, 0) * KV_HEADS
    if FIXED:
        share = tl.cdiv(tl.max(ends, 0), RESIDENT * processors)
    program = tl.program_id(0)
    start = program * share
    sequence = tl.sum((ends <= start).to(tl.int32), 0)
    here = index == sequence
    own = tl.maximum(tl.sum(tl.where(here, units, 0), 0), 1)
    before = tl.sum(tl.where(here, ends - units * KV_HEADS, 0), 0)
    tl.store(starts + 8 * program, sequence)
    tl.store(starts + 8 * program + 1, (start - before) // own)
    tl.store(starts + 8 * program + 2, (start - before) % own)
    tl.store(starts + 8 * program + 3, share)
    tl.store(starts + 8 * program + 4, tl.sum(tl.where(here, length, 0), 0))
    tl.store(starts + 8 * program + 5, before)
    tl.store(starts + 8 * program + 6, size)
    if program == 0:
        tl.store(sequences + 2 * index, length, mask=present)
        tl.store(sequences + 2 * index + 1, ends - units * KV_HEADS, mask=present)


@triton.jit(do_not_specialize=["count", "tokens"])
def tasks_kernel(
    query_starts,  # [count + 1] int64
    lens,  # [count] int64
    tasks,  # out [n, 4] int32, as `prefill_kernel` names them, the longest first; those left over have no tokens
    count,
    tokens,
    EACH: tl.constexpr,  # tokens of a task
    WIDTH: tl.constexpr,  # of the vectors over all sequences and one more
):
    """Cuts the new tokens of all sequences into tasks. A program finds one of them, and its rank by position among all.

    Rows that belong to no sequence are cut as those of one more, which comes last and has no keys: they end at position 0.
    """
    index = tl.arange(0, WIDTH)
    first = tl.load(query_starts + index, mask=index <= count, other=tokens).to(tl.int32)
    after = tl.load(query_starts + index + 1, mask=index < count, other=tokens).to(tl.int32)
    length = tl.load(lens + index, mask=index < count, other=0).to(tl.int32)
    new = after - first
    before = tl.where(index < count, length - new, -(2**30))  # the position of its first new token
    cuts = tl.cdiv(new, EACH)
    ends = tl.cumsum(cuts, 0)
    task = tl.program_id(0)
    if task < tl.max(ends, 0):
        sequence = tl.sum((ends <= task).to(tl.int32), 0)
        here = index == sequence
        ahead = (task - tl.sum(tl.where(here, ends - cuts, 0), 0)) * EACH
        position = tl.sum(tl.where(here, before, 0), 0) + ahead
        own = tl.minimum(tl.sum(tl.where(here, new, 0), 0) - ahead, EACH)
        beyond = position + (index >= sequence).to(tl.int32)  # tasks from this position on come before this one
        rank = tl.sum(cuts - tl.minimum(tl.cdiv(tl.maximum(beyond - before, 0), EACH), cuts), 0)
        none = sequence == count
        tl.store(tasks + 4 * rank, tl.sum(tl.where(here, first, 0), 0) + ahead)
        tl.store(tasks + 4 * rank + 1, tl.where(none, -own, position))
        tl.store(tasks + 4 * rank + 2, own)
        tl.store(tasks + 4 * rank + 3, tl.where(none, 0, sequence))
    else:
        tl.store(tasks + 4 * task + 2, 0)


@triton.jit
def _block_rows(table, tile, last, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Blocks of a tile's keys: one, or one a key. Beyond position `last` it is the block of that."""
    if BLOCK_SIZE >= TILE:
        position = tl.minimum(tile * TILE, last)
    else:
        position = tl.minimum(tile * TILE + tl.arange(0, TILE), last)
    return tl.load(table + position // BLOCK_SIZE)


@triton.jit
def _first_blocks(
    table,
    table_stride,
    sequence,
    count,
    length,
    unit,
    size,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FIXED: tl.constexpr,
    UNIT: tl.constexpr,
    MOST: tl.constexpr,
):
    """Blocks of the first tile of a unit of a sequence; of any tile if there is no such sequence."""
    _, own_size, _ = _units(length, size, TILE, FIXED, UNIT, MOST)
    own_table = table + tl.minimum(sequence, count - 1).to(tl.int64) * table_stride
    return _block_rows(own_table, unit * own_size, tl.maximum(length - 1, 0), BLOCK_SIZE, TILE)


@triton.jit
def _key_offsets(blocks, tile, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Where a tile's keys lie in the cache of head 0, in elements (int64): [TILE, 1]."""
    starts = blocks.to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE * D)
    if BLOCK_SIZE >= TILE:
        offsets = starts + tile * TILE % BLOCK_SIZE * D + tl.arange(0, TILE) * D
    else:
        offsets = starts + (tile * TILE + tl.arange(0, TILE)) % BLOCK_SIZE * D
    return offsets[:, None]


@triton.jit
def _fetch_ahead(
    cache,
    head,
    blocks,
    tile,
    any_work,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Asks for a tile's keys and values to be brought to the L2 cache, where whatever is written to them still arrives."""
    if any_work:
        each: tl.constexpr = 256 // cache.dtype.element_ty.primitive_bitwidth  # elements of a sector
        columns = tl.minimum(tl.arange(0, max(1, COLUMNS // each)) * each, D - 1)
        at = (
            cache
            + head * (BLOCK_SIZE * D)
            + _key_offsets(blocks, tile, KV_HEADS, D, BLOCK_SIZE, TILE)
            + columns[None, :]
        )
        for _ in tl.static_range(2):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
                "=r,l",
                [at.to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
            at += KV_HEADS * BLOCK_SIZE * D


@triton.jit
def _stats(stats, part, first, parts, step, later, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Highest scores and sums of weights [n, ROWS] of parts [n] of a pair, and their slots [n]. Beyond `parts` they are none."""
    rows = tl.arange(0, ROWS)
    slot = tl.where(part == 0, first, later + (part - 1) * step)
    there = (part < parts)[:, None] & (rows < GROUP)[None, :]
    at = stats + slot[:, None] * (2 * GROUP) + rows[None, :]
    maxima = tl.load(at, mask=there, other=LOWEST, cache_modifier=".cg")
    return maxima, tl.load(at + GROUP, mask=there, other=0.0, cache_modifier=".cg"), slot


@triton.jit
def _merge(
    sums,
    stats,
    first,
    parts,
    step,
    later,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The result [ROWS, COLUMNS] of `parts` partial ones, in slots first, then later, later + step, .. : CHUNK at a time; and
    the log-sum-exp [ROWS]."""
    rows, columns, chunk = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    wanted = (rows < GROUP)[:, None] & (columns < D)[None, :]
    many = tl.arange(0, MANY)
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    for start in range(0, parts, MANY):
        maxima, weights, _ = _stats(stats, start + many, first, parts, step, later, GROUP, ROWS)
        before = highest
        highest = tl.maximum(before, tl.max(maxima, 0))
        weight = weight * tl.exp2(before - highest) + tl.sum(weights * tl.exp2(maxima - highest[None, :]), 0)
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, parts, CHUNK):  # nothing but the sum waits for the turn before
        part = start + chunk
        maxima, _, slot = _stats(stats, part, first, parts, step, later, GROUP, ROWS)
        at = sums + slot.to(tl.int64)[:, None, None] * (GROUP * D) + (rows[:, None] * D + columns[None, :])[None, :, :]
        there = (part < parts)[:, None, None] & wanted[None, :, :]
        values = tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
        result += tl.sum(values * tl.exp2(maxima - highest[None, :])[:, :, None], 0)
    return result / tl.where(weight == 0.0, 1.0, weight)[:, None], (highest + tl.log2(weight)) * LN2


@triton.jit(do_not_specialize=["count", "table_stride"])
def decode_kernel(
    q,  # [count, KV_HEADS * GROUP, D], tokens q_stride apart
    cache,  # [blocks, 2, KV_HEADS, BLOCK_SIZE, D]
    out,  # [count, KV_HEADS * GROUP * D], rows out_stride apart
    table,  # [count, W]
    starts,
    sequences,  # both as `schedule_kernel` writes them
    arrived,  # [count * KV_HEADS] int32 zeros, and zeros again afterwards
    sums,  # workspace [slots, GROUP, D] float32: sums of weighted values
    stats,  # workspace [slots, 2, GROUP] float32: highest score, sum of weights
    k_scale,
    v_scale,  # [KV_HEADS] float32 that a cache of 8 bits is multiplied by, or None
    lse,  # out [count, KV_HEADS * GROUP] float32 (natural), or None
    count,
    scale,
    q_stride,
    out_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP padded to what the tensor cores take
    FEW_ROWS: tl.constexpr,  # GROUP padded to a power of two
    COLUMNS: tl.constexpr,  # D padded to a power of two
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,  # partial results merged at a time
    FIXED: tl.constexpr,
    UNIT: tl.constexpr,
    MOST: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # whether the first keys and values are asked for while the kernel before this one runs
    PDL: tl.constexpr,
):
    """One new token of each sequence against all its keys."""
    release(PDL)
    program = tl.program_id(0)
    sequence = tl.load(starts + 8 * program)
    head = tl.load(starts + 8 * program + 1)
    unit = tl.load(starts + 8 * program + 2)
    share = tl.load(starts + 8 * program + 3)
    length = tl.load(starts + 8 * program + 4)
    earlier = tl.load(starts + 8 * program + 5)
    size = tl.load(starts + 8 * program + 6)
    # Of the tile that comes next. Schedule and tables may be read before the wait: they are older than the zeros of `arrived`,
    # which no kernel overtakes, as they are written by one that is launched the ordinary way.
    blocks = _first_blocks(
        table, table_stride, sequence, count, length, unit, size, BLOCK_SIZE, TILE, FIXED, UNIT, MOST
    )
    if AHEAD:
        _, first_size, _ = _units(length, size, TILE, FIXED, UNIT, MOST)
        any_work = (share > 0) & (sequence < count)
        _fetch_ahead(cache, head, blocks, unit * first_size, any_work, KV_HEADS, D, BLOCK_SIZE, COLUMNS, TILE)
    wait(PDL)
    rows, columns, keys = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, TILE)
    inside = (rows < GROUP)[:, None] & (columns < D)[None, :]
    here = rows[:, None] * D + columns[None, :]
    left = share
    while (left > 0) & (sequence < count):
        tiles, own_size, units = _units(length, size, TILE, FIXED, UNIT, MOST)
        taken = left * 0 + 1 if FIXED else tl.minimum(left, units - unit)
        begin, end = unit * own_size, tl.minimum(tiles, (unit + taken) * own_size)
        queries = tl.load(q + sequence.to(tl.int64) * q_stride + head * (GROUP * D) + here, mask=inside, other=0.0)
        own_table = table + sequence.to(tl.int64) * table_stride
        head_cache = cache + head * (BLOCK_SIZE * D) + columns[None, :]
        last = tl.maximum(length - 1, 0)
        key_scale = scale if k_scale is None else scale * tl.load(k_scale + head)
        highest = tl.full((ROWS,), LOWEST, tl.float32)
        weight = tl.zeros((ROWS, TILE), tl.float32)  # summed over the keys at the end
        result = tl.zeros((ROWS, COLUMNS), tl.float32)
        for tile in tl.range(begin, end, num_stages=STAGES):
            seen = tile * TILE + keys < length
            at = head_cache + _key_offsets(blocks, tile, KV_HEADS, D, BLOCK_SIZE, TILE)
            wanted = seen[:, None] & (columns < D)[None, :]
            key = tl.load(at, mask=wanted, other=0.0)
            value = tl.load(at + KV_HEADS * BLOCK_SIZE * D, mask=wanted, other=0.0)
            blocks = _block_rows(own_table, tile + 1, last, BLOCK_SIZE, TILE)  # early: the next loads wait for it
            scores = tl.dot(queries, tl.trans(key.to(queries.dtype)), input_precision="ieee") * key_scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            before = highest
            highest = tl.maximum(before, tl.max(scores, 1))
            kept = tl.exp2(before - highest)
            weights = tl.exp2(scores - highest[:, None])
            weight = weight * kept[:, None] + weights
            value = value.to(queries.dtype)
            result = tl.dot(weights.to(queries.dtype), value, result * kept[:, None], input_precision="ieee")
        if v_scale is not None:
            result *= tl.load(v_scale + head)
        total = tl.sum(weight, 1)
        out_row = out + sequence.to(tl.int64) * out_stride + head * (GROUP * D)
        if taken == units:
            mixed = result / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_row + here, mixed.to(out.dtype.element_ty), mask=inside)
            if lse is not None:
                lse_at = lse + (sequence.to(tl.int64) * KV_HEADS + head) * GROUP + rows
                tl.store(lse_at, (highest + tl.log2(total)) * LN2, mask=rows < GROUP)
        else:
            pair = earlier + head * units  # its first unit among all
            if FIXED:
                slot, first, later, parts = pair + unit, pair, pair + 1, units
            else:  # a program's first pair may have begun before it, its last one may go on after it: two slots each
                owner = pair // share
                slot = 2 * program + (unit == 0).to(tl.int32)
                first, later, parts = 2 * owner + 1, 2 * owner + 2, (pair + units - 1) // share - owner + 1
            tl.store(sums + slot.to(tl.int64) * (GROUP * D) + here, result, mask=inside)
            stats_at = stats + slot * (2 * GROUP) + rows
            tl.store(stats_at, highest, mask=rows < GROUP)
            tl.store(stats_at + GROUP, total, mask=rows < GROUP)
            tl.debug_barrier()  # the whole program's stores come before its arrival
            counter = arrived + sequence * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                step = 1 if FIXED else 2
                mixed, mixed_lse = _merge(sums, stats, first, parts, step, later, GROUP, D, FEW_ROWS, COLUMNS, CHUNK)
                few = tl.arange(0, FEW_ROWS)
                few_inside = (few < GROUP)[:, None] & (columns < D)[None, :]
                few_at = out_row + few[:, None] * D + columns[None, :]
                tl.store(few_at, mixed.to(out.dtype.element_ty), mask=few_inside)
                if lse is not None:
                    few_lse = lse + (sequence.to(tl.int64) * KV_HEADS + head) * GROUP + few
                    tl.store(few_lse, mixed_lse, mask=few < GROUP)
                tl.store(counter, 0)
        left -= taken
        unit += taken
        done = (unit >= units).to(tl.int32)
        unit = unit * (1 - done)
        head += done
        wrapped = (head == KV_HEADS).to(tl.int32)
        head = head * (1 - wrapped)
        sequence += wrapped
        if (wrapped > 0) & (sequence < count):
            length = tl.load(sequences + 2 * sequence)
            earlier = tl.load(sequences + 2 * sequence + 1)
        blocks = _first_blocks(
            table, table_stride, sequence, count, length, unit, size, BLOCK_SIZE, TILE, FIXED, UNIT, MOST
        )


@triton.jit
def _load(
    blocks,
    tile,
    last,
    cache,
    descriptor,
    head,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys and values of a tile, each [TILE, COLUMNS]. MASKED: nothing beyond position `last` is used."""
    columns, positions = tl.arange(0, COLUMNS), tile * TILE + tl.arange(0, TILE)
    if DESCRIBED:
        row = ((blocks * (2 * KV_HEADS) + head) * BLOCK_SIZE + tile * TILE % BLOCK_SIZE).to(tl.int32)
        key = descriptor.load([row, 0])
        value = descriptor.load([row + KV_HEADS * BLOCK_SIZE, 0])
        if MASKED:  # a weight of 0 does not hide a NaN in a slot that was never written
            value = tl.where((positions <= last)[:, None], value, tl.zeros_like(value))
    else:
        offsets = _key_offsets(blocks, tile, KV_HEADS, D, BLOCK_SIZE, TILE)
        at = cache + head * (BLOCK_SIZE * D) + offsets + columns[None, :]
        if MASKED or COLUMNS != D:
            wanted = (positions <= last)[:, None] & (columns < D)[None, :]
            key = tl.load(at, mask=wanted, other=0.0)
            value = tl.load(at + KV_HEADS * BLOCK_SIZE * D, mask=wanted, other=0.0)
        else:
            key = tl.load(at)
            value = tl.load(at + KV_HEADS * BLOCK_SIZE * D)
    return key, value


@triton.jit
def _scores(queries, key, tile, visible, TILE: tl.constexpr, MASKED: tl.constexpr):
    scores = tl.dot(queries, tl.trans(key.to(queries.dtype)), input_precision="ieee")
    if MASKED:
        positions = tile * TILE + tl.arange(0, TILE)
        scores = tl.where(positions[None, :] <= visible[:, None], scores, float("-inf"))
    return scores


@triton.jit
def _attend(
    queries,  # [ROWS, COLUMNS]
    highest,
    weight,
    result,  # the softmax so far: [ROWS], [ROWS], [ROWS, COLUMNS]
    begin,
    end,  # turns of PARTS tiles
    visible,  # [ROWS]: the last position that a row sees
    last,  # no row sees more than position `last`
    table,
    cache,
    descriptor,
    head,
    scale,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    MASKED: tl.constexpr,  # whether a row may see less than all keys of these tiles
    STAGES: tl.constexpr,
):
    blocks = _block_rows(table, begin * PARTS, last, BLOCK_SIZE, TILE)
    more_blocks = _block_rows(table, begin * PARTS + 1, last, BLOCK_SIZE, TILE) if PARTS == 2 else blocks
    for turn in tl.range(begin, end, num_stages=STAGES):
        tile = turn * PARTS
        key, value = _load(
            blocks, tile, last, cache, descriptor, head, KV_HEADS, D, BLOCK_SIZE, COLUMNS, TILE, DESCRIBED, MASKED
        )
        blocks = _block_rows(table, tile + PARTS, last, BLOCK_SIZE, TILE)
        scores = _scores(queries, key, tile, visible, TILE, MASKED)
        highest_here = tl.max(scores, 1)
        if PARTS == 2:
            tile += 1
            more_keys, more_values = _load(
                more_blocks, tile, last, cache, descriptor, head, KV_HEADS, D, BLOCK_SIZE, COLUMNS, TILE, DESCRIBED, MASKED
            )  # fmt: skip
            more_blocks = _block_rows(table, tile + PARTS, last, BLOCK_SIZE, TILE)
            more_scores = _scores(queries, more_keys, tile, visible, TILE, MASKED)
            highest_here = tl.maximum(highest_here, tl.max(more_scores, 1))
        before = highest
        highest = tl.maximum(before, highest_here * scale)
        kept = tl.exp2(before - highest)
        weights = tl.exp2(scores * scale - highest[:, None])
        weight = weight * kept + tl.sum(weights, 1)
        result = result * kept[:, None]
        result = tl.dot(weights.to(queries.dtype), value.to(queries.dtype), result, input_precision="ieee")
        if PARTS == 2:
            weights = tl.exp2(more_scores * scale - highest[:, None])
            weight += tl.sum(weights, 1)
            result = tl.dot(weights.to(queries.dtype), more_values.to(queries.dtype), result, input_precision="ieee")
    return highest, weight, result


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    q,  # [T, KV_HEADS * GROUP, D], tokens q_stride apart
    cache,  # [blocks, 2, KV_HEADS, BLOCK_SIZE, D]
    descriptor,  # of the cache as rows [blocks * 2 * KV_HEADS * BLOCK_SIZE, D], if DESCRIBED
    out,  # [T, KV_HEADS * GROUP * D], rows out_stride apart
    table,  # [B, W]
    tasks,  # [n, 4] int32: first token, its position in its sequence, tokens (or 0: nothing to do), sequence
    k_scale,
    v_scale,
    lse,  # as in `decode_kernel`
    scale,
    q_stride,
    out_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # the query heads of ROWS // GROUP tokens
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,  # tiles whose softmax is brought up to date at once
    DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Neighbouring tokens of a sequence, for one key/value head, against all keys up to each of them. Not CAUSAL: against all
    keys, of which a task has the number in place of its position."""
    release(PDL)
    wait(PDL)
    task, head = tasks + tl.program_id(0) // KV_HEADS * 4, tl.program_id(0) % KV_HEADS
    token, position, tokens, sequence = tl.load(task), tl.load(task + 1), tl.load(task + 2), tl.load(task + 3)
    if tokens == 0:
        return
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    ahead = rows // GROUP
    inside = (ahead < tokens)[:, None] & (columns < D)[None, :]
    within = (head * (GROUP * D) + rows % GROUP * D)[:, None] + columns[None, :]
    at = (token + ahead).to(tl.int64)[:, None]
    queries = tl.load(q + at * q_stride + within, mask=inside, other=0.0)
    own_table = table + sequence.to(tl.int64) * table_stride
    if CAUSAL:
        end = position + tokens  # 0 for rows that belong to no sequence
        last = tl.maximum(end - 1, 0)
        visible = tl.minimum(position + ahead, last)
        whole = tl.maximum(position + 1, 0) // (PARTS * TILE)  # every row sees all of these
    else:
        end = position
        last = tl.maximum(end - 1, 0)
        visible = tl.minimum(position + ahead, last)
        whole = position // (PARTS * TILE)
    key_scale = scale if k_scale is None else scale * tl.load(k_scale + head)
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    highest, weight, result = _attend(
        queries, highest, weight, result, 0, whole, visible, last, own_table, cache, descriptor, head, key_scale,
        KV_HEADS, D, BLOCK_SIZE, COLUMNS, TILE, PARTS, DESCRIBED, False, STAGES,
    )  # fmt: skip
    highest, weight, result = _attend(
        queries, highest, weight, result, whole, tl.cdiv(end, PARTS * TILE), visible, last, own_table, cache, descriptor, head, key_scale,
        KV_HEADS, D, BLOCK_SIZE, COLUMNS, TILE, PARTS, DESCRIBED, True, STAGES,
    )  # fmt: skip
    if v_scale is not None:
        result *= tl.load(v_scale + head)
    result /= tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(out + at * out_stride + within, result.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        lse_at = lse + ((token + ahead).to(tl.int64) * KV_HEADS + head) * GROUP + rows % GROUP
        tl.store(lse_at, (highest + tl.log2(weight)) * LN2, mask=ahead < tokens)
