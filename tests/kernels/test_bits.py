"""The probe of what this CPU keeps: it finds nothing where nothing is wrong, and what is wrong where something is."""

from __future__ import annotations

import pytest
import torch

from lockstep_kernels import attention, linear
from lockstep_kernels.bits import differing_ops
from tests.kernels.device import CPU_DIFFERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_finds_what_the_tests_skip(dtype: torch.dtype) -> None:
    assert set(differing_ops(dtype)) <= set(CPU_DIFFERS)


def test_it_finds_attention_that_depends_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = attention.cpu.attention

    def uneven(q: torch.Tensor, *others: object) -> None:
        compute(q if len(q) > 1 else q * (1 + 2**-20), *others)  # type: ignore[arg-type]

    monkeypatch.setattr(attention.cpu, "attention", uneven)
    assert "attention" in differing_ops(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_finds_products_that_depend_on_the_number_of_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = linear.cpu.linear

    def uneven(x: torch.Tensor, *others: object) -> torch.Tensor:
        y = compute(x, *others)  # type: ignore[arg-type]
        return y if len(x) < 17 else y * (1 + 2**-7)

    monkeypatch.setattr(linear.cpu, "linear", uneven)
    assert "products" in differing_ops(dtype)
