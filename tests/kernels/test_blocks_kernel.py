"""Zeroing and copying KV blocks: the kernels against the reference, in every layer, with poison all around."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels import blocks
from lockstep_kernels.blocks import reference
from tests.kernels.device import DEVICE, ON_GPU

from lockstep_kernels.blocks import kernel  # isort: skip  (after tests.kernels.device)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
SHAPES = ((2, 2, 16, 64), (1, 1, 16, 576), (2, 3, 5, 7), (2, 8, 64, 128)) if ON_GPU else ((2, 1, 16, 72), (1, 1, 3, 5))


def cache_of(layers: int, num_blocks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (layers, num_blocks, *shape)
    return (
        torch.randint(0, 255, (*size[:-1], size[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .to(DEVICE)
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6), count=st.integers(0, 3), shape=st.sampled_from(SHAPES), dtype=st.sampled_from(DTYPES)
)
def test_the_kernels_equal_the_reference(seed: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    want = cache_of(3, 9, shape, dtype, seed)
    got = want.clone()
    chosen = torch.randperm(9, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    reference.copy(want, chosen[:count], chosen[count : 2 * count])
    kernel.copy(got, chosen[:count], chosen[count : 2 * count])
    assert same(want, got)
    reference.zero(want, chosen[2 * count :])
    kernel.zero(got, chosen[2 * count :])
    assert same(want, got) and not got[:, chosen[2 * count :]].view(torch.uint8).any()


def test_a_cache_whose_layers_are_not_together() -> None:
    cache = torch.zeros(2, 3, 4, 5, device=DEVICE).transpose(0, 1)
    with pytest.raises(ValueError, match="must be contiguous"):
        blocks.zero(cache, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match="destinations has shape"):
        blocks.copy(cache.contiguous(), torch.zeros(1).long(), torch.zeros(2).long())
