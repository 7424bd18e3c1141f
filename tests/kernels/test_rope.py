"""rotate_ against complex rotation in float64; store_kv writes exactly the slots it was given."""

from __future__ import annotations

import pytest
import torch

from lockstep_kernels.rope import kv_rows, rotate_, store_kv


def tables(positions: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** -(torch.arange(0, width, 2).double() / width)
    angles = positions.double()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return angles, torch.cat((cos, cos), 1)[:, None].to(dtype), torch.cat((-sin, sin), 1)[:, None].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 2), (5, 12, 64), (3, 4, 80)])
def test_rotates_pairs_of_halves(tokens: int, heads: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    angles, cos, sin = tables(torch.randint(0, 5000, (tokens,)), width, dtype)
    room = torch.randn(tokens, heads + 2, width).to(dtype)
    before = room.clone()
    rotate_(room[:, :heads], cos, sin)
    first, second = before[:, :heads].double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    exact = torch.cat((turned.real, turned.imag), -1)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(room[:, :heads].double(), exact, rtol=tolerance, atol=tolerance)
    assert torch.equal(room[:, heads:], before[:, heads:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(700, 3, 80).to(dtype)
    _, cos, sin = tables(torch.arange(700), 80, dtype)
    whole = x.clone()
    rotate_(whole, cos, sin)
    for part in (slice(0, 1), slice(349, 352), slice(10, 699)):
        alone = x[part].clone()
        rotate_(alone, cos[part], sin[part])
        assert torch.equal(alone, whole[part])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_store_writes_the_named_slots_and_no_other(block_size: int) -> None:
    torch.manual_seed(2)
    cache = torch.randn(9, 2, 3, block_size, 8)
    before = cache.clone()
    slots = torch.randperm(9 * block_size)[:5]
    kv = torch.randn(5, 6, 8)
    store_kv(kv, cache, kv_rows(slots, 3, block_size))
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        assert torch.equal(cache[block, :, :, offset].flatten(0, 1), kv[token])
        cache[block, :, :, offset] = before[block, :, :, offset]
    assert torch.equal(cache, before)


def test_operands_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="cos has shape"):
        rotate_(torch.ones(2, 1, 4), torch.ones(2, 4), torch.ones(2, 1, 4))
    with pytest.raises(ValueError, match="cache has shape"):
        store_kv(torch.ones(1, 4, 8), torch.ones(3, 2, 3, 16, 8), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="rows has shape"):
        store_kv(torch.ones(1, 4, 8), torch.ones(3, 2, 2, 16, 8), torch.zeros(3, dtype=torch.int64))
