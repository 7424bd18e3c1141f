"""`bench kernels` without a GPU: which ops, and what becomes of a case that fails."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from lockstep_bench import kernels
from lockstep_bench.commands.kernels import chosen, measured
from lockstep_bench.kernels import Case, Measured
from lockstep_common.errors import ConfigError


def case(name: str) -> Case:
    return Case(name, [], 1.0)


def timed(case: Case, **options: Any) -> Measured:
    if "broken" in case.name:
        raise RuntimeError("illegal memory access")
    return Measured(case.name, 2.0, 3.0, 4.0, 0.5, None)


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("lockstep_bench.kernels.toy")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kernels, "measure", timed)
    return module


def test_ops_are_those_asked_for_or_all() -> None:
    assert chosen(["a", "b"], []) == ["a", "b"] and chosen(["a", "b"], ["b", "a"]) == ["b", "a"]
    with pytest.raises(ConfigError, match="no cases for c; there are a, b"):
        chosen(["a", "b"], ["c", "a"])


def test_a_failing_case_does_not_stop_the_others(op: ModuleType) -> None:
    op.cases = lambda: iter([case("good"), case("broken"), case("fine")])  # type: ignore[attr-defined]
    found = dict(measured("toy", ""))
    assert (
        found["good"] == found["fine"] == {"us": 2.0, "gb_per_s": 3.0, "tflop_per_s": 4.0, "share": 0.5, "error": None}
    )
    assert isinstance(found["broken"], RuntimeError)
    assert list(dict(measured("toy", "oo"))) == ["good"]


def test_cases_that_cannot_be_made_are_one_failure(op: ModuleType) -> None:
    def cases() -> Iterator[Case]:
        yield case("good")
        raise ValueError("no such shape")

    op.cases = cases  # type: ignore[attr-defined]
    good, failure = measured("toy", "")
    assert good[0] == "good" and failure[0] == "cases" and isinstance(failure[1], ValueError)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from lockstep_bench.__main__ import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["kernels"]) == 1 and "CUDA device" in capsys.readouterr().err
