"""The kernels around and of dense products against float64, at odd sizes, in buffers that start as NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.device import ON_GPU, poisoned, randn

from lockstep_kernels.linear import kernel as linear  # isort: skip  (kernels after tests.kernels.device)
from lockstep_kernels.linear.few import kernel as few  # isort: skip
from lockstep_kernels.rms_norm import kernel as rms_norm  # isort: skip
from lockstep_kernels.swiglu import kernel as swiglu  # isort: skip

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # an ulp of a result of about 2
EPS = 1e-5


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * gain.double()


def close(got: torch.Tensor, exact: torch.Tensor, times: float = 1.0) -> None:
    tolerance = TOLERANCE[got.dtype] * times
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@settings(max_examples=12, deadline=None)
@given(
    dtype=DTYPES,
    rows=st.integers(1, 300 if ON_GPU else 5),
    heads=st.one_of(st.none(), st.integers(1, 5)),
    width=st.sampled_from([1, 33, 64, 128, 576, 1500, 5120]),
    own=st.booleans(),
    gap=st.integers(0, 3),
)
def test_rms_norm_of_strided_rows(
    dtype: torch.dtype, rows: int, heads: int | None, width: int, own: bool, gap: int
) -> None:
    inner = (width,) if heads is None else (heads, width)
    room = poisoned(rows, *(size + gap for size in inner), dtype=dtype)
    x = room[(slice(None), *(slice(size) for size in inner))]
    x.copy_(randn(rows, *inner, dtype=dtype) * 3)
    gain = randn(*(inner if own else inner[-1:]), seed=1)
    got = rms_norm.rms_norm(x, gain, EPS)
    assert got.is_contiguous() and got.dtype == dtype
    close(got, normed(x, gain), 4)


@settings(max_examples=8, deadline=None)
@given(dtype=DTYPES, rows=st.integers(0, 70 if ON_GPU else 3), width=st.sampled_from([1, 96, 1024, 1408]))
def test_silu_mul(dtype: torch.dtype, rows: int, width: int) -> None:
    both = randn(rows, 2 * width, dtype=dtype)
    gate, up = both.double().chunk(2, 1)
    close(swiglu.silu_mul(both), torch.nn.functional.silu(gate) * up, 2)


@settings(max_examples=10, deadline=None)
@given(
    dtype=DTYPES,
    rows=st.integers(1, linear.MOST_SKINNY),
    size=st.sampled_from([(5, 24), (33, 576), (12, 1536), (3, 2500), (64, 64), *([(4096, 4096)] if ON_GPU else [])]),
    norm=st.booleans(),
    bias=st.booleans(),
    plus=st.booleans(),
    gated=st.booleans(),
    wide=st.booleans(),
)
def test_a_skinny_product_with_all_that_is_fused_to_it(
    dtype: torch.dtype,
    rows: int,
    size: tuple[int, int],
    norm: bool,
    bias: bool,
    plus: bool,
    gated: bool,
    wide: bool,
) -> None:
    n, k = size
    x, weight = randn(rows, k, dtype=dtype), randn((1 + gated) * n, k, dtype=dtype, seed=1) / k**0.5
    gain = randn(k, seed=2) if norm else None
    offset = randn((1 + gated) * n, dtype=dtype, seed=3) if bias else None
    residual = randn(rows, n, dtype=dtype, seed=4) if plus else None
    exact = (x.double() if gain is None else normed(x, gain)) @ weight.double().t()
    if offset is not None:
        exact += offset.double()
    if gated:
        gate, up = exact.chunk(2, 1)
        exact = torch.nn.functional.silu(gate) * up
    if residual is not None:
        exact += residual.double()
    out = poisoned(rows, n, dtype=torch.float32 if wide else dtype)
    if residual is not None and not wide:
        out = residual  # overwritten, as a layer does
    config = None if ON_GPU else linear.SkinnyConfig(16, 512, 4)  # few programs: each takes the interpreter long
    got = linear.skinny(x, weight, offset, out=out, gain=gain, eps=EPS, plus=residual, gated=gated, config=config)
    close(got, exact, 4)


@settings(max_examples=12, deadline=None)
@given(
    dtype=DTYPES,
    rows=st.integers(1, few.MOST_FEW),
    size=st.sampled_from([(40, 64), (33, 72), (16, 130), *([(960, 576), (576, 1536)] if ON_GPU else [])]),
    bias=st.booleans(),
    plus=st.booleans(),
    gated=st.booleans(),
    wide=st.booleans(),
)
def test_a_product_of_a_few_rows_with_all_that_is_fused_to_it(
    dtype: torch.dtype,
    rows: int,
    size: tuple[int, int],
    bias: bool,
    plus: bool,
    gated: bool,
    wide: bool,
) -> None:
    n, k = size
    x, weight = randn(rows, k, dtype=dtype), randn((1 + gated) * n, k, dtype=dtype, seed=1) / k**0.5
    offset = randn((1 + gated) * n, dtype=dtype, seed=3) if bias else None
    residual = randn(rows, n, dtype=dtype, seed=4) if plus else None
    exact = x.double() @ weight.double().t()
    exact += 0 if offset is None else offset.double()
    if gated:
        gate, up = exact.chunk(2, 1)
        exact = torch.nn.functional.silu(gate) * up
    exact += 0 if residual is None else residual.double()
    out = poisoned(rows, n, dtype=torch.float32 if wide else dtype)
    if residual is not None and not wide:
        out = residual  # overwritten, as a layer does
    got = few.few(x, weight, offset, out=out, plus=residual, gated=gated)
    close(got, exact, 4)


@settings(max_examples=8, deadline=None)
@given(
    dtype=DTYPES,
    rows=st.integers(1, 400 if ON_GPU else 70),
    size=st.sampled_from([(40, 64), (64, 72), (33, 130), *([(4096, 4096)] if ON_GPU else [])]),
    bias=st.booleans(),
    plus=st.booleans(),
)
def test_a_product_in_tiles(dtype: torch.dtype, rows: int, size: tuple[int, int], bias: bool, plus: bool) -> None:
    n, k = size
    x, weight = randn(rows, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1) / k**0.5
    offset = randn(n, dtype=dtype, seed=2) if bias else None
    residual = randn(rows, n, dtype=dtype, seed=3) if plus else None
    exact = x.double() @ weight.double().t()
    exact += 0 if offset is None else offset.double()
    exact += 0 if residual is None else residual.double()
    out = poisoned(rows, n, dtype=dtype) if residual is None else residual
    close(linear.tiles(x, weight, offset, out=out, plus=residual), exact, 2)


@pytest.mark.parametrize("rows", [1, 3, 65])
@pytest.mark.parametrize("config", [linear.FIXED_FEW, linear.FIXED_MANY], ids=["few", "many"])
def test_a_row_does_not_depend_on_the_number_of_rows(rows: int, config: linear.TileConfig) -> None:
    x, weight = randn(65, 96, dtype=torch.bfloat16), randn(40, 96, dtype=torch.bfloat16, seed=1)
    whole = linear.tiles(x, weight, None, out=poisoned(65, 40), config=linear.FIXED_FEW)
    part = linear.tiles(x[:rows], weight, None, out=poisoned(rows, 40), config=config)
    if ON_GPU:
        assert torch.equal(part, whole[:rows])
    else:  # the interpreter's products are numpy's, whose sums know no fixed order
        torch.testing.assert_close(part, whole[:rows])


@pytest.mark.parametrize(
    ("n", "k"), [(960, 576), (6144, 4096), (4096, 14336), (128256, 4096), (576, 1536), (2048, 10944), (7, 8)]
)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_configurations_of_skinny_products_keep_their_promises(n: int, k: int, rows: int) -> None:
    for gated in (False, True):
        config = linear.skinny_config(n, k, rows, gated)
        tiles = (1 + gated) * rows * config.block_n * config.block_k
        assert tiles <= 64 * 32 * config.warps  # float32 sums that a thread holds
        assert -(-n // config.block_n) >= min(n, 264)
        assert config.block_k * -(-k // config.block_k) < 2 * k
