"""Who takes which rank of a group."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_common.errors import ConfigError
from lockstep_common.steps import WorkerFacts
from lockstep_scheduler.__main__ import loop_settings
from lockstep_scheduler.config import SchedulerConfig
from lockstep_scheduler.group import agreed_limit, seats


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


@given(wanted=st.integers(0, 20), able=st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_a_limit_is_what_is_wanted_or_the_workers_least_and_never_above_any(wanted: int, able: list[int]) -> None:
    addresses = [f"w{i}" for i in range(len(able))]
    if wanted > min(able):
        with pytest.raises(ConfigError, match=f"max_num_seqs {wanted} is more than worker w{able.index(min(able))} "):
            agreed_limit("max_num_seqs", wanted, addresses, able)
    else:
        assert agreed_limit("max_num_seqs", wanted, addresses, able) == (wanted or min(able))


def test_a_limit_above_the_workers_names_both_options() -> None:
    with pytest.raises(ConfigError) as raised:
        agreed_limit("max_num_batched_tokens", 8192, ["a:1", "b:2"], [8192, 2048])
    assert "lower --max-num-batched-tokens of the scheduler to 2048 or less" in raised.value.message
    assert "start the worker with --max-num-batched-tokens 8192" in raised.value.message


def test_limits_are_left_to_the_workers_unless_they_are_set() -> None:
    config = SchedulerConfig(workers=("a:1",))
    assert (config.max_num_seqs, config.max_num_batched_tokens, loop_settings(config).max_batched_tokens) == (0, 0, 0)
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        with pytest.raises(ConfigError, match=f"{name} must not be negative"):
            SchedulerConfig(workers=("a:1",), **{name: -1})


@pytest.mark.parametrize("wanted", [0, 64])
def test_a_worker_without_room_for_anything_is_named(wanted: int) -> None:
    with pytest.raises(ConfigError, match="worker b:2 reports max_num_seqs 0"):
        agreed_limit("max_num_seqs", wanted, ["a:1", "b:2"], [64, 0])
