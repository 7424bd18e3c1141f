"""Products of 8-bit weights: exact for the operands they were given, and what quantising costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels.fp8 import BLOCK, E4M3, Fp8Weight, dequantise, reference
from lockstep_kernels.linear import Layout, linear, pack_fp8
from lockstep_kernels.rms_norm import Norm
from lockstep_kernels.swiglu import pack_gate_up_fp8, swiglu
from tests.kernels.device import ON_GPU, poisoned, randn, requires_gpu

from lockstep_kernels.fp8 import kernel  # isort: skip  (after tests.kernels.device)
from lockstep_kernels.linear import kernel as products  # isort: skip

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2**-8, torch.bfloat16: 2**-6}
EPS = 1e-5
FEW_PROGRAMS = None if ON_GPU else products.SkinnyConfig(32, 128, 4)  # as each takes the interpreter long


def weight(n: int, k: int, blocks: bool, seed: int = 1) -> Fp8Weight:
    values = (randn(n, k, seed=seed) * 60).clamp(-448, 448).to(E4M3)
    shape = (-(-n // BLOCK), -(-k // BLOCK)) if blocks else (n,)
    return Fp8Weight(values, (randn(*shape, seed=seed + 1).abs() + 0.1) / 60 / k**0.5)


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * gain.double()


@pytest.mark.parametrize("blocks", [True, False])
def test_a_scale_for_each_block_or_row(blocks: bool) -> None:
    w = weight(130, 300, blocks)
    for i, j in ((0, 0), (127, 127), (128, 0), (129, 299), (5, 256)):
        scale = w.scale[i // BLOCK, j // BLOCK] if blocks else w.scale[i]
        assert dequantise(w, torch.float32)[i, j] == w.values[i, j].float() * scale


def test_scales_that_do_not_fit_are_refused() -> None:
    values = torch.zeros(130, 300, dtype=E4M3)
    with pytest.raises(ValueError, match="scale has shape"):
        Fp8Weight(values, torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"scales torch\.bfloat16"):
        Fp8Weight(values, torch.ones(130, dtype=torch.bfloat16))


@settings(max_examples=8, deadline=None)
@given(
    dtype=DTYPES,
    rows=st.integers(0, 300 if ON_GPU else 3),
    k=st.sampled_from([16, 128, 576, 1500]),
    groups=st.booleans(),
    norm=st.booleans(),
)
def test_operands_are_quantised_by_row_or_group(
    dtype: torch.dtype, rows: int, k: int, groups: bool, norm: bool
) -> None:
    x, gain = randn(rows, k, dtype=dtype), randn(k, seed=1) if norm else None
    if rows:
        x[-1] = 0
    values, scale = kernel.quantise(x, groups, gain=gain, eps=EPS)
    exact = x.double() if gain is None else normed(x, gain)
    _, want = reference.quantise(exact, groups)
    torch.testing.assert_close(scale, want, rtol=1e-5, atol=0)
    wide = scale.double().repeat_interleave(BLOCK, 1)[:, :k] if groups else scale.double()[:, None]
    error = (values.double() * wide - exact).abs()
    assert bool((error <= exact.abs() * 2**-4 + wide * 2**-9).all())  # half an ulp of e4m3, or of its smallest numbers


@settings(max_examples=8, deadline=None)
@given(
    dtype=DTYPES,
    rows=st.integers(1, 300 if ON_GPU else 70),
    size=st.sampled_from([(40, 128), (130, 300), (260, 64), *([(4096, 7168)] if ON_GPU else [])]),
    blocks=st.booleans(),
    bias=st.booleans(),
    plus=st.booleans(),
)
def test_tiles_are_exact_for_their_operands(
    dtype: torch.dtype, rows: int, size: tuple[int, int], blocks: bool, bias: bool, plus: bool
) -> None:
    (n, k), w = size, weight(*size, blocks)
    values, scale = reference.quantise(randn(rows, k), blocks)
    offset = randn(n, dtype=dtype, seed=2) if bias else None
    residual = randn(rows, n, dtype=dtype, seed=3) if plus else None
    exact = reference.product(values.double().to(E4M3), scale, w.values, w.scale).double()
    exact += 0 if offset is None else offset.double()
    exact += 0 if residual is None else residual.double()
    out = poisoned(rows, n, dtype=dtype) if residual is None else residual
    got = kernel.tiles(values, scale, w.values, w.scale, offset, out=out, plus=residual)
    tolerance = TOLERANCE[dtype] * (1 + exact.abs())
    if (
        ON_GPU
    ):  # an instruction cuts its 33 addends some 13 bits below the largest: about 2^-14 of all magnitudes, in the mean
        absolute = reference.product(values.double().abs().to(E4M3), scale, w.values.double().abs().to(E4M3), w.scale)
        tolerance += 2**-11 * absolute.double()
    assert bool(((got.double() - exact).abs() <= tolerance).all())


def product(x: torch.Tensor, w: Fp8Weight) -> torch.Tensor:
    """What a product with a weight of 8 bits is: operands are rounded first."""
    values, scale = reference.quantise(x, w.blocks)
    return reference.product(values, scale, w.values, w.scale).double()


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """But for an operand here and there that lies so near the middle of two e4m3 numbers that it is rounded the other way.
    Rounding itself changes results by 2 to 4 %."""
    off = (got.double() - want).abs()
    return bool((off <= 0.02 * (1 + want.abs())).all() and off.norm() <= 2 * TOLERANCE[dtype] * (1 + want.norm()))


@settings(max_examples=12, deadline=None)
@given(
    dtype=DTYPES,
    rows=st.integers(1, products.MOST_SKINNY),
    size=st.sampled_from([(128, 64), (128, 128), (128, 300)]),
    blocks=st.booleans(),
    norm=st.booleans(),
    gated=st.booleans(),
)
def test_skinny_products_of_8_bit_weights(
    dtype: torch.dtype, rows: int, size: tuple[int, int], blocks: bool, norm: bool, gated: bool
) -> None:
    n, k = size
    w = weight((1 + gated) * n, k, blocks)
    x, gain = randn(rows, k, dtype=dtype), randn(k, seed=4) if norm else None
    x[-1, : k // 2] = 0
    exact = product(x if gain is None else normed(x, gain), w)
    if gated:
        gate, up = exact.chunk(2, 1)
        exact = torch.nn.functional.silu(gate) * up
    out = poisoned(rows, n, dtype=dtype)
    got = products.skinny(
        x, w.values, None, out=out, gain=gain, eps=EPS, gated=gated, weight_scale=w.scale, config=FEW_PROGRAMS
    )
    assert close(got, exact, dtype)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_row_is_rounded_alike_however_many_there_are(blocks: bool) -> None:
    """By the kernel for a few rows, and by those for many."""
    w, x = weight(128, 300, blocks), randn(3, 300, dtype=torch.bfloat16)
    few = products.skinny(x, w.values, None, out=poisoned(3, 128), weight_scale=w.scale, config=FEW_PROGRAMS)
    many = kernel.tiles(*kernel.quantise(x, blocks), w.values, w.scale, None, out=poisoned(3, 128))
    torch.testing.assert_close(few, many, rtol=1e-4, atol=1e-4 if not ON_GPU else 1e-2)
    unrounded = x.double() @ dequantise(w, torch.float64).t()
    assert (many.double() - unrounded).norm() > 0.01 * unrounded.norm()


def test_on_cpu_it_is_the_weight_that_values_and_scales_stand_for() -> None:
    w = weight(130, 300, blocks=True)
    host = Fp8Weight(w.values.cpu(), w.scale.cpu())
    packed = pack_fp8(host, None, torch.float32)
    x = torch.randn(3, 300)
    torch.testing.assert_close(linear(x, packed), x @ dequantise(host, torch.float32).t())


@requires_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 64, 500])
def test_public_products(blocks: bool, deterministic: bool, rows: int) -> None:
    n, k = 640, 1536
    w, norm = weight(n, k, blocks), Norm(randn(k, seed=5), EPS)
    packed = pack_fp8(w, None, torch.bfloat16, deterministic=deterministic)
    assert packed.layout is (Layout.FP8_TILES if deterministic else Layout.FP8)
    x, residual = randn(rows, k, dtype=torch.bfloat16), randn(rows, n, dtype=torch.bfloat16, seed=6)
    exact = product(normed(x, norm.gain), w)
    got = linear(x, packed, norm=norm, plus=residual.clone()).double() - residual.double()
    assert rows == 0 or (got - exact).norm() / exact.norm() < 0.01
    both = pack_gate_up_fp8(w, weight(n, k, blocks, 7), torch.bfloat16, deterministic=deterministic)
    up = product(normed(x, norm.gain), weight(n, k, blocks, 7))
    want = torch.nn.functional.silu(exact) * up
    assert rows == 0 or (swiglu(x, both, norm=norm).double() - want).norm() / want.norm() < 0.01


@requires_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [True, False])
def test_bits_of_deterministic_products_do_not_depend_on_the_number_of_rows(blocks: bool) -> None:
    packed = pack_fp8(weight(640, 1536, blocks), None, torch.bfloat16, deterministic=True)
    x = randn(300, 1536, dtype=torch.bfloat16)
    whole = linear(x, packed)
    for rows in range(1, 301):
        assert torch.equal(linear(x[:rows], packed), whole[:rows]), f"{rows} rows"
