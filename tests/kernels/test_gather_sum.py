"""Sums of chosen rows: the reference against float64, the kernel against the reference bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels.gather_sum import gather_sum, reference
from tests.kernels.device import DEVICE

from lockstep_kernels.gather_sum import kernel  # isort: skip  (after tests.kernels.device)

DTYPES = [torch.float32, torch.bfloat16]


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 9),
    rows=st.integers(1, 12),
    chosen=st.integers(1, 5),
    hidden=st.sampled_from([1, 48, 130, 1100]),
    dtype=st.sampled_from(DTYPES),
    adds=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rows_are_added_in_their_order(
    tokens: int, rows: int, chosen: int, hidden: int, dtype: torch.dtype, adds: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    index = torch.randint(-1, rows, (tokens, chosen), dtype=torch.int32)
    x, plus = torch.randn(rows, hidden).to(dtype), torch.randn(tokens, hidden).to(dtype) if adds else None
    x = torch.cat((x, torch.full((1, hidden), torch.nan, dtype=dtype)))  # a row that nobody chose
    got = reference.gather_sum(x, index, plus)
    want = torch.zeros(tokens, hidden, dtype=torch.float64) if plus is None else plus.double()
    for t, chosen_rows in enumerate(index.tolist()):
        for row in chosen_rows:
            want[t] += x[row].double() if row >= 0 else 0
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    assert got.dtype == dtype and torch.equal(gather_sum(x, index, plus=plus), got)
    moved = (t if t is None else t.to(DEVICE) for t in (x, index, plus))
    assert torch.equal(kernel.gather_sum(*moved, pdl=False).cpu(), got)  # type: ignore[arg-type]


def test_operands_that_do_not_fit_are_refused() -> None:
    rows, index = torch.ones(3, 4), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"index is torch.int64"):
        gather_sum(rows, index.long())
    with pytest.raises(ValueError, match="rows must be contiguous"):
        gather_sum(rows.T, index)
    with pytest.raises(ValueError, match=r"plus has shape \(3, 4\)"):
        gather_sum(rows, index, plus=rows)
    with pytest.raises(ValueError, match=r"plus must be contiguous and torch.float32"):
        gather_sum(rows, index, plus=rows[:2].bfloat16())
