"""The placement that workers load and schedulers assume."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_common.errors import ConfigError
from lockstep_common.experts import initial_placement


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 20))
def test_every_expert_has_a_slot_on_the_rank_of_its_share(experts: int, ranks: int, more: int) -> None:
    slots = (-(-experts // ranks) + more) * ranks
    placement = initial_placement(experts, slots, ranks)
    assert placement.shape == (slots,) and placement.dtype == np.uint32
    for rank, held in enumerate(placement.reshape(ranks, -1).tolist()):
        share = range(rank * experts // ranks, (rank + 1) * experts // ranks)
        assert held[: len(share)] == list(share)
        assert len(set(held)) == min(len(held), experts)
    assert set(placement.tolist()) == set(range(experts))


@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 20))
def test_equal_loads_are_spread_equally(share: int, ranks: int, more: int) -> None:
    placement = initial_placement(share * ranks, (share + more) * ranks, ranks)
    per_rank = (1.0 / np.bincount(placement))[placement].reshape(ranks, -1).sum(1)
    assert per_rank == pytest.approx(np.full(ranks, share))


def test_without_redundant_slots_slot_p_holds_expert_p() -> None:
    assert initial_placement(8, 8, 4).tolist() == list(range(8))
    assert initial_placement(8, 12, 4).tolist() == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 0]


@pytest.mark.parametrize(("experts", "slots", "ranks"), [(8, 9, 4), (8, 4, 4), (8, 8, 0)])
def test_what_cannot_be_placed_is_said(experts: int, slots: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match="expert slots"):
        initial_placement(experts, slots, ranks)
