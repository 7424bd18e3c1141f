"""The paged cache: layout, zeroing and copying in every layer, the null block, sizes that are refused."""

from __future__ import annotations

import pytest
import torch

from lockstep_common.errors import ConfigError
from lockstep_worker.kv import KvCache, KvSpec

SPEC = KvSpec("full", layers=3, kv_heads=2, head_dim=4, dtype=torch.float32)


def make() -> KvCache:
    kv = KvCache([SPEC], num_blocks=6, block_size=8)
    for layer in range(SPEC.layers):
        cache = kv.layer(0, layer)
        assert not cache.any()
        cache.copy_(torch.arange(cache.numel()).view(cache.shape) + 1000 * layer)
    return kv


def test_layout() -> None:
    cache = make().layer(0, 1)
    assert cache.shape == (6, 2, 2, 8, 4) and cache.is_contiguous()
    assert cache[0].numel() * 4 * SPEC.layers == SPEC.bytes_per_block(8)


def test_zero_and_copy_touch_the_named_blocks_of_every_layer() -> None:
    kv = make()
    before = [kv.layer(0, i).clone() for i in range(SPEC.layers)]
    kv.zero(0, torch.tensor([1, 4]))
    kv.copy(0, torch.tensor([2, 3]), torch.tensor([5, 1]))
    for i, old in enumerate(before):
        new = kv.layer(0, i)
        assert not new[4].any()
        assert torch.equal(new[5], old[2]) and torch.equal(new[1], old[3])
        assert torch.equal(new[[0, 2, 3]], old[[0, 2, 3]])


def test_nothing_to_zero_or_copy() -> None:
    kv = make()
    none = torch.zeros(0, dtype=torch.int64)
    before = kv.layer(0, 0).clone()
    kv.zero(0, none)
    kv.copy(0, none, none)
    assert torch.equal(kv.layer(0, 0), before)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (0, 16), (2, 0)])
def test_no_room_beside_the_null_block(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="no room beside the null block"):
        KvCache([SPEC], num_blocks=num_blocks, block_size=block_size)


def test_memory_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"no memory for a KV cache of 1000000000000 blocks"):
        KvCache([SPEC], num_blocks=10**12, block_size=16)
