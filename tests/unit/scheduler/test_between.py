"""Between two groups: who may go on in the next one, who has kept a cache that is still known, and what requests end with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.errors import LockstepError
from lockstep_common.steps import KvGroup, WorkerFacts
from lockstep_scheduler.between import Between
from lockstep_scheduler.group import kept_by
from lockstep_scheduler.request import End
from lockstep_scheduler.settings import Group
from tests.scripted_worker import ScriptedEngine
from tests.unit.scheduler.simulation import Simulation

FACTS = WorkerFacts("m", "hash", "cpu", "float32", 100, 64, 8, 0, (KvGroup("full", 4, 64),), True, True)
GROUP = Group(epoch=7, term=1, dp=4, facts=FACTS, max_rows=8, max_model_len=64, ranks=range(1, 4))
WHY = LockstepError("worker 10.0.0.3:8001 is gone")


def lost(written: int = 7) -> Between:
    between = Between(60.0, written=written)
    between.lose(GROUP, WHY, 100.0)
    return between


@given(st.lists(st.sampled_from([0, 6, 7]), min_size=4, max_size=4), st.sampled_from([0, 6, 7]))
def test_a_cache_is_known_if_the_last_plan_that_wrote_to_it_is_the_last_one_sent(kept: list[int], written: int) -> None:
    found = lost(written).kept(replace(GROUP, epoch=9, kept=tuple(kept)))
    assert found == [i for i, rank in enumerate(GROUP.ranks) if kept[rank] == written and written]


@pytest.mark.parametrize(
    "other",
    [
        replace(GROUP, ranks=range(3)),
        replace(GROUP, cp=2),
        replace(GROUP, facts=replace(FACTS, groups=(KvGroup("full", 4, 65),))),
        replace(GROUP, facts=replace(FACTS, groups=(KvGroup("full", 8, 64),))),
        replace(GROUP, facts=replace(FACTS, config_hash="other")),
        replace(GROUP, facts=replace(FACTS, weights_epoch=1)),
    ],
)
def test_a_group_of_another_kind_has_kept_nothing(other: Group) -> None:
    assert lost().kept(replace(GROUP, kept=(7,) * 4)) == [0, 1, 2]
    assert lost().kept(replace(other, kept=(7,) * 4)) == []
    assert Between(60.0, written=7).kept(replace(GROUP, kept=(7,) * 4)) == []


def test_fewer_blocks_of_a_cache_are_still_known() -> None:
    fewer = replace(GROUP, facts=replace(FACTS, groups=(KvGroup("full", 4, 60),)), kept=(7,) * 4)
    assert lost().kept(fewer) == [0, 1, 2] and lost().num_blocks == 64
    assert Between(60.0).num_blocks == 0


@given(seed=st.integers(0, 1000), fewer=st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_requests_go_on_in_a_group_with_fewer_blocks(seed: int, fewer: int) -> None:
    sim = Simulation(dp=2, num_blocks=60, seed=seed)
    requests = [sim.submit(range(i, 3 * i + 9), max_tokens=12) for i in range(5)]
    for _ in range(seed % 30):
        sim.turn()
    sim.lose(WHY)
    sim.form(2, num_blocks=60 - fewer)
    assert all(rank.pool.total == 59 - fewer for rank in sim.loop.ranks)
    sim.run()
    sim.check_answers(requests)


def test_a_dp_rank_has_kept_what_all_its_workers_have() -> None:
    assert kept_by([replace(FACTS, kept_epoch=7)] * 2) == 7
    assert kept_by([replace(FACTS, kept_epoch=7), FACTS]) == 0
    assert kept_by([replace(FACTS, kept_epoch=7), replace(FACTS, kept_epoch=6)]) == 0


def test_the_error_names_who_was_lost_and_what_is_in_the_way() -> None:
    between = lost()
    assert between.reforming and between.overdue(159.9) is None
    error = between.overdue(160.0)
    assert error is not None
    assert error.message == "worker 10.0.0.3:8001 is gone; the group has not formed again within 60 s"
    between.hindered = "worker 10.0.0.3:8001 is rank 0 of 1 x 1"
    error = between.overdue(160.0)
    assert error is not None and error.message.endswith("within 60 s: worker 10.0.0.3:8001 is rank 0 of 1 x 1")
    between.end()
    assert not between.reforming and between.overdue(1e9) is None


def test_requests_of_another_model_end() -> None:
    sim = Simulation(dp=2)
    requests = [sim.submit([1, 2, 3], max_tokens=20), sim.submit([4, 5], max_tokens=20)]
    for _ in range(6):
        sim.turn()
    sim.lose(WHY)
    sim.engines = [
        ScriptedEngine(vocab_size=999, max_model_len=128, num_blocks=64, block_size=4, max_rows=8) for _ in sim.engines
    ]
    sim.form(2)
    for request in requests:
        assert sim.got(request).ends == 1 and "another model" in sim.got(request).error
    sim.check_idle()


def test_requests_end_between_two_groups_as_they_do_within_one() -> None:
    """By a stop string, a client and a deadline; a session that comes back gets what it missed, up to the stop."""
    sim = Simulation()
    stopped, cancelled, late, going = (sim.submit([i + 1] * 5, max_tokens=60) for i in range(4))
    while min(len(sim.got(r).tokens) for r in (stopped, cancelled, late, going)) < 6:
        sim.turn()
    sim.lose(WHY)
    sim.loop.finish(stopped, 0, 4)
    sim.loop.cancel(cancelled)
    late.deadline = sim.clock.now()
    sim.loop.tick()
    assert [sim.got(r).end for r in (stopped, cancelled, late)] == [End.STOP, End.CANCELLED, End.ERROR]
    sim.loop.orphan(1)
    sim.loop.resume(stopped.request_id, 2, 77, {0: 0})
    sim.loop.resume(going.request_id, 1, going.handle, {0: len(sim.got(going).tokens)})
    sim.form(2)
    sim.run()
    sim.check_answers([going])
    assert all(sim.got(r).ends == 1 for r in (stopped, cancelled, late))
    assert sim.received[77, 0].tokens == sim.expected(stopped)[:4]
