"""Who takes which rank of a group."""

from __future__ import annotations

import random

import pytest

from lockstep_common.errors import ConfigError
from lockstep_common.steps import WorkerFacts
from lockstep_scheduler.group import seats


def facts(dp: int = 1, cp: int = 1, rank: int = 0) -> WorkerFacts:
    return WorkerFacts("m", "hash", "cpu", "float32", 100, 64, 8, 0, (), True, False, dp=dp, cp=cp, rank=rank)


def test_workers_for_no_place_take_ranks_in_their_order() -> None:
    assert seats(["a", "b", "c"], [facts()] * 3) == [0, 1, 2]


@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_every_worker_takes_the_rank_it_was_started_for(dp: int, cp: int) -> None:
    ranks = list(range(dp * cp))
    random.Random(dp).shuffle(ranks)
    order = seats([f"w{rank}" for rank in ranks], [facts(dp, cp, rank) for rank in ranks])
    assert [ranks[i] for i in order] == list(range(dp * cp))


@pytest.mark.parametrize(
    "places", [[(2, 1, 0), (2, 1, 0)], [(2, 1, 0)], [(2, 1, 0), (1, 2, 1)], [(1, 2, 0), (1, 2, 1), (1, 2, 1)]]
)
def test_places_that_make_up_no_group_are_named(places: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ConfigError, match=r"w0 is rank 0 of [12] x [12]"):
        seats([f"w{i}" for i in range(len(places))], [facts(*place) for place in places])
