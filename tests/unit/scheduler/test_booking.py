"""Runs of a sorted array, as outcomes are grouped by."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep_scheduler.booking import _runs


@given(st.lists(st.integers(0, 9), max_size=30))
def test_runs_are_those_of_numpy(values: list[int]) -> None:
    array = np.sort(np.array(values, np.int64))
    expected = np.unique(array, return_index=True, return_counts=True)
    assert all((mine == theirs).all() for mine, theirs in zip(_runs(array), expected, strict=True))
