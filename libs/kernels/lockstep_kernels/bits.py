"""Whether this CPU gives a row the same bits whatever stands beside it.

Products are oneDNN's, FBGEMM's and MKL's, which choose their loops by the CPU and by the shape. `linear` and `attention` ask
them only for shapes that were found to add in one order; on another CPU that need not be so. What is not so is found here, by
computing a few rows in several ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from lockstep_kernels.attention import PagedBatch, attention, prepare
from lockstep_kernels.linear import Packed, linear, pack

SIZES: Final = ((192, 64), (576, 1536), (257, 48))  # outputs and inputs of products
HEADS: Final = ((3, 3, 64), (6, 1, 8), (1, 7, 32), (2, 4, 128))  # key/value heads, query heads of each, width
BLOCK_SIZE: Final = 16
LENGTH: Final = 145  # positions: more than two tiles of keys
CHUNKS: Final = ((0, 37), (37, 65), (62, 63), (63, 64), (64, 65), (1, 128), (128, 145), (144, 145))


def differing_ops(dtype: torch.dtype) -> tuple[str, ...]:
    """Names of the ops on CPU whose bits depend on the number of rows, for weights of `dtype` and torch's number of threads.

    Takes about a tenth of a second.
    """
    with torch.inference_mode():
        products, mixed = all(_products_agree(*size, dtype) for size in SIZES), all(map(_attention_agrees, HEADS))
    return ("products",) * (not products) + ("attention",) * (not mixed)


def _products_agree(out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    packed = pack((_randn(out_features, in_features, seed=1) / in_features**0.5).to(dtype))
    x = _randn(80, in_features)
    return all(_rows_agree(x.to(form.dtype), form) for form in (packed, packed.for_prompts))


def _rows_agree(x: torch.Tensor, packed: Packed) -> bool:
    whole = linear(x, packed)
    parts = ((first, first + rows) for rows in (1, 2, 3, 8, 16, 17, 40) for first in (0, 7))
    return all(torch.equal(linear(x[start:end], packed), whole[start:end]) for start, end in parts)


def _attention_agrees(heads: tuple[int, int, int]) -> bool:
    """A sequence as a whole, against chunks and steps of it, alone and beside another that is as far."""
    kv_heads, group, width = heads
    blocks = -(-LENGTH // BLOCK_SIZE)
    cache = _randn(1 + 2 * blocks, 2, kv_heads, BLOCK_SIZE, width)
    tables = torch.arange(1, 1 + 2 * blocks).view(2, blocks)
    q = 3 * _randn(2, LENGTH, kv_heads * group, width, seed=1)

    def mixed(sequences: int, start: int, end: int) -> torch.Tensor:
        """[sequences, end - start, H * d]"""
        batch = PagedBatch((end - start,) * sequences, (end,) * sequences, tables[:sequences], BLOCK_SIZE)
        prepared = prepare(
            batch, heads=kv_heads * group, kv_heads=kv_heads, head_dim=width, dtype=cache.dtype, device=cache.device
        )
        queries = q[:sequences, start:end].flatten(0, 1)
        return attention(queries, cache, prepared, scale=width**-0.5).view(sequences, end - start, -1)

    def parts() -> Iterator[bool]:
        whole = mixed(2, 0, LENGTH)
        for sequences in (1, 2):
            for start, end in ((0, LENGTH), *CHUNKS):
                yield torch.equal(mixed(sequences, start, end), whole[:sequences, start:end])

    return all(parts())


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
