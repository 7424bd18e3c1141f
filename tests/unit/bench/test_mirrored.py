"""The goals of `lockstep bench cp`, and the pass that it measures."""

from __future__ import annotations

import pytest

from lockstep_bench import mirrored
from lockstep_kernels.prepare import Share


def row(ranks: int, pairs: float, seconds: float) -> dict[str, float]:
    return {"ranks": ranks, "pairs (M)": pairs, "a chunk's (M)": 2.0, mirrored.COLUMNS[0]: seconds}


@pytest.mark.parametrize(
    ("pairs", "seconds", "met"), [((5.0, 5.0), 0.6, [True, True]), ((4.0, 6.1), 0.61, [False, False])]
)
def test_goals_look_at_the_worst_rank(pairs: tuple[float, float], seconds: float, met: list[bool]) -> None:
    rows = [row(1, 10.0, 1.0), row(2, pairs[0], 0.4), row(2, pairs[1], seconds)]
    assert [goal.met for goal in mirrored.goals(rows)] == met


def test_without_one_rank_there_is_nothing_to_compare_with() -> None:
    assert [goal.met for goal in mirrored.goals([row(2, 5.0, 0.4), row(2, 5.0, 0.5)])] == [True, None]


def test_a_rank_stores_its_share_of_the_prompt() -> None:
    settings = mirrored.Settings(tokens=100)
    stored = [(mirrored._inputs(settings, Share(2, rank))[0].slots[0] > 0).sum().item() for rank in (0, 1)]
    assert stored == [52, 48]
