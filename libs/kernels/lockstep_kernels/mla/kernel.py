"""Latent attention in Triton. Softmax is in base 2: `scale` comes multiplied by log2(e).

Prompts are expanded: every head has keys and values of its own, and a program attends to tiles of them for some queries.

A decode step is absorbed: the weights that would expand a latent into keys meet the queries instead, those that would expand it
into values meet the result. So all heads share one key of rank + rope values, of which the first `rank` are the value too, and
a step reads each cached latent once.

Plan and block tables are read before `wait`: nothing runs beside `plan_kernel`, which is launched as an ordinary kernel, so both
are complete when any kernel after it starts.
"""

# Triton's language has no types, and a kernel's parameters none that Python knows.
from __future__ import annotations

import triton
import triton.language as tl

from lockstep_kernels.dependent import release, wait

LN2 = tl.constexpr(0.6931471805599453)
SHORT = tl.constexpr(
    64
)  # tiles: sequences of so few are cut as finely as there are programs, as merging all parts costs little


@triton.jit(do_not_specialize=["sequences", "limit"])
def plan_kernel(lens_ptr, plan_ptr, sequences, limit, LEAST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """See `DecodePlan`. Lengths beyond `limit` are cut: a table has no more."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    lens = tl.minimum(tl.load(lens_ptr + i, mask=i < sequences, other=0), limit).to(tl.int32)
    tiles = tl.cdiv(lens, TILE)
    ends = tl.cumsum(tiles, 0)
    least = tl.maximum(tl.minimum(LEAST, tl.cdiv(tl.max(tiles, 0), SHORT)), 1)
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), programs), least)
    known = i < sequences
    first = tl.sum(((ends <= program * share) & known).to(tl.int32), 0)
    stop = tl.sum(tl.where(i == first, ends, 0), 0)
    tl.store(plan_ptr + 4 * program, first)
    tl.store(plan_ptr + 4 * program + 1, stop - tl.sum(tl.where(i == first, tiles, 0), 0))
    tl.store(plan_ptr + 4 * program + 2, stop)
    tl.store(plan_ptr + 4 * program + 3, tl.sum(tl.where(i == first, lens, 0), 0))
    if program == 0:
        tl.store(plan_ptr + 4 * programs, share)
        tl.store(plan_ptr + 4 * programs + 1, 0)
        tl.store(plan_ptr + 4 * programs + 2 + i, ends, mask=known)


@triton.jit
def _turn(at, cos, sin, mask, ROWS: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotates the neighbours at pointers [ROWS, ROPE] by angles [1, ROPE / 2], in place; returns them."""
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(x, (ROWS, ROPE // 2, 2)))
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, ROPE // 2)), (0, 2, 1)))
    turned = tl.join(a * cos - b * sin, b * cos + a * sin)
    if not INTERLEAVED:
        turned = tl.permute(turned, (0, 2, 1))
    turned = tl.reshape(turned, (ROWS, ROPE)).to(at.dtype.element_ty)
    tl.store(at, turned, mask=mask)
    return turned


@triton.jit
def _finish_token(
    q_ptr, latent, gain_ptr, cos_ptr, sin_ptr, cache_ptr, slot_ptr, eps, q_head,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of one token, in place, and its latent's copy in the cache; pointers are the token's. Without a cache
    nothing is copied; without q or latent the other one is finished."""
    i, r, head = tl.arange(0, RANK), tl.arange(0, ROPE)[None, :], tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, ROPE // 2)[None, :]
    if latent is not None:
        gain = tl.load(gain_ptr + i)
    wait(PDL)
    if cache_ptr is not None:
        cached = cache_ptr + tl.load(slot_ptr) * (RANK + ROPE)
    cos, sin = tl.load(cos_ptr + pair), tl.load(sin_ptr + pair)
    if latent is not None:
        x = tl.load(latent + i).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * gain
        normed = x.to(latent.dtype.element_ty)
        tl.store(latent + i, normed)
        if cache_ptr is not None:
            tl.store(cached + i, normed.to(cached.dtype.element_ty))
        rotated = _turn(latent + RANK + r, cos, sin, r < ROPE, 1, ROPE, INTERLEAVED)
        if cache_ptr is not None:
            tl.store(cached + RANK + r, rotated.to(cached.dtype.element_ty))
    if q_ptr is not None:
        _turn(q_ptr + NOPE + head * q_head + r, cos, sin, (head < HEADS) & (r < ROPE), BLOCK_H, ROPE, INTERLEAVED)


@triton.jit
def _absorb(
    q_ptr, weight_ptr, absorbed_ptr, tile, tokens, q_token, q_head, weight_head,
    HEADS: tl.constexpr, NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of the queries of one head, times the weights that would expand keys."""
    column = (tile % (RANK // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    head = (tile // (RANK // COLUMNS)) % HEADS
    row = tile // (RANK // COLUMNS) // HEADS * ROWS + tl.arange(0, ROWS)
    known = (row < tokens)[:, None]
    k = tl.arange(0, BLOCK_NOPE)
    w = tl.load(
        weight_ptr + head.to(tl.int64) * weight_head + k[:, None] * RANK + column[None, :],
        mask=(k < NOPE)[:, None], other=0.0,
    )  # fmt: skip
    wait(PDL)
    q = tl.load(
        q_ptr + row[:, None].to(tl.int64) * q_token + head * q_head + k[None, :],
        mask=known & (k < NOPE)[None, :], other=0.0,
    )  # fmt: skip
    y = tl.dot(q, w, input_precision=PRECISION)
    to = absorbed_ptr + (row[:, None].to(tl.int64) * HEADS + head) * RANK + column[None, :]
    tl.store(to, y.to(absorbed_ptr.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["tokens", "eps"])
def finish_kernel(
    q_ptr, latents_ptr, gain_ptr, cos_ptr, sin_ptr, cache_ptr, slots_ptr, weight_ptr, absorbed_ptr,
    tokens, q_token, q_head, latents_token, weight_head, eps,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, ROPE: tl.constexpr,
    RANK: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The first `tokens` programs each finish a token, the others each absorb a tile of queries. What `_finish_token` says may be
    None, and with it weight and absorbed: then there are no others."""
    release(PDL)
    program = tl.program_id(0)
    if program < tokens:
        token = program.to(tl.int64)
        angles = token * (ROPE // 2)
        _finish_token(
            None if q_ptr is None else q_ptr + token * q_token,
            None if latents_ptr is None else latents_ptr + token * latents_token, gain_ptr, cos_ptr + angles, sin_ptr + angles,
            cache_ptr, None if slots_ptr is None else slots_ptr + token, eps, q_head,
            HEADS, BLOCK_H, NOPE, ROPE, RANK, INTERLEAVED, PDL,
        )  # fmt: skip
    elif weight_ptr is not None:
        _absorb(
            q_ptr, weight_ptr, absorbed_ptr, program - tokens, tokens, q_token, q_head, weight_head,
            HEADS, NOPE, BLOCK_NOPE, RANK, ROWS, COLUMNS, PRECISION, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def absorb_kernel(
    q_ptr, weight_ptr, absorbed_ptr, tokens, q_token, q_head, weight_head,
    HEADS: tl.constexpr, NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """absorbed [tokens, HEADS, RANK] of queries that are finished. A program: a tile of one head's."""
    release(PDL)
    _absorb(
        q_ptr, weight_ptr, absorbed_ptr, tl.program_id(0), tokens, q_token, q_head, weight_head,
        HEADS, NOPE, BLOCK_NOPE, RANK, ROWS, COLUMNS, PRECISION, PDL,
    )  # fmt: skip


@triton.jit
def _prefetch(ptr, count: tl.constexpr):
    """Brings `count` neighbours into the L2 cache, which a kernel that waits has time for; what changes there is seen."""
    line: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = (count + line - 1) // line
    at = ptr + tl.minimum(tl.arange(0, triton.next_power_of_2(lines)), lines - 1) * line
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["sequences", "table_row"])
def decode_kernel(
    absorbed_ptr, q_ptr, cache_ptr, table_ptr, lens_ptr, plan_ptr, parts_ptr, lse_ptr,
    sequences, q_token, q_head, table_row, scale,
    NOPE: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Scores are [keys, heads] and results [rank, heads]: the keys and the rank fill the rows of matrix instructions, and the
    few heads are their columns, of which there may be as few as eight."""
    release(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    starts, own = plan_ptr + 4 * programs + 1, plan_ptr + 4 * program
    share = tl.load(plan_ptr + 4 * programs, cache_modifier=".cg")
    sequence, start = tl.load(own, cache_modifier=".cg"), tl.load(own + 1, cache_modifier=".cg")
    stop, length = tl.load(own + 2, cache_modifier=".cg"), tl.load(own + 3, cache_modifier=".cg")
    tile = program * share
    end = tl.minimum(tile + share, tl.load(starts + sequences, cache_modifier=".cg"))
    if PDL and BLOCK_SIZE >= TILE and tile < end:
        for n in tl.static_range(AHEAD):
            j = (tl.minimum(tile + n, tl.minimum(end, stop) - 1) - start) * TILE
            block = tl.load(table_ptr + sequence.to(tl.int64) * table_row + j // BLOCK_SIZE, cache_modifier=".cg")
            _prefetch(cache_ptr + (block * BLOCK_SIZE + j % BLOCK_SIZE) * (RANK + ROPE), TILE * (RANK + ROPE))
    wait(PDL)
    if tile >= end:
        return
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i, r, key = tl.arange(0, RANK), tl.arange(0, ROPE), tl.arange(0, TILE)
    there = (head < HEADS)[:, None]
    while tile < end:
        until = tl.minimum(end, stop)
        if until > tile:
            token = sequence.to(tl.int64)
            q = tl.load(absorbed_ptr + (token * HEADS + head[:, None]) * RANK + i[None, :], mask=there, other=0.0)
            q_rope = tl.load(
                q_ptr + token * q_token + head[:, None] * q_head + NOPE + r[None, :], mask=there, other=0.0
            )
            table = table_ptr + token * table_row
            best = tl.full((BLOCK_H,), -float("inf"), tl.float32)
            sum = tl.zeros((BLOCK_H,), tl.float32)
            mixed = tl.zeros((RANK, BLOCK_H), tl.float32)
            block = tl.load(table + (tile - start) * TILE // BLOCK_SIZE)
            for j in tl.range(tile - start, until - start, num_stages=STAGES):
                position = j * TILE + key
                valid = position < length
                if BLOCK_SIZE < TILE:
                    blocks = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0)
                    latent = cache_ptr + (blocks * BLOCK_SIZE + position % BLOCK_SIZE)[:, None] * (RANK + ROPE)
                else:  # a tile lies in one block, whose number was loaded a tile ahead
                    row = block * BLOCK_SIZE + (j * TILE) % BLOCK_SIZE
                    block = tl.load(table + tl.minimum(j + 1, until - start - 1) * TILE // BLOCK_SIZE)
                    latent = cache_ptr + row * (RANK + ROPE) + key[:, None] * (RANK + ROPE)
                compressed = tl.load(latent + i[None, :], mask=valid[:, None], other=0.0)
                rotated = tl.load(latent + RANK + r[None, :], mask=valid[:, None], other=0.0)
                scores = tl.dot(compressed, tl.trans(q), input_precision=PRECISION)
                scores = tl.dot(rotated, tl.trans(q_rope), scores, input_precision=PRECISION) * scale
                scores = tl.where(valid[:, None], scores, -float("inf"))
                higher = tl.maximum(best, tl.max(scores, 0))
                weights = tl.exp2(scores - higher[None, :])
                shrink = tl.exp2(best - higher)
                sum = sum * shrink + tl.sum(weights, 0)
                mixed *= shrink[None, :]
                mixed = tl.dot(tl.trans(compressed), weights.to(compressed.dtype), mixed, input_precision=PRECISION)
                best = higher
            part = (program + sequence).to(tl.int64) * HEADS + head
            tl.store(parts_ptr + part[:, None] * RANK + i[None, :], tl.trans(mixed / sum[None, :]), mask=there)
            tl.store(lse_ptr + part, best + tl.log2(sum), mask=head < HEADS)
        tile = tl.maximum(tile, until)
        sequence += 1
        start = stop
        if tile < end:
            stop = tl.load(starts + sequence + 1)
            length = tl.load(lens_ptr + sequence).to(tl.int32)


@triton.jit
def _parts_of(plan_ptr, programs, sequence):
    """The first program that has a part of a sequence, and how many have one."""
    starts = plan_ptr + 4 * programs + 1 + sequence
    share = tl.load(plan_ptr + 4 * programs, cache_modifier=".cg")
    start, end = tl.load(starts, cache_modifier=".cg"), tl.load(starts + 1, cache_modifier=".cg")
    first = start // share
    return first, tl.where(end > start, (end - 1) // share - first + 1, 0)


@triton.jit
def _merged(
    parts_ptr, lse_ptr, first, count, sequence, head,
    HEADS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """float32 [RANK] of one sequence and head, from PARTS parts at a time, and the log-sum-exp; zeros and -inf if the sequence
    has no positions."""
    i, p = tl.arange(0, RANK), tl.arange(0, PARTS)
    best, sum = -float("inf"), 0.0
    mixed = tl.zeros((RANK,), tl.float32)
    for j in tl.range(0, count, PARTS, num_stages=STAGES):
        part = (first + sequence + j + p).to(tl.int64) * HEADS + head
        there = j + p < count
        lse = tl.load(lse_ptr + part, mask=there, other=-float("inf"))
        x = tl.load(parts_ptr + part[:, None] * RANK + i[None, :], mask=there[:, None], other=0.0)
        higher = tl.maximum(best, tl.max(lse, 0))
        weights = tl.exp2(lse - higher)
        shrink = tl.exp2(best - higher)
        sum = sum * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(x * weights[:, None], 0)
        best = higher
    return mixed / tl.where(count > 0, sum, 1.0), (best + tl.log2(sum)) * LN2


@triton.jit(do_not_specialize=["programs"])
def merge_kernel(
    parts_ptr, lse_ptr, plan_ptr, merged_ptr, whole_lse_ptr, programs,
    HEADS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """merged [B, HEADS, RANK]: what the programs have of each sequence, together; its log-sum-exp (natural) to whole_lse
    [B, HEADS], or that is None. A program: one sequence and head."""
    release(PDL)
    head, sequence = tl.program_id(0), tl.program_id(1)
    first, count = _parts_of(plan_ptr, programs, sequence)
    wait(PDL)
    mixed, lse = _merged(parts_ptr, lse_ptr, first, count, sequence, head, HEADS, RANK, PARTS, 1)
    if whole_lse_ptr is not None:
        tl.store(whole_lse_ptr + sequence.to(tl.int64) * HEADS + head, lse)
    to = merged_ptr + (sequence.to(tl.int64) * HEADS + head) * RANK + tl.arange(0, RANK)
    tl.store(to, mixed.to(merged_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens"])
def values_kernel(
    merged_ptr, weight_ptr, out_ptr, tokens, out_token,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = merged [tokens, HEADS, RANK] times the weights that expand values. A program: a tile of one head's."""
    release(PDL)
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column, k = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    known = (row < tokens)[:, None]
    inside = column < VALUE
    weights = weight_ptr + (head * (NOPE + VALUE) + NOPE + column[:, None]) * RANK + k[None, :]
    w = tl.load(weights, mask=inside[:, None], other=0.0)
    wait(PDL)
    x = tl.load(merged_ptr + (row[:, None].to(tl.int64) * HEADS + head) * RANK + k[None, :], mask=known, other=0.0)
    y = tl.dot(x, tl.trans(w), input_precision=PRECISION)
    to = out_ptr + row[:, None].to(tl.int64) * out_token + head * VALUE + column[None, :]
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=known & inside[None, :])


@triton.jit(do_not_specialize=["programs"])
def merged_values_kernel(
    parts_ptr, lse_ptr, plan_ptr, weight_ptr, out_ptr, whole_lse_ptr, programs, out_token,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Both in one, for a few sequences. A program: one sequence, one head, some columns of its value."""
    release(PDL)
    head, sequence = tl.program_id(0), tl.program_id(1)
    column, i = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    inside = column < VALUE
    w = tl.load(
        weight_ptr + (head.to(tl.int64) * (NOPE + VALUE) + NOPE + column[:, None]) * RANK + i[None, :],
        mask=inside[:, None], other=0.0,
    )  # fmt: skip
    first, count = _parts_of(plan_ptr, programs, sequence)
    wait(PDL)
    mixed, lse = _merged(parts_ptr, lse_ptr, first, count, sequence, head, HEADS, RANK, PARTS, STAGES)
    if whole_lse_ptr is not None and tl.program_id(2) == 0:
        tl.store(whole_lse_ptr + sequence.to(tl.int64) * HEADS + head, lse)
    y = tl.sum(w.to(tl.float32) * mixed[None, :], 1)
    to = out_ptr + sequence.to(tl.int64) * out_token + head * VALUE + column
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def expand_kernel(
    cache_ptr, slots_ptr, count_ptr, weight_ptr, expanded_ptr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of expanded [n, HEADS * WIDTH + ROPE]: keys and values of the cached latents in `slots`, and their rotated keys.

    There are `count` of them. A program: some positions of one head, or none of them.
    """
    release(PDL)
    wait(PDL)
    head, first, count = tl.program_id(0), tl.program_id(1) * ROWS, tl.load(count_ptr)
    if first >= count:
        return
    row = first + tl.arange(0, ROWS)
    column, k, r = tl.arange(0, BLOCK_WIDTH), tl.arange(0, INNER), tl.arange(0, ROPE)
    known, inside = (row < count)[:, None], column < WIDTH
    latents = cache_ptr + tl.load(slots_ptr + row, mask=row < count, other=0)[:, None] * (RANK + ROPE)
    to = expanded_ptr + row[:, None].to(tl.int64) * (HEADS * WIDTH + ROPE)
    weights = weight_ptr + (head * WIDTH + column[:, None]).to(tl.int64) * RANK + k[None, :]
    y = tl.zeros((ROWS, BLOCK_WIDTH), tl.float32)
    for j in tl.range(0, RANK, INNER, num_stages=3):
        x = tl.load(latents + j + k[None, :], mask=known, other=0.0)
        w = tl.load(weights + j, mask=inside[:, None], other=0.0)
        y = tl.dot(x, tl.trans(w), y, input_precision=PRECISION)
    tl.store(to + head * WIDTH + column[None, :], y.to(expanded_ptr.dtype.element_ty), mask=known & inside[None, :])
    if head == 0:
        rotated = tl.load(latents + RANK + r[None, :], mask=known, other=0.0)
        tl.store(to + HEADS * WIDTH + r[None, :], rotated, mask=known)


@triton.jit
def _tile(
    q, q_rope, best, sum, mixed, keys_ptr, key_token, rotated_ptr, rotated_token, first, visible, keys, scale,
    NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys for the queries of a program; `visible` [ROWS]: how many keys each query sees."""
    key, n, r, v = tl.arange(0, TILE), tl.arange(0, BLOCK_NOPE), tl.arange(0, ROPE), tl.arange(0, BLOCK_VALUE)
    row = first + key
    there = (row < keys)[:, None] if MASKED else (key >= 0)[:, None]
    source = keys_ptr + row[:, None].to(tl.int64) * key_token
    k = tl.load(source + n[None, :], mask=there & (n < NOPE)[None, :], other=0.0)
    k_rope = tl.load(rotated_ptr + row[:, None].to(tl.int64) * rotated_token + r[None, :], mask=there, other=0.0)
    value = tl.load(source + NOPE + v[None, :], mask=there & (v < VALUE)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where(row[None, :] < visible[:, None], scores, -float("inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(best - higher)
    sum = sum * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision=PRECISION)
    return higher, sum, mixed


@triton.jit
def _attend(
    q, q_rope, best, sum, mixed, keys_ptr, key_token, rotated_ptr, rotated_token, whole, keys, visible, scale,
    NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All keys, of which every query sees the first `whole`, a multiple of TILE."""
    for j in tl.range(0, whole, TILE, num_stages=STAGES):
        best, sum, mixed = _tile(
            q, q_rope, best, sum, mixed, keys_ptr, key_token, rotated_ptr, rotated_token, j, visible, keys, scale,
            NOPE, BLOCK_NOPE, ROPE, VALUE, BLOCK_VALUE, TILE, False, PRECISION,
        )  # fmt: skip
    for j in tl.range(whole, keys, TILE, num_stages=STAGES):
        best, sum, mixed = _tile(
            q, q_rope, best, sum, mixed, keys_ptr, key_token, rotated_ptr, rotated_token, j, visible, keys, scale,
            NOPE, BLOCK_NOPE, ROPE, VALUE, BLOCK_VALUE, TILE, True, PRECISION,
        )  # fmt: skip
    return best, sum, mixed


@triton.jit
def attend_kernel(
    q_ptr, expanded_ptr, latents_ptr, cached_ptr, spans_ptr, state_ptr, lse_ptr, out_ptr,
    q_token, q_head, expanded_token, latents_token, cached_token, out_token, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, MERGE: tl.constexpr, CAPTURED: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Queries of one head against keys, as a span says; with MERGE on top of what state and lse have.

    CAPTURED: a span has seven numbers, the last two its first key among the cached ones and how many of those all its queries
    see; it may have no queries. Queries without any key get zeros.
    """
    release(PDL)
    wait(PDL)
    head, span = tl.program_id(0).to(tl.int64), spans_ptr + tl.program_id(1) * (7 if CAPTURED else 5)
    token, rows = tl.load(span), tl.load(span + 1)
    if rows == 0:
        return
    first_key, keys, visible = tl.load(span + 2), tl.load(span + 3), tl.load(span + 4)
    i, n, r, v = tl.arange(0, ROWS), tl.arange(0, BLOCK_NOPE), tl.arange(0, ROPE), tl.arange(0, BLOCK_VALUE)
    known = (i < rows)[:, None]
    source = q_ptr + (token + i)[:, None].to(tl.int64) * q_token + head * q_head
    q = tl.load(source + n[None, :], mask=known & (n < NOPE)[None, :], other=0.0)
    q_rope = tl.load(source + NOPE + r[None, :], mask=known, other=0.0)
    keys_ptr = expanded_ptr + first_key.to(tl.int64) * expanded_token + head * (NOPE + VALUE)
    rotated_ptr = latents_ptr + first_key.to(tl.int64) * latents_token + RANK
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    sum = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, BLOCK_VALUE), tl.float32)
    if CAPTURED:
        first_cached, cached = tl.load(span + 5), tl.load(span + 6)
        before = cached_ptr + first_cached.to(tl.int64) * cached_token
        best, sum, mixed = _attend(
            q, q_rope, best, sum, mixed, before + head * (NOPE + VALUE), cached_token, before + HEADS * (NOPE + VALUE),
            cached_token, cached // TILE * TILE, cached, i * 0 + cached, scale,
            NOPE, BLOCK_NOPE, ROPE, VALUE, BLOCK_VALUE, TILE, STAGES, PRECISION,
        )  # fmt: skip
    whole = visible // TILE * TILE  # keys that all queries see
    best, sum, mixed = _attend(
        q, q_rope, best, sum, mixed, keys_ptr, expanded_token, rotated_ptr, latents_token, whole, keys,
        tl.minimum(visible + i, keys), scale,
        NOPE, BLOCK_NOPE, ROPE, VALUE, BLOCK_VALUE, TILE, STAGES, PRECISION,
    )  # fmt: skip
    mixed = mixed / (tl.where(sum == 0.0, 1.0, sum) if CAPTURED else sum)[:, None]
    at = (token + i).to(tl.int64)
    column = head * VALUE + v[None, :]
    store = known & (v < VALUE)[None, :]
    if MERGE:
        lse = best + tl.log2(sum)
        before = tl.load(lse_ptr + at * HEADS + head, mask=i < rows, other=-float("inf"))
        higher = tl.maximum(lse, before)
        share, kept = tl.exp2(lse - higher), tl.exp2(before - higher)
        state = tl.load(
            state_ptr + at[:, None] * (HEADS * VALUE) + column,
            mask=store & (before > -float("inf"))[:, None],
            other=0.0,
        ).to(tl.float32)
        mixed = (mixed * share[:, None] + state * kept[:, None]) / (share + kept)[:, None]
        tl.store(lse_ptr + at * HEADS + head, higher + tl.log2(share + kept), mask=i < rows)
    tl.store(out_ptr + at[:, None] * out_token + column, mixed.to(out_ptr.dtype.element_ty), mask=store)
