"""Placement: only ready groups, the least loaded, ties in turn; what was sent counts before a snapshot shows it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_common.errors import Unavailable
from lockstep_router.fleet import Fleet, Load
from lockstep_router.policy import GroupView, choose
from tests.unit.router.build import ScriptedLink

views = st.builds(
    GroupView,
    ready=st.booleans(),
    running=st.integers(0, 64),
    waiting=st.integers(0, 64),
    max_running=st.integers(0, 64),
    waiting_uncached_tokens=st.integers(0, 5000),
    kv_usage=st.floats(0, 1),
    sent_choices=st.integers(0, 64),
    sent_tokens=st.integers(0, 5000),
)


@given(groups=st.lists(views, max_size=6), rotation=st.integers(0, 100))
def test_the_choice_is_a_ready_group_that_no_ready_group_beats(groups: list[GroupView], rotation: int) -> None:
    index = choose(groups, rotation=rotation)
    ready = [group for group in groups if group.ready]
    if not ready:
        assert index is None
        return
    assert index is not None and groups[index].ready
    assert groups[index].cost == min(group.cost for group in ready)


@given(count=st.integers(1, 6), rotation=st.integers(0, 50))
def test_equal_groups_take_turns(count: int, rotation: int) -> None:
    groups = [GroupView(ready=True)] * count
    assert [choose(groups, rotation=rotation + i) for i in range(count)] == [
        (rotation + i) % count for i in range(count)
    ]


def send(groups: list[GroupView], tokens: int, number: int) -> int:
    """Places one request and counts it as sent."""
    index = choose(groups, rotation=number)
    assert index is not None
    group = groups[index]
    groups[index] = replace(group, sent_choices=group.sent_choices + 1, sent_tokens=group.sent_tokens + tokens)
    return index


@pytest.mark.parametrize("tokens", [20, 4000])
def test_a_burst_between_two_snapshots_is_even(tokens: int) -> None:
    groups = [GroupView(ready=True, max_running=64)] * 4
    counts = Counter(send(groups, tokens, i) for i in range(64))
    assert all(abs(count - 16) <= 1 for count in counts.values()) and len(counts) == 4


def test_an_idle_group_beats_one_with_a_queue() -> None:
    groups = [
        GroupView(ready=True, max_running=8, running=8, waiting=50, waiting_uncached_tokens=9000),
        GroupView(ready=True, max_running=8),
    ]
    assert Counter(send(groups, 50, i) for i in range(100))[1] > 60


def test_a_group_whose_kv_cache_is_full_gets_the_short_requests_last() -> None:
    groups = [GroupView(ready=True, max_running=64, running=1, kv_usage=0.9), GroupView(ready=True, max_running=64)]
    assert [send(groups, 20, i) for i in range(50)] == [1] * 50


def test_a_fleet_takes_no_group_that_is_away_draining_or_tried() -> None:
    good, away = ScriptedLink(address="a:1"), ScriptedLink(address="b:1", connected=False)
    draining = ScriptedLink(address="c:1", load=Load(ready=True, draining=True, max_running=8))
    fleet = Fleet([draining, away, good])
    assert {fleet.place().address for _ in range(6)} == {"a:1"} and fleet.ready
    with pytest.raises(Unavailable, match="no engine group is ready"):
        fleet.place(without=[good])
    good.load = Load(ready=False)
    assert not fleet.ready


def test_limits_are_the_smallest_groups_and_outlive_it() -> None:
    fleet = Fleet([ScriptedLink(facts=None)])
    with pytest.raises(Unavailable):
        fleet.limits()
    one, two = ScriptedLink(), ScriptedLink()
    assert two.facts is not None
    two.facts = replace(two.facts, max_model_len=64, max_choices=2)
    fleet.links[:] = [one, two]
    assert (fleet.limits().max_model_len, fleet.limits().max_choices) == (64, 2)
    fleet.links[:] = []
    assert fleet.limits().max_model_len == 64
