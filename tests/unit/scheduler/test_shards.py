"""What the shards of a group tell each other: nothing is lost on the wire, and nothing stale or foreign is counted."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from lockstep_common import rpc
from lockstep_common.clock import ManualClock
from lockstep_common.errors import ConfigError, Conflict, DeadlineExceeded, InvalidRequest, LockstepError, Unavailable
from lockstep_common.steps import ExpertLoads, Header, Kind, KvGroup, WorkerFacts
from lockstep_proto.v1 import scheduler_pb2
from lockstep_scheduler.client import read_facts, read_header, read_loads, write_header, write_loads
from lockstep_scheduler.config import SchedulerConfig
from lockstep_scheduler.polls import Ballot
from lockstep_scheduler.settings import Group
from lockstep_scheduler.shards import Hub, _Link
from lockstep_scheduler.vote import Position, Rules, Vote

SHARDS = ("a:1", "b:2", "c:3")
RANKS = [range(1), range(1, 2), range(2, 4)]


def config(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"workers": ("w:1", "w:2", "w:3", "w:4"), "shards": SHARDS} | changes)


def unlike_the_default(cls: type[Any], **given: Any) -> Any:
    """A value in whose every field stands something else than its default, so that a field which a conversion forgets shows."""
    made = dict(given)
    for number, field in enumerate(dataclasses.fields(cls), 5):
        kinds = {
            "int": number,
            "str": f"text {number}",
            "bool": field.default is not True,
            "tuple[int, ...]": (number, 1),
        }
        made.setdefault(field.name, kinds.get(str(field.type)))
        assert made[field.name] is not None and made[field.name] != field.default, f"no value for {field.name}"
    return cls(**made)


def test_a_header_and_facts_come_as_they_went() -> None:
    header = unlike_the_default(Header, kind=Kind.PREFILL)
    facts = unlike_the_default(WorkerFacts, groups=(KvGroup("full", 16, 99, "fp8"),))
    assert read_header(write_header(header)) == header
    assert read_facts(rpc.write_facts(facts)) == facts
    loads = ExpertLoads(np.array([[1, 2]], np.uint32), np.array([[3, 4]], np.uint32), 5)
    found = read_loads(write_loads(loads))
    assert found.prefill.tolist() == [[1, 2]] and found.decode.tolist() == [[3, 4]] and found.steps == 5


class Coordinator:
    """A hub whose shards are links without streams, and what it said to the supervisor."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.hub = Hub(config(), self.clock)
        self.lost: list[LockstepError] = []
        self.own: list[tuple[int, Header | None]] = []
        self.loads: list[int] = []
        self.hub.lose = self.lost.append
        self.hub.own = lambda number, header, waited: self.own.append((number, header))
        self.hub.loads = lambda seq, loads: self.loads.append(seq)
        self.links = {shard: _Link() for shard in (1, 2)}
        self.hub._links.update(self.links)

    async def form(self, epoch: int = 7) -> None:
        facts = WorkerFacts("m", "h", "cpu", "float32", 9, 8, 7, 6, (KvGroup("full", 16, 99),), True, True)
        for link in self.links.values():
            link.started = epoch
        self.polls = await self.hub.formed(Group(epoch, 2, 4, facts, 8, 64), RANKS, ["w:1", "w:2", "w:3", "w:4"], 0.0)
        for link in self.links.values():
            assert self.told(link)[0].formed.epoch == epoch

    def told(self, link: _Link) -> list[scheduler_pb2.FromCoordinator]:
        return [link._outgoing.get_nowait() for _ in range(link._outgoing.qsize())]

    async def say(self, shard: int, **message: Any) -> None:
        async def one() -> Any:
            yield scheduler_pb2.FromShard(**message)

        await self.hub._read(shard, self.links[shard], one())


def votes(shard: int, number: int = 1, epoch: int = 7, term: int = 2, want: bool = False) -> scheduler_pb2.Ballot:
    ranks = [scheduler_pb2.RankVote(rank=rank, want=want, chunk_tokens=5 * want) for rank in RANKS[shard]]
    return scheduler_pb2.Ballot(epoch=epoch, term=term, round=number, seq=1, votes=ranks)


async def test_each_shard_hears_of_its_own_part() -> None:
    found = Coordinator()
    link = found.links[2]
    link.started = found.links[1].started = 7
    facts = WorkerFacts("m", "h", "cpu", "float32", 9, 8, 7, 6, (KvGroup("full", 16, 99),), True, True)
    await found.hub.formed(Group(7, 2, 4, facts, 8, 64), RANKS, ["w:1", "w:2", "w:3", "w:4"], 0.0)
    [message] = found.told(link)
    assert message.formed.first_rank == 2 and list(message.formed.drivers) == ["w:3", "w:4"] and message.formed.dp == 4
    assert read_facts(message.formed.facts) == facts


async def test_a_round_is_called_counted_and_told_with_the_same_bytes() -> None:
    found = Coordinator()
    await found.form()
    await found.say(1, ballot=votes(1, want=True))
    assert not found.own, "the others first"
    await asyncio.sleep(0)
    assert found.own == [(1, None)], "the coordinator's own loop is called"
    assert [m.call.round for m in found.told(found.links[2])] == [1] and not found.told(found.links[1])
    assert found.polls.cast(_own(), Position(7, 1, 0), Rules(1, 2, 8), 0.0) is None
    await found.say(2, ballot=votes(2))
    [first], [second] = found.told(found.links[1]), found.told(found.links[2])
    assert first.agreement.header == second.agreement.header
    header = read_header(first.agreement.header)
    await asyncio.sleep(0)
    assert header.kind is Kind.PREFILL and header.micro_chunks == (5,) and found.own[-1] == (1, header)
    await found.say(1, ballot=votes(1, want=True))
    [again] = found.told(found.links[1])
    assert again == first and not found.told(found.links[2]) and not found.lost


def _own() -> Ballot:
    return Ballot(1, 1, [Vote(0, False, 0, 0, 0, 0)])


async def test_what_is_stale_is_not_counted_and_a_wrong_term_costs_the_group() -> None:
    found = Coordinator()
    await found.form()
    await found.say(1, ballot=votes(1, epoch=6))
    await found.say(1, lost=scheduler_pb2.GroupLost(epoch=6))
    await found.say(1, loads=scheduler_pb2.RankLoads(epoch=6, seq=3))
    assert not found.lost and not found.loads and not found.polls.tally.round.ballots
    await found.say(1, ballot=votes(1, term=1))
    assert "scheduler shard 1 (b:2) votes under term 1" in found.lost[0].message
    await found.say(2, ballot=votes(1))
    assert "scheduler shard 2 (c:3) votes for dp rank(s) (1,)" in found.lost[1].message
    with pytest.raises(InvalidRequest, match="no message 'join' after Join"):
        await found.say(1, join=scheduler_pb2.Join(shard=1))


async def test_a_shard_that_gives_up_says_why_and_the_others_hear_it() -> None:
    found = Coordinator()
    await found.form()
    why = scheduler_pb2.GroupLost(epoch=7)
    why.why.code, why.why.message = "unavailable", "worker w:2 is gone"
    await found.say(1, lost=why)
    [error] = found.lost
    assert isinstance(error, Unavailable) and error.message == "scheduler shard 1 (b:2): worker w:2 is gone"
    found.hub.ended(error)
    [told] = found.told(found.links[2])
    assert told.lost.epoch == 7 and "worker w:2 is gone" in told.lost.why.message
    found.hub.ended(error)
    assert not found.told(found.links[2]), "a group ends once"


async def test_who_is_missing_is_named() -> None:
    found = Coordinator()
    del found.hub._links[2]
    with pytest.raises(DeadlineExceeded, match=r"not joined within 0 s: scheduler shard 2 \(c:3\)"):
        await found.hub.complete(0.0)
    found.hub._links[2] = found.links[2]
    found.links[1].started = 7
    facts = WorkerFacts("m", "h", "cpu", "float32", 9, 8, 7, 6, (KvGroup("full", 16, 99),), True, True)
    with pytest.raises(DeadlineExceeded, match=r"not started in epoch 7 within 0 s: scheduler shard 2 \(c:3\)"):
        await found.hub.formed(Group(7, 2, 4, facts, 8, 64), RANKS, ["w:1", "w:2", "w:3", "w:4"], 0.0)


def test_a_shard_must_be_started_as_the_coordinator_was() -> None:
    hub = Hub(config(), ManualClock())

    def join(shard: int, **changes: Any) -> scheduler_pb2.FromShard:
        settings = config(shard=shard, **changes).agreed
        return scheduler_pb2.FromShard(join=scheduler_pb2.Join(shard=shard, settings=settings))

    assert hub._admit(join(2)) == 2
    assert hub._admit(join(1, workers=("w:4", "w:3", "w:2", "w:1"))) == 1, "the order of workers is their own"
    with pytest.raises(Conflict, match=r"same max_num_seqs: scheduler shard 1 \(b:2\) has '5', the coordinator '0'"):
        hub._admit(join(1, max_num_seqs=5))
    with pytest.raises(Conflict, match="same workers"):
        hub._admit(join(1, workers=("w:1",)))
    with pytest.raises(Conflict, match="shard 0 has no place"):
        hub._admit(join(0))
    with pytest.raises(InvalidRequest, match="must be Join"):
        hub._admit(scheduler_pb2.FromShard())


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"shard": 3}, "no place"), ({"shard": -1}, "no place"), ({"shards": ("a:1", "a:1")}, "twice"), ({"vote_timeout": 0.0}, "above 0")],
)  # fmt: skip
def test_settings_that_make_no_group_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config(**changes)
