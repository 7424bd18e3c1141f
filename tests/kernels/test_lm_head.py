"""lm_head against float64, with weights that float16 cannot hold too, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch

from lockstep_kernels.linear import Packed
from lockstep_kernels.lm_head import lm_head, pack_head, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "width"), [(1000, 576), (257, 64), (33, 7)])
def test_matches_float64(vocab: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(vocab, width) / width**0.5).to(dtype)
    head = pack_head(weight)
    for rows in (0, 1, 2, 9):
        hidden = torch.randn(rows, width).to(dtype)
        logits = lm_head(hidden, head)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, reference.lm_head(hidden, weight), rtol=1e-5, atol=1e-5)
        exact = hidden.double() @ weight.double().T
        torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_weight_beyond_float16_keeps_its_range() -> None:
    weight = torch.randn(40, 16).bfloat16()
    weight[3, 5] = 1e6
    head = pack_head(weight)
    assert isinstance(head, Packed)
    logits = lm_head(torch.ones(2, 16).bfloat16(), head)
    assert logits[:, 3].min() > 9e5


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [576, 1536, 100])
def test_a_row_does_not_depend_on_its_neighbours(width: int, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(1)
    head = pack_head((torch.randn(900, width) / width**0.5).to(dtype))
    hidden = torch.randn(70, width).to(dtype)
    whole = lm_head(hidden, head)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for start, end in [(i, i + n) for n in (1, 2, 3, 5, 6, 7, 8, 14, 15, 33) for i in (0, 17, 37)]:
            assert torch.equal(lm_head(hidden[start:end], head), whole[start:end])
    finally:
        torch.set_num_threads(before)


def test_hidden_states_that_do_not_fit_are_refused() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=r"hidden has shape \(2, 7\), expected \(2, 8\)"):
            lm_head(torch.ones(2, 7, dtype=dtype), pack_head(torch.ones(4, 8, dtype=dtype)))
