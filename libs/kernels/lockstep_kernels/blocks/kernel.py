"""Blocks of a KV cache, zeroed and copied in Triton: one launch for all layers. What the bytes mean does not matter here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048  # words that a program moves
_MOST_BLOCKS = 32768  # a grid's second dimension has 16 bits
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _zero(cache_ptr, blocks_ptr, num_blocks, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    layer = tl.program_id(2).to(tl.int64)
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block = layer * num_blocks + tl.load(blocks_ptr + tl.program_id(1))
    tl.store(cache_ptr + block * WORDS + words, tl.zeros((BLOCK,), cache_ptr.dtype.element_ty), mask=words < WORDS)


@triton.jit
def _copy(cache_ptr, sources_ptr, destinations_ptr, num_blocks, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    layer = tl.program_id(2).to(tl.int64)
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = layer * num_blocks + tl.load(sources_ptr + tl.program_id(1))
    destination = layer * num_blocks + tl.load(destinations_ptr + tl.program_id(1))
    values = tl.load(cache_ptr + source * WORDS + words, mask=words < WORDS)
    tl.store(cache_ptr + destination * WORDS + words, values, mask=words < WORDS)


def zero(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    words = _as_words(cache)
    for part in blocks.split(_MOST_BLOCKS):
        _zero[_grid(words, part)](words, part, words.shape[1], WORDS=words.shape[2], BLOCK=_BLOCK, num_warps=8)


def copy(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    words = _as_words(cache)
    for source, destination in zip(sources.split(_MOST_BLOCKS), destinations.split(_MOST_BLOCKS), strict=True):
        _copy[_grid(words, source)](
            words, source, destination, words.shape[1], WORDS=words.shape[2], BLOCK=_BLOCK, num_warps=8
        )


def _grid(words: torch.Tensor, blocks: torch.Tensor) -> tuple[int, int, int]:
    return triton.cdiv(words.shape[2], _BLOCK), len(blocks), words.shape[0]


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    """The cache as [layers, num_blocks, words] of the widest type whose size divides a block's."""
    layers, num_blocks = cache.shape[:2]
    flat = cache.view(layers, num_blocks, -1)
    size = flat.shape[2] * flat.element_size()
    word = next(dtype for dtype in _WORDS if size % dtype.itemsize == 0)
    return flat.view(torch.uint8).view(word)
