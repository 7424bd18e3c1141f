"""linear and swiglu against float64, with and without what follows, and the same bits for a row in any company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels.linear import Layout, Packed, fbgemm, linear, pack, reference, split
from lockstep_kernels.swiglu import pack_gate_up, swiglu
from lockstep_kernels.swiglu import reference as swiglu_reference

SHAPES = [(960, 576), (576, 1536), (257, 64), (48, 31), (1, 16)]
FOLLOWERS = ["nothing", "silu", "times", "plus"]


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def operands(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows + n + k)
    x, weight, bias, other = torch.randn(rows, k), torch.randn(n, k) / k**0.5, torch.randn(n), torch.randn(rows, n)
    return tuple(t.to(dtype) for t in (x, weight, bias, other))


def following(name: str, other: torch.Tensor) -> dict[str, Any]:
    followers: dict[str, dict[str, Any]] = {
        "nothing": {},
        "silu": {"silu": True},
        "times": {"times": other},
        "plus": {"plus": other},
    }
    return followers[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("follower", FOLLOWERS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matches_float64(n: int, k: int, follower: str, dtype: torch.dtype) -> None:
    for rows in (0, 1, 2, 5, 17):
        x, weight, bias, other = operands(rows, n, k, dtype)
        packed = pack(weight, bias)
        x, other = x.to(packed.dtype), other.to(packed.dtype)
        y = linear(x, packed, **following(follower, other))
        exact = reference.linear(x.double(), weight.double(), bias.double(), **following(follower, other.double()))
        tolerance = 1e-5 if packed.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)
        assert y.dtype == packed.dtype and y.shape == (rows, n)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    follower=st.sampled_from(FOLLOWERS),
    first=st.integers(0, 40),
    rows=st.integers(1, 40),
)
def test_a_row_does_not_depend_on_its_neighbours(
    shape: tuple[int, int], dtype: torch.dtype, follower: str, first: int, rows: int
) -> None:
    x, weight, bias, other = operands(80, *shape, dtype)
    packed = pack(weight, bias)
    x, other = x.to(packed.dtype), other.to(packed.dtype)
    whole = linear(x, packed, **following(follower, other))
    part = slice(first, first + rows)
    assert torch.equal(linear(x[part], packed, **following(follower, other[part])), whole[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_matches_float64_and_is_row_invariant(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(19, 64).to(dtype)
    gate, up = (torch.randn(2, 160, 64) / 8).to(dtype)
    gate_bias, up_bias = torch.randn(2, 160).to(dtype)
    weight = pack_gate_up(gate, up, gate_bias, up_bias)
    x = x.to(weight.up.dtype)
    exact = swiglu_reference.swiglu(*(t.double() for t in (x, gate, up, gate_bias, up_bias)))
    tolerance = 1e-5 if x.dtype == torch.float32 else 2**-6
    whole = swiglu(x, weight)
    torch.testing.assert_close(whole.double(), exact, rtol=tolerance, atol=tolerance)
    for part in (slice(0, 1), slice(3, 5), slice(4, 13)):
        assert torch.equal(swiglu(x[part], weight), whole[part])


def test_bfloat16_weights_are_held_exactly() -> None:
    weight = torch.randn(70, 48).bfloat16()
    packed = pack(weight)
    assert packed.layout is Layout.HALF and packed.dtype == torch.float32
    assert torch.equal(linear(torch.eye(48), packed).T, weight.float())


def test_a_weight_beyond_float16_keeps_its_range() -> None:
    weight = torch.randn(40, 16).bfloat16()
    weight[3, 5] = 1e6
    packed = pack(weight)
    assert packed.layout is Layout.ONEDNN and packed.dtype == torch.float32
    torch.testing.assert_close(linear(torch.eye(16), packed).T, weight.float())


@pytest.mark.parametrize("elements", [1, 63, 64, 100, 128, 1000, 40_000])
def test_silu_has_the_same_bits_wherever_an_element_stands(elements: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(elements)
    unit = fbgemm.silu_unit()
    everywhere = fbgemm.silu_(values.repeat(3), unit)
    assert torch.equal(fbgemm.silu_(values.clone(), unit).repeat(3), everywhere)


def test_operands_that_do_not_fit_are_refused() -> None:
    packed = pack(torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"x has shape \(2, 7\), expected \(2, 8\)"):
        linear(torch.ones(2, 7), packed)
    with pytest.raises(ValueError, match="this weight takes"):
        linear(torch.ones(2, 8, dtype=torch.float64), packed)
    with pytest.raises(ValueError, match="at most one of silu, times and plus"):
        linear(torch.ones(2, 8), packed, silu=True, plus=torch.ones(2, 4))
    with pytest.raises(ValueError, match="plus has shape"):
        linear(torch.ones(2, 8), packed, plus=torch.ones(1, 4))
    with pytest.raises(ValueError, match="gate has shape"):
        pack_gate_up(torch.ones(4, 8), torch.ones(5, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_parts_of_a_weight_give_the_parts_of_its_product(dtype: torch.dtype, biased: bool) -> None:
    x, weight, bias, _ = operands(7, 960, 576, dtype)
    packed = pack(weight, bias if biased else None)
    for form in (packed, packed.for_prompts):
        y = linear(x.to(form.dtype), form)
        parts = split(form, [700, 100, 160])
        assert [part.dtype for part in parts] == [form.dtype] * 3
        torch.testing.assert_close(torch.cat([linear(x.to(form.dtype), part) for part in parts], 1), y)
    with pytest.raises(ValueError, match="960"):
        split(packed, [700, 100])


def test_blocks_of_scales_are_not_cut() -> None:
    values, scale = torch.zeros(384, 128, dtype=torch.float8_e4m3fn), torch.arange(3.0).view(3, 1)
    packed = Packed(values, None, 384, 128, Layout.FP8, torch.bfloat16, scale=scale)
    assert [part.scale.tolist() for part in split(packed, [256, 128]) if part.scale is not None] == [[[0], [1]], [[2]]]
    with pytest.raises(ValueError, match="cannot be cut"):
        split(packed, [200, 184])
