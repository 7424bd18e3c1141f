"""`sample_rows` in Triton: all that rows may ask for, in seven launches without a sort.

1. `_shape`: bias, suppressed ids, grammar mask and penalties; the largest logits.
2. `_top_k`: the logit that k tokens reach. The k-th largest of the tiles' maxima bounds it from below, which leaves few tiles.
3. `_draw`: the likeliest token under its noise of those that min-p and top-k keep, and their total mass.
4. `_draw` again, three times: top-p keeps a token if the mass of all likelier tokens is below its share of the total. The token
   drawn from all of them is mostly one that it keeps, and then it is the one that would be drawn from those. If it is not, neither
   are all tokens that are not likelier; so the next candidate is drawn from the likelier ones, in the same pass that takes their mass.
5. `_settle`: the first candidate that top-p keeps; goes on alone with a row that has none yet.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait
from lockstep_kernels.sampling.kernel import (
    BLOCK,
    LOWEST_KEY,
    NO_TOKEN,
    WARPS,
    first_largest,
    is_finite,
    key_of,
    merged,
    value_of,
)
from lockstep_kernels.sampling.state import Feature, Float, Int, RowTables

TILE = 64
_REDRAWS = 3

_RANDOM = tl.constexpr(int(Feature.RANDOM))
_TOP_K = tl.constexpr(int(Feature.TOP_K))
_TOP_P = tl.constexpr(int(Feature.TOP_P))
_MIN_P = tl.constexpr(int(Feature.MIN_P))
_PENALTIES = tl.constexpr(int(Feature.PENALTIES))
_BIAS = tl.constexpr(int(Feature.BIAS))
_MIN_TOKENS = tl.constexpr(int(Feature.MIN_TOKENS))
_FLOATS = tl.constexpr(len(Float))
_INTS = tl.constexpr(len(Int))
_TEMPERATURE_COLUMN = tl.constexpr(int(Float.TEMPERATURE))
_TOP_P_COLUMN = tl.constexpr(int(Float.TOP_P))
_MIN_P_COLUMN = tl.constexpr(int(Float.MIN_P))
_PRESENCE_COLUMN = tl.constexpr(int(Float.PRESENCE))
_FREQUENCY_COLUMN = tl.constexpr(int(Float.FREQUENCY))
_REPETITION_COLUMN = tl.constexpr(int(Float.REPETITION))
_SEED_COLUMN = tl.constexpr(int(Int.SEED))
_CHOICE_COLUMN = tl.constexpr(int(Int.CHOICE))
_TOP_K_COLUMN = tl.constexpr(int(Int.TOP_K))
_MIN_LENGTH_COLUMN = tl.constexpr(int(Int.MIN_LENGTH))
_FEATURES_COLUMN = tl.constexpr(int(Int.FEATURES))


@triton.jit
def _wrapping_mul(x, y):
    return tl.mul(x, y, sanitize_overflow=False)


@triton.jit
def _wrapping_add(x, y):
    return tl.add(x, y, sanitize_overflow=False)


@triton.jit
def _mix64(x):
    x = _wrapping_mul(x ^ ((x >> 30) & 0x3FFFFFFFF), 0xBF58476D1CE4E5B9 - (1 << 64))
    x = _wrapping_mul(x ^ ((x >> 27) & 0x1FFFFFFFFF), 0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _noise_key(seed, choice, position):
    key = _mix64(_wrapping_add(seed, _wrapping_mul(choice + 1, 0x9E3779B97F4A7C15 - (1 << 64))))
    return _mix64(_wrapping_add(key, _wrapping_mul(position + 1, 0x9E3779B97F4A7C15 - (1 << 64))))


@triton.jit
def _exponential(key, token):
    """-log(uniform) of `reference.gumbel`: its noise is -log of this."""
    low, high = key.to(tl.int32), (key >> 32).to(tl.int32)
    x = _wrapping_add(_wrapping_mul(token, 0x9E3779B9 - (1 << 32)), low)
    x ^= (x >> 16) & 0xFFFF
    x = _wrapping_mul(x, 0x7FEB352D)
    x = _wrapping_add(x, high)
    x ^= (x >> 15) & 0x1FFFF
    x = _wrapping_mul(x, 0x846CA68B - (1 << 32))
    x ^= (x >> 16) & 0xFFFF
    uniform = tl.minimum(((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * (2.0**-31), 1 - 2.0**-24)
    # log1p(-u) = log(w) * -u / (w - 1) with w = 1 - u as rounded: the rounding cancels.
    w = 1.0 - uniform
    return tl.where(w == 1.0, uniform, tl.log(w) * (uniform / (w - 1.0)))


@triton.jit
def _total(values_ptr, PARTS: tl.constexpr, PADDED: tl.constexpr):
    part = tl.arange(0, PADDED)
    return tl.sum(tl.load(values_ptr + part, mask=part < PARTS, other=0.0), 0)


@triton.jit
def _shape(
    logits_ptr,
    x_ptr,
    index_ptr,
    positions_ptr,
    floats_ptr,
    ints_ptr,
    stop_ids_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    counts_ptr,
    in_prompt_ptr,
    mask_ptr,
    raw_ptr,
    keys_ptr,
    tokens_ptr,
    tiles_ptr,
    COPY: tl.constexpr,
    BY_ROW: tl.constexpr,
    STOP_IDS: tl.constexpr,
    STOP_PADDED: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_PADDED: tl.constexpr,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    i, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(index_ptr + i)
    features = tl.load(ints_ptr + row * _INTS + _FEATURES_COLUMN)
    first = part * BLOCK
    token = first + tl.arange(0, BLOCK)
    listed = token < VOCAB
    x_row = x_ptr + i.to(tl.int64) * VOCAB
    x = tl.load(logits_ptr + i.to(tl.int64) * VOCAB + token, mask=listed, other=float("-inf")).to(tl.float32)
    tl.store(raw_ptr + i * PARTS + part, tl.max(tl.where(listed, key_of(x), LOWEST_KEY), 0))
    if COPY:
        tl.store(x_row + token, x, mask=listed)
    if (features & (_BIAS | _MIN_TOKENS)) != 0:
        tl.debug_barrier()  # the block is edited in memory, by other threads than those that hold it
        if (features & _BIAS) != 0:
            entry = tl.arange(0, BIAS_PADDED)
            ids = tl.load(bias_ids_ptr + row * BIAS + entry, mask=entry < BIAS, other=-1)
            value = tl.load(bias_values_ptr + row * BIAS + entry, mask=entry < BIAS, other=0.0)
            here = (ids >= first) & (ids < tl.minimum(first + BLOCK, VOCAB)) & (value != 0.0)
            tl.store(x_row + ids, tl.load(x_row + ids, mask=here, other=0.0) + value, mask=here)
            tl.debug_barrier()
        if (features & _MIN_TOKENS) != 0:
            position = tl.load(positions_ptr + (row if BY_ROW else i))
            if position < tl.load(ints_ptr + row * _INTS + _MIN_LENGTH_COLUMN):
                entry = tl.arange(0, STOP_PADDED)
                ids = tl.load(stop_ids_ptr + row * STOP_IDS + entry, mask=entry < STOP_IDS, other=-1)
                here = (ids >= first) & (ids < tl.minimum(first + BLOCK, VOCAB))
                tl.store(x_row + ids, tl.full((STOP_PADDED,), float("-inf"), tl.float32), mask=here)
        tl.debug_barrier()
        x = tl.load(x_row + token, mask=listed, other=float("-inf"))
    if mask_ptr is not None:
        words = tl.load(mask_ptr + i.to(tl.int64) * tl.cdiv(VOCAB, 32) + (token >> 5), mask=listed, other=0)
        x = tl.where(((words >> (token & 31)) & 1) != 0, x, float("-inf"))
        tl.store(x_row + token, x, mask=listed)
    if counts_ptr is not None:  # noqa: SIM102  (known when compiled, unlike the other)
        if (features & _PENALTIES) != 0:
            factors = floats_ptr + row * _FLOATS
            repetition = tl.load(factors + _REPETITION_COLUMN)
            count = tl.load(counts_ptr + row * VOCAB + token, mask=listed, other=0)
            in_prompt = tl.load(in_prompt_ptr + row * VOCAB + token, mask=listed, other=0) != 0
            repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where((count > 0) | in_prompt, repeated, x)
            x = x - tl.load(factors + _FREQUENCY_COLUMN) * count.to(tl.float32)
            x = x - tl.load(factors + _PRESENCE_COLUMN) * (count > 0).to(tl.float32)
            tl.store(x_row + token, x, mask=listed)
    key = tl.where(listed, key_of(x), LOWEST_KEY)
    best, at = first_largest(key, token)
    tl.store(keys_ptr + i * PARTS + part, best)
    tl.store(tokens_ptr + i * PARTS + part, at)
    if (features & _TOP_K) != 0:
        tile = part * (BLOCK // TILE) + tl.arange(0, BLOCK // TILE)
        tl.store(tiles_ptr + i * TILES + tile, tl.max(tl.reshape(key, (BLOCK // TILE, TILE)), 1), mask=tile < TILES)


@triton.jit
def _top_k(
    x_ptr,
    index_ptr,
    ints_ptr,
    tiles_ptr,
    near_ptr,
    thresholds_ptr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """thresholds[i] = a key that is reached by the top_k largest logits, those equal to the last of them, and no others."""
    release(PDL)
    wait(PDL)
    i = tl.program_id(0)
    row = tl.load(index_ptr + i)
    if (tl.load(ints_ptr + row * _INTS + _FEATURES_COLUMN) & _TOP_K) == 0:
        return
    k = tl.load(ints_ptr + row * _INTS + _TOP_K_COLUMN).to(tl.int32)
    tile = tl.arange(0, TILES_PADDED)
    maxima = tl.load(tiles_ptr + i * TILES + tile, mask=tile < TILES, other=LOWEST_KEY)

    # Bisection: at least k reach `low`, fewer than k reach `high`. Ends early where just k reach `low`.
    top = tl.max(maxima, 0).to(tl.int64) + 1
    low, high, reach = top * 0 + LOWEST_KEY, top, k + 1
    while (high - low > 1) & (reach != k):
        middle = (low + high) >> 1
        count = tl.sum((maxima >= middle.to(tl.int32)).to(tl.int32), 0)
        enough = count >= k
        low, high, reach = tl.where(enough, middle, low), tl.where(enough, high, middle), tl.where(enough, count, reach)

    # The k best are in tiles whose maximum reaches `low`: their numbers, one after the other.
    is_near = maxima >= low.to(tl.int32)
    near = near_ptr + i * TILES
    tl.store(near + tl.cumsum(is_near.to(tl.int32), 0) - 1, tile, mask=is_near & (tile < TILES))
    tiles = tl.sum((is_near & (tile < TILES)).to(tl.int32), 0)
    tl.debug_barrier()

    # Four parts a time, as the tiles are read again each time.
    high, reach = top, k + 1
    while (high - low > 1) & (reach != k):
        step = (high - low + 3) >> 2
        first, second, third = low + step, low + 2 * step, low + 3 * step
        c1, c2, c3 = reach * 0, reach * 0, reach * 0
        for chunk in range(0, tiles, CHUNK):
            which = chunk + tl.arange(0, CHUNK)
            number = tl.load(near + which, mask=which < tiles, other=TILES)
            token = number[:, None] * TILE + tl.arange(0, TILE)[None, :]
            x = tl.load(x_ptr + i.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
            key = tl.where(token < VOCAB, key_of(x), LOWEST_KEY)
            key = tl.reshape(key, (CHUNK * TILE,)).to(tl.int64)
            c1 += tl.sum((key >= first).to(tl.int32), 0)
            c2 += tl.sum((key >= second).to(tl.int32), 0)
            c3 += tl.sum((key >= third).to(tl.int32), 0)
        if c3 >= k:
            low, reach = third, c3
        elif c2 >= k:
            low, high, reach = second, tl.minimum(high, third), c2
        elif c1 >= k:
            low, high, reach = first, tl.minimum(high, second), c1
        else:
            high = tl.minimum(high, first)
    tl.store(thresholds_ptr + i, low.to(tl.int32))


@triton.jit
def _parameters(i, row, positions_ptr, floats_ptr, ints_ptr, thresholds_ptr, features, BY_ROW: tl.constexpr):
    """(temperature, least score that min-p keeps, least key that top-k keeps, noise key) of a random row."""
    ints, floats = ints_ptr + row * _INTS, floats_ptr + row * _FLOATS
    position = tl.load(positions_ptr + (row if BY_ROW else i))
    noise = _noise_key(tl.load(ints + _SEED_COLUMN), tl.load(ints + _CHOICE_COLUMN), position)
    lowest = tl.where((features & _MIN_P) != 0, tl.log(tl.load(floats + _MIN_P_COLUMN)), float("-inf"))
    threshold = tl.load(thresholds_ptr + i, mask=(features & _TOP_K) != 0, other=LOWEST_KEY)
    return tl.load(floats + _TEMPERATURE_COLUMN), lowest, threshold, noise


@triton.jit
def _candidates(x, token, largest, temperature, lowest, threshold, above, noise):
    """(mass of the kept tokens of a block that score above `above`, the best of them under its noise, which token that is).

    Best is the largest exp(score) / exponential, as the largest score + Gumbel noise; -1 and no token if there is none.
    """
    score = tl.div_rn(x - largest, temperature)
    kept = (key_of(x) >= threshold) & (score >= lowest) & (score > above)
    mass = tl.where(kept, tl.exp(score), 0.0)
    best, at = tl.max(mass, 0) * 0.0 - 1.0, tl.max(token, 0) * 0 + NO_TOKEN
    if tl.max(kept.to(tl.int32), 0) != 0:  # the noise costs more than all the rest
        best, at = first_largest(tl.where(kept, mass / _exponential(noise, token), -1.0), token)
    return tl.sum(mass, 0), best, at


@triton.jit
def _is_open(mass, share):
    """Whether the tokens above a candidate, of that mass, are too likely for top-p to keep it. Not where nothing was found or
    a number is NaN: what later stages would have to say was then never written."""
    return (mass > 0.0) & (mass >= share)


@triton.jit
def _within(token, VOCAB: tl.constexpr):
    """A token to load from: logits that are not numbers must not lead out of their row."""
    return tl.minimum(tl.maximum(token, 0), VOCAB - 1)


@triton.jit
def _draw(
    x_ptr,
    index_ptr,
    positions_ptr,
    floats_ptr,
    ints_ptr,
    keys_ptr,
    thresholds_ptr,
    masses_ptr,
    bests_ptr,
    drawn_ptr,
    STAGE: tl.constexpr,
    STAGES: tl.constexpr,
    BY_ROW: tl.constexpr,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Stage 0 draws from all that min-p and top-k keep, a later one from what is likelier than the last candidate.

    masses, bests and drawn are [n, stages, parts]. A stage leaves them as they are if an earlier candidate is good, or there
    is none, as in rows that are not finite.
    """
    release(PDL)
    wait(PDL)
    i, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(index_ptr + i)
    features = tl.load(ints_ptr + row * _INTS + _FEATURES_COLUMN)
    needed: tl.constexpr = _RANDOM if STAGE == 0 else _RANDOM | _TOP_P
    if (features & needed) != needed:
        return
    line = tl.arange(0, PADDED)
    keys = tl.load(keys_ptr + i * PARTS + line, mask=line < PARTS, other=LOWEST_KEY)
    largest = value_of(tl.max(keys, 0))
    temperature, lowest, threshold, noise = _parameters(
        i, row, positions_ptr, floats_ptr, ints_ptr, thresholds_ptr, features, BY_ROW
    )
    x_row = x_ptr + i.to(tl.int64) * VOCAB
    found = i * STAGES * PARTS
    above = float("-inf")
    if STAGE > 0:
        mass = _total(masses_ptr + found, PARTS, PADDED)
        share = tl.load(floats_ptr + row * _FLOATS + _TOP_P_COLUMN) * mass
        if _is_open(mass, share) == 0:
            return
        for stage in tl.static_range(1, STAGE):
            if _is_open(_total(masses_ptr + found + stage * PARTS, PARTS, PADDED), share) == 0:
                return
        last = found + (STAGE - 1) * PARTS
        _, candidate = merged(bests_ptr + last, drawn_ptr + last, PARTS, PADDED, -1.0)
        above = tl.div_rn(tl.load(x_row + _within(candidate, VOCAB)) - largest, temperature)
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_row + token, mask=token < VOCAB, other=float("-inf"))
    mass, best, at = _candidates(x, token, largest, temperature, lowest, threshold, above, noise)
    here = found + STAGE * PARTS + part
    tl.store(masses_ptr + here, mass)
    tl.store(bests_ptr + here, best)
    tl.store(drawn_ptr + here, at)


@triton.jit
def _settle(
    x_ptr,
    index_ptr,
    positions_ptr,
    floats_ptr,
    ints_ptr,
    raw_ptr,
    keys_ptr,
    firsts_ptr,
    thresholds_ptr,
    masses_ptr,
    bests_ptr,
    drawn_ptr,
    tokens_ptr,
    bad_ptr,
    STAGES: tl.constexpr,
    BY_ROW: tl.constexpr,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    i = tl.program_id(0)
    row = tl.load(index_ptr + i)
    features = tl.load(ints_ptr + row * _INTS + _FEATURES_COLUMN)
    line = tl.arange(0, PADDED)
    raw = tl.load(raw_ptr + i * PARTS + line, mask=line < PARTS, other=LOWEST_KEY)
    bad = is_finite(value_of(tl.max(raw, 0))) == 0
    key, token = merged(keys_ptr + i * PARTS, firsts_ptr + i * PARTS, PARTS, PADDED, LOWEST_KEY)
    tl.store(bad_ptr + i, bad)
    largest = value_of(key)
    if ((features & _RANDOM) != 0) & (bad == 0) & is_finite(largest):
        found = i * STAGES * PARTS
        best, drawn = merged(bests_ptr + found, drawn_ptr + found, PARTS, PADDED, -1.0)
        token = tl.where(best >= 0, drawn, token)
        if (features & _TOP_P) != 0:
            mass = _total(masses_ptr + found, PARTS, PADDED)
            share = tl.load(floats_ptr + row * _FLOATS + _TOP_P_COLUMN) * mass
            settled = _is_open(mass, share) == 0
            for stage in tl.static_range(1, STAGES):
                at = found + stage * PARTS
                _, next_token = merged(bests_ptr + at, drawn_ptr + at, PARTS, PADDED, -1.0)
                settled |= _is_open(_total(masses_ptr + at, PARTS, PADDED), share) == 0
                token = tl.where(settled, token, next_token)
            temperature, lowest, threshold, noise = _parameters(
                i, row, positions_ptr, floats_ptr, ints_ptr, thresholds_ptr, features, BY_ROW
            )
            x_row = x_ptr + i.to(tl.int64) * VOCAB
            while settled == 0:
                above = tl.div_rn(tl.load(x_row + _within(token, VOCAB)) - largest, temperature)
                mass, best, next_token = share * 0.0, share * 0.0 - 1.0, token
                for first in range(0, VOCAB, BLOCK):
                    block = first + tl.arange(0, BLOCK)
                    x = tl.load(x_row + block, mask=block < VOCAB, other=float("-inf"))
                    m, b, t = _candidates(x, block, largest, temperature, lowest, threshold, above, noise)
                    mass += m
                    next_token = tl.where(b > best, t, next_token)
                    best = tl.maximum(best, b)
                settled = _is_open(mass, share) == 0
                token = tl.where(settled, token, next_token)
    tl.store(tokens_ptr + i, _within(token, VOCAB).to(tl.int64))


def sample_rows(
    logits: torch.Tensor,
    index: torch.Tensor,
    tables: RowTables,
    positions: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [n] int64, bad [n] bool). float32 logits [n, V] are overwritten. positions None: `tables.lengths`."""
    n, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(n, dtype=torch.int64, device=device)
    bad = torch.empty(n, dtype=torch.bool, device=device)
    if n == 0:
        return tokens, bad
    stages = 1 + _REDRAWS
    parts, tiles = triton.cdiv(vocab, BLOCK), triton.cdiv(vocab, TILE)
    padded = triton.next_power_of_2(parts)
    raw, keys, firsts = torch.empty(3, n, parts, dtype=torch.int32, device=device).unbind()
    maxima, near = torch.empty(2, n, tiles, dtype=torch.int32, device=device).unbind()
    thresholds = torch.empty(n, dtype=torch.int32, device=device)
    masses, bests = torch.empty(2, n, stages, parts, dtype=torch.float32, device=device).unbind()
    drawn = torch.empty(n, stages, parts, dtype=torch.int32, device=device)
    x = logits if logits.dtype == torch.float32 else torch.empty(n, vocab, dtype=torch.float32, device=device)
    places = tables.lengths if positions is None else positions
    by_row = positions is None
    pdl = dependent.supported(device)
    _shape[n, parts](
        logits,
        x,
        index,
        places,
        tables.floats,
        tables.ints,
        tables.stop_ids,
        tables.bias_ids,
        tables.bias_values,
        tables.counts,
        tables.in_prompt,
        mask,
        raw,
        keys,
        firsts,
        maxima,
        COPY=x is not logits,
        BY_ROW=by_row,
        STOP_IDS=tables.stop_ids.shape[1],
        STOP_PADDED=triton.next_power_of_2(tables.stop_ids.shape[1]),
        BIAS=tables.bias_ids.shape[1],
        BIAS_PADDED=triton.next_power_of_2(tables.bias_ids.shape[1]),
        VOCAB=vocab,
        PARTS=parts,
        TILES=tiles,
        BLOCK=BLOCK,
        TILE=TILE,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=False,  # the bits of the reference
    )
    _top_k[(n,)](
        x,
        index,
        tables.ints,
        maxima,
        near,
        thresholds,
        VOCAB=vocab,
        TILES=tiles,
        TILES_PADDED=triton.next_power_of_2(tiles),
        TILE=TILE,
        CHUNK=64,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    shared: dict[str, Any] = {
        "STAGES": stages,
        "BY_ROW": by_row,
        "VOCAB": vocab,
        "PARTS": parts,
        "PADDED": padded,
        "BLOCK": BLOCK,
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    rows = (x, index, places, tables.floats, tables.ints)
    found = (thresholds, masses, bests, drawn)
    for stage in range(stages):
        _draw[n, parts](*rows, keys, *found, STAGE=stage, num_warps=WARPS, **shared)
    _settle[(n,)](*rows, raw, keys, firsts, *found, tokens, bad, num_warps=8, **shared)
    return tokens, bad
