"""The cases of `bench kernels cp` do what they say; small, on CPU."""

import pytest
import torch

from lockstep_bench.kernels import Case, cp


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(cp, "MOST_RUNS", 2)


def checked(case: Case) -> Case:
    assert len(case.runs) == 2 and case.bytes > 0
    if case.check is not None:
        assert case.check() < 0.01
    return case


def test_rows_in_natural_order_again() -> None:
    case = checked(cp.mirror_case(24, 4, ranks=3))
    x, _, index = case.runs[0].args  # type: ignore[attr-defined]
    natural = torch.arange(24).view(6, 4)
    x.copy_(natural[[0, 5, 1, 4, 2, 3]].view(24, 1).expand(-1, 4))
    assert torch.equal(case.runs[0](), torch.arange(24.0).bfloat16().view(24, 1).expand(-1, 4))
    assert sorted(index.tolist()) == list(range(24))
    target, source = checked(cp.copy_case(6, 4)).runs[0](), cp.copy_case(6, 4).runs[0].args[0]  # type: ignore[attr-defined]
    assert target.shape == source.shape


def test_tokens_to_experts_and_back() -> None:
    sent = checked(cp.dispatch_case(14, 3, 8)).runs[0]()
    assert sent.shape == (48, 8)
    assert (sent == 0).all(1).sum() == 6  # places that stay empty
    back = checked(cp.combine_case(14, 3, 8)).runs[0]()
    assert back.shape == (14, 8)


def test_merges() -> None:
    out, lse = checked(cp.merge_case(3, 5, 2, 8)).runs[0]()
    assert out.shape == (5, 2, 8) and out.dtype == torch.bfloat16 and lse.shape == (5, 2)
    case = checked(cp.piece_case(5, 2, 8))
    outs = case.runs[0].args[0]  # type: ignore[attr-defined]
    assert case.runs[0]()[0].data_ptr() == outs.data_ptr()
