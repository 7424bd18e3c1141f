"""What a group says when its ranks do not do the same: who has not arrived, who is out of step, and where."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from lockstep_worker.collectives import Group, Place
from lockstep_worker.collectives.groups import StoreBoard
from lockstep_worker.collectives.watchdog import Watchdog, first_difference
from lockstep_worker.protocol import GroupLost
from tests.ranks import make_group, run_ranks

DEADLINE_S = 0.3


def watched(group: Group, store: HashStore, reports: dict[int, str]) -> Watchdog:
    """Reports of this rank go to `reports`."""
    rank = group.place.rank
    return Watchdog(
        group.recorder,
        StoreBoard(store),
        rank=rank,
        peers=tuple(f"worker-{r}" for r in range(group.place.size)),
        deadline_s=DEADLINE_S,
        report=lambda message: reports.update({rank: message}),
        together=group.place.share,
    )


def test_a_rank_that_does_not_arrive_is_named_by_all_others_and_costs_them_nothing() -> None:
    store, reports = HashStore(), dict[int, str]()

    def work(group: Group) -> None:
        watchdog = watched(group, store, reports)
        watchdog.start()
        group.begin(3, 1)
        group.world.all_gather("a", torch.zeros(1))
        if group.place.rank == 1:
            time.sleep(4 * DEADLINE_S)
        group.world.all_gather("b", torch.zeros(1))
        watchdog.stop()

    run_ranks(3, 1, work)
    assert set(reports) == {0, 2}
    for report in reports.values():
        assert report.startswith("b (plan 3, step 1, world 1) has waited")
        assert report.endswith("; missing: worker-1")


def test_a_rank_that_skips_a_collective_is_named_with_the_first_difference() -> None:
    store, reports, told = HashStore(), dict[int, str](), threading.Event()

    def work(group: Group) -> None:
        watchdog = watched(group, store, reports)
        watchdog.start()
        group.begin(3, 0)
        names = ["dispatch", "combine", "dispatch"]
        if group.place.rank == 2:
            del names[1]
        for name in names:
            group.world.all_gather(name, torch.zeros(1))
        if group.place.rank == 2:  # its records tell, though it waits in no collective now
            with group.recorder.during("plan, length", "control"):
                told.wait(10)
        elif len(names) == 3:
            told.set()
        watchdog.stop()

    with pytest.raises(GroupLost):  # gloo's own limit: the third collective lacks a rank
        run_ranks(3, 1, work, timeout_s=4 * DEADLINE_S)
    assert {0, 1} <= set(reports)
    for rank in (0, 1):
        assert "out of step: worker-2 had 3.0.world.1.dispatch where this rank had 3.0.world.1.combine" in reports[rank]


def test_a_debug_comparison_finds_what_gloo_would_not() -> None:
    store = HashStore()

    def work(group: Group) -> str:
        group = make_group(store, group.place, board=True)
        group.begin(1, 0)
        group.world.all_gather("a", torch.zeros(1))
        group.compare(1)
        group.begin(2, 0)
        group.world.all_gather("b" if group.place.rank else "a", torch.zeros(1))
        with pytest.raises(GroupLost) as lost:
            group.compare(2)
        return lost.value.message

    first, second = run_ranks(2, 1, work)
    assert (
        first
        == "the collectives of plan 2 are not those of worker-1, which had 2.0.world.0.b where this rank had 2.0.world.0.a"
    )
    assert "worker-0" in second


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_equal_records_do_not_differ_and_a_changed_one_does(names: list[int], data: st.DataObject) -> None:
    keys = [f"1.0.world.{i}.{name}" for i, name in enumerate(names)]
    assert first_difference(keys, keys[data.draw(st.integers(0, len(keys) - 1)) :]) == ""
    if len(keys) > 1:
        at = data.draw(st.integers(1, len(keys) - 1))
        other = [*keys[:at], f"1.0.world.{at}.other", *keys[at + 1 :]]
        assert first_difference(keys, other) == f"had 1.0.world.{at}.other where this rank had {keys[at]}"
        assert first_difference(keys, keys[:at]) == f"is in {keys[at - 1]}, before {keys[-1]}"
        assert first_difference(keys[:at], keys) == f"is in {keys[-1]}, past {keys[at - 1]}"
    assert first_difference(keys, ["9.0.world.0.x"]) == f"is in 9.0.world.0.x, long past or before {keys[-1]}"


def test_nobody_to_compare_with() -> None:
    Group(Place()).compare(1)
