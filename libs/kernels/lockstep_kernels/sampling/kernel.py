"""Sampling in Triton: the largest logits of rows and their log-probabilities. What a row may ask for beyond that is in `rows`.

Rows are cut into blocks of BLOCK tokens, so that one row is spread over the device as well as many are; what a block finds is
merged by a second launch. No sums go through atomics: a row's bits depend on the row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep_kernels import dependent
from lockstep_kernels.dependent import release, wait
from lockstep_kernels.sampling.reference import LOWEST_LOGPROB

BLOCK = 2048
WARPS = 4

LOWEST_KEY = tl.constexpr(-(2**31))
HIGHEST_KEY = tl.constexpr(2**31 - 1)
NO_TOKEN = tl.constexpr(2**31 - 1)


# Order


@triton.jit
def key_of(x):
    """int32 in the order of float32 x; NaN is the largest, -0 equals 0."""
    x = x + 0.0
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, HIGHEST_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_of(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def first_largest(value, token):
    """(largest value, the smallest token that has it) of a block."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, token, NO_TOKEN), 0)


@triton.jit
def merged(values_ptr, tokens_ptr, PARTS: tl.constexpr, PADDED: tl.constexpr, NONE: tl.constexpr):
    """(largest value, its token) of a row's blocks."""
    part = tl.arange(0, PADDED)
    values = tl.load(values_ptr + part, mask=part < PARTS, other=NONE)
    tokens = tl.load(tokens_ptr + part, mask=part < PARTS, other=NO_TOKEN)
    return first_largest(values, tokens)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


# Greedy


@triton.jit
def _block_argmax(
    logits_ptr, keys_ptr, tokens_ptr, VOCAB: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    release(PDL)
    wait(PDL)
    i, part = tl.program_id(0), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    listed = token < VOCAB
    x = tl.load(logits_ptr + i.to(tl.int64) * VOCAB + token, mask=listed, other=float("-inf")).to(tl.float32)
    best, first = first_largest(tl.where(listed, key_of(x), LOWEST_KEY), token)
    tl.store(keys_ptr + i * PARTS + part, best)
    tl.store(tokens_ptr + i * PARTS + part, first)


@triton.jit
def _merge_argmax(
    keys_ptr,
    parts_ptr,
    tokens_ptr,
    values_ptr,
    bad_ptr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    LOWEST: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    i = tl.program_id(0)
    best, token = merged(keys_ptr + i * PARTS, parts_ptr + i * PARTS, PARTS, PADDED, LOWEST)
    value = value_of(best)
    tl.store(tokens_ptr + i, token.to(tl.int64))
    tl.store(values_ptr + i, value)
    tl.store(bad_ptr + i, is_finite(value) == 0)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens [n] int64, values [n] float32, bad [n] bool: not finite)."""
    n, vocab = logits.shape
    parts = triton.cdiv(vocab, BLOCK)
    keys, firsts = torch.empty(2, n, parts, dtype=torch.int32, device=logits.device).unbind()
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    values = torch.empty(n, dtype=torch.float32, device=logits.device)
    bad = torch.empty(n, dtype=torch.bool, device=logits.device)
    if n == 0:
        return tokens, values, bad
    pdl = dependent.supported(logits.device)
    _block_argmax[n, parts](
        logits, keys, firsts, VOCAB=vocab, PARTS=parts, BLOCK=BLOCK, PDL=pdl, num_warps=WARPS, launch_pdl=pdl
    )
    _merge_argmax[(n,)](
        keys,
        firsts,
        tokens,
        values,
        bad,
        PARTS=parts,
        PADDED=triton.next_power_of_2(parts),
        LOWEST=LOWEST_KEY.value,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return tokens, values, bad


# Logprobs


@triton.jit(do_not_specialize=["count"])
def _block_logprobs(
    logits_ptr,
    maxima_ptr,
    sums_ptr,
    keys_ptr,
    tokens_ptr,
    count,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    i, part = tl.program_id(0), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    listed = token < VOCAB
    x = tl.load(logits_ptr + i.to(tl.int64) * VOCAB + token, mask=listed, other=float("-inf")).to(tl.float32)
    key = tl.where(listed, key_of(x), LOWEST_KEY)
    largest = value_of(tl.max(key, 0))
    tl.store(maxima_ptr + i * PARTS + part, largest)
    tl.store(sums_ptr + i * PARTS + part, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - largest)), 0))
    found = (i * PARTS + part).to(tl.int64) * count
    for rank in range(count):
        best, at = first_largest(key, token)
        tl.store(keys_ptr + found + rank, best)
        tl.store(tokens_ptr + found + rank, at)
        key = tl.where(token == at, LOWEST_KEY, key)


@triton.jit(do_not_specialize=["count"])
def _merge_logprobs(
    logits_ptr,
    chosen_ptr,
    maxima_ptr,
    sums_ptr,
    keys_ptr,
    firsts_ptr,
    logprobs_ptr,
    ids_ptr,
    values_ptr,
    count,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LOWEST: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    maxima = tl.load(maxima_ptr + i * PARTS + part, mask=part < PARTS, other=float("-inf"))
    sums = tl.load(sums_ptr + i * PARTS + part, mask=part < PARTS, other=0.0)
    largest = value_of(tl.max(key_of(maxima), 0))
    total = largest + tl.log(tl.sum(tl.where(maxima == float("-inf"), 0.0, sums * tl.exp(maxima - largest)), 0))
    x = tl.load(logits_ptr + i * VOCAB + tl.load(chosen_ptr + i)).to(tl.float32)
    tl.store(logprobs_ptr + i, tl.maximum(x - total, LOWEST))
    candidate = tl.arange(0, CANDIDATES)
    listed = candidate < PARTS * count
    keys = tl.load(keys_ptr + i * PARTS * count + candidate, mask=listed, other=LOWEST_KEY)
    tokens = tl.load(firsts_ptr + i * PARTS * count + candidate, mask=listed, other=NO_TOKEN)
    for rank in range(count):
        best, token = first_largest(keys, tokens)
        tl.store(ids_ptr + i * count + rank, token.to(tl.int64))
        tl.store(values_ptr + i * count + rank, tl.maximum(value_of(best) - total, LOWEST))
        keys = tl.where(tokens == token, LOWEST_KEY, keys)


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprobs of tokens [n], ids of the `count` best [n, count] int64, their logprobs), float32."""
    n, vocab = logits.shape
    device = logits.device
    parts = triton.cdiv(vocab, BLOCK)
    chosen = torch.empty(n, dtype=torch.float32, device=device)
    ids = torch.empty(n, count, dtype=torch.int64, device=device)
    values = torch.empty(n, count, dtype=torch.float32, device=device)
    if n == 0:
        return chosen, ids, values
    maxima, sums = torch.empty(2, n, parts, dtype=torch.float32, device=device).unbind()
    keys, firsts = torch.empty(2, n, parts, count, dtype=torch.int32, device=device).unbind()
    pdl = dependent.supported(device)
    _block_logprobs[n, parts](
        logits,
        maxima,
        sums,
        keys,
        firsts,
        count,
        VOCAB=vocab,
        PARTS=parts,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    _merge_logprobs[(n,)](
        logits,
        tokens,
        maxima,
        sums,
        keys,
        firsts,
        chosen,
        ids,
        values,
        count,
        VOCAB=vocab,
        PARTS=parts,
        PADDED=triton.next_power_of_2(parts),
        CANDIDATES=triton.next_power_of_2(max(32, parts * count)),
        LOWEST=LOWEST_LOGPROB,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return chosen, ids, values
