"""rms_norm against float64, and the same bits for a row whatever stands beside it."""

from __future__ import annotations

import pytest
import torch

from lockstep_kernels.rms_norm import rms_norm


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (3, 576), (7, 33), (2, 5, 64)])
def test_matches_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[1:])
    y = rms_norm(x, weight, 1e-5)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(y.double(), exact(x, weight, 1e-5), rtol=tolerance, atol=tolerance)
    assert y.dtype == dtype and y.is_contiguous()


def test_eps_counts_for_small_rows_and_the_input_stays() -> None:
    x = torch.full((2, 16), 1e-4)
    before = x.clone()
    torch.testing.assert_close(rms_norm(x, torch.ones(16), 1e-5), x / (1e-8 + 1e-5) ** 0.5)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(300, 577).to(dtype), torch.randn(577)
    whole = rms_norm(x, weight, 1e-6)
    for start, end in ((0, 1), (5, 7), (100, 109), (0, 299), (299, 300)):
        assert torch.equal(rms_norm(x[start:end], weight, 1e-6), whole[start:end])


def test_a_gain_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(7,\), expected \(8,\)"):
        rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5)
