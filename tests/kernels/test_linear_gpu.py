"""The public products on CUDA: every path against float64, the bits of deterministic ones, graphs, and what is never synchronised."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep_kernels.linear import Layout, linear, pack
from lockstep_kernels.rms_norm import Norm
from lockstep_kernels.swiglu import pack_gate_up, swiglu
from tests.kernels.device import poisoned, randn, requires_gpu

pytestmark = [requires_gpu, pytest.mark.gpu]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
EPS = 1e-5


def summed(k: int) -> float:
    """By how much float32 may err in a sum of k products that comes to about 1, added one after the other, times up to 4.

    The sum of j products is about sqrt(j / k), and adding the next rounds it by up to 2^-24 of itself, which is evenly spread:
    in all sqrt(k / 6) * 2^-24. The largest of a million such errors is some six times that.
    """
    return 4 * 6 * math.sqrt(k / 6) * 2**-24


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 16, 64, 129, 513])
@pytest.mark.parametrize(("n", "k"), [(960, 576), (576, 1536), (1000, 4096)])
def test_products(dtype: torch.dtype, deterministic: bool, rows: int, n: int, k: int) -> None:
    x, weight = randn(rows, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1) / k**0.5
    bias, norm = randn(n, dtype=dtype, seed=2), Norm(randn(k, seed=3), EPS)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.gain.double()
    tolerance = max(TOLERANCE[dtype], summed(k))
    for offset in (None, bias):
        packed = pack(weight, offset, deterministic=deterministic)
        added = 0 if offset is None else offset.double()
        exact = wide @ weight.double().t() + added
        residual = randn(rows, n, dtype=dtype, seed=4)
        before = residual.double()
        for got, want in (
            (linear(x, packed), exact),
            (linear(x, packed, plus=residual), exact + before),
            (linear(x, packed, norm=norm), normed @ weight.double().t() + added),
            (linear(x, packed, silu=True), torch.nn.functional.silu(exact)),
            (linear(x, packed, times=x[:, :1].expand(-1, n)), exact * wide[:, :1]),
        ):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
        got = linear(x, packed, wide=True)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 200])
def test_swiglu(dtype: torch.dtype, deterministic: bool, rows: int) -> None:
    x = randn(rows, 576, dtype=dtype)
    gate, up = (randn(1100, 576, dtype=dtype, seed=seed) / 24 for seed in (1, 2))
    biases = [randn(1100, dtype=dtype, seed=seed) for seed in (3, 4)]
    norm = Norm(randn(576, seed=5), EPS)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.gain.double()
    exact = torch.nn.functional.silu(normed @ gate.double().t() + biases[0].double())
    exact = exact * (normed @ up.double().t() + biases[1].double())
    got = swiglu(x, pack_gate_up(gate, up, *biases, deterministic=deterministic), norm=norm)
    torch.testing.assert_close(got.double(), exact, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def test_a_residual_that_is_the_operand_is_left_alone() -> None:
    x = randn(9, 64, dtype=torch.bfloat16)
    before, packed = x.clone(), pack(randn(64, 64, dtype=torch.bfloat16, seed=1))
    for rows in (1, 9):
        got = linear(x[:rows], packed, plus=x[:rows])
        torch.testing.assert_close(got, linear(x[:rows], packed) + x[:rows], rtol=2**-6, atol=2**-6)
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(960, 576), (6144, 4096), (576, 1536), (2048, 10944)])
def test_bits_of_deterministic_products_do_not_depend_on_the_number_of_rows(n: int, k: int, dtype: torch.dtype) -> None:
    packed = pack(randn(n, k, dtype=dtype, seed=1) / k**0.5, randn(n, dtype=dtype, seed=2), deterministic=True)
    assert packed.layout is Layout.TILES
    x, residual, norm = randn(300, k, dtype=dtype), randn(300, n, dtype=dtype, seed=3), Norm(randn(k, seed=4), EPS)
    whole = linear(x, packed, norm=norm, plus=residual.clone())
    logits = linear(x, packed, wide=True)
    for rows in range(1, 301):
        first = 300 - rows
        part = linear(x[first:], packed, norm=norm, plus=residual[first:].clone())
        assert torch.equal(part, whole[first:]), f"{rows} rows"
        assert torch.equal(linear(x[:rows], packed, wide=True), logits[:rows]), f"{rows} rows"


@pytest.mark.parametrize("rows", [1, 4, 8, 64])
def test_a_captured_layer_gives_what_it_gives_outside(rows: int) -> None:
    """Launches that may overlap (see `lockstep_kernels.dependent`) still see each other's results."""
    k, inner = 576, 1536
    norm = Norm(randn(k, seed=1), EPS)
    both = pack_gate_up(*(randn(inner, k, dtype=torch.bfloat16, seed=seed) / 24 for seed in (2, 3)))
    down = pack(randn(k, inner, dtype=torch.bfloat16, seed=4) / 40)
    given = randn(rows, k, dtype=torch.bfloat16, seed=5)
    out = poisoned(rows, k, dtype=torch.bfloat16)

    def layers() -> None:
        hidden = given.clone()
        for _ in range(20):
            hidden = linear(swiglu(hidden, both, norm=norm), down, plus=hidden)
        out.copy_(hidden)

    layers()
    want = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for _ in range(50):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
