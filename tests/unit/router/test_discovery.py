"""Schedulers in Redis: found, kept while Redis is away, dropped when gone and idle."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import fakeredis
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from lockstep_router import discovery
from lockstep_router.discovery import Links, RedisRegistry, addresses
from lockstep_router.fleet import Fleet


def record(address: str, model: str = "tiny") -> str:
    return json.dumps({"address": address, "model": model})


def test_records_of_other_models_and_nonsense_are_passed_over() -> None:
    records = {
        "a": record("h:1"), "b": record("h:2", "other"), "c": record("h:3", ""), "d": "{", "e": "[]", "f": '{"model": "x"}',
        "g": json.dumps({"address": 5}), "h": record("no-port"), "i": record("h:1"),
    }  # fmt: skip
    assert addresses(records, {"tiny"}) == ["h:1", "h:3"]


class Session:
    """A link that only exists."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.in_flight = 0
        self.connected = True

    async def run(self) -> None:
        await asyncio.Event().wait()


async def test_links_follow_what_is_found() -> None:
    fleet, made = Fleet(), []

    def connect(address: str) -> Any:
        made.append(address)
        return Session(address)

    def known() -> set[str]:
        return {link.address for link in fleet.links}

    links = Links(fleet, connect, ["fixed:1"])
    assert known() == {"fixed:1"}
    links.update(["a:1", "fixed:1"])
    links.update(["a:1", "b:1"])
    assert known() == {"fixed:1", "a:1", "b:1"} and made == ["fixed:1", "a:1", "b:1"]
    links.update(["b:1"])
    assert "a:1" in known(), "a session that stands is not cut because a record is late"
    [gone] = [link for link in fleet.links if link.address == "a:1"]
    gone.connected, gone.in_flight = False, 1  # type: ignore[misc]
    links.update(["b:1"])
    assert "a:1" in known(), "requests still wait for it"
    gone.in_flight = 0  # type: ignore[misc]
    links.update(["b:1"])
    assert known() == {"fixed:1", "b:1"}
    await links.close()


async def test_a_redis_that_goes_away_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "SCAN_SECONDS", 0.001)
    registry = RedisRegistry("redis://nowhere:1", {"tiny"})
    registry._redis = fakeredis.FakeAsyncRedis(decode_responses=True)
    await registry._redis.set("lockstep:scheduler:s0", record("h:1"))
    await registry._redis.set("unrelated", "x")
    found: list[Any] = []
    task = asyncio.create_task(registry.watch(found.append))
    while not found:
        await asyncio.sleep(0.001)
    assert found[0] == ["h:1"] and not registry.away

    async def away() -> Any:
        raise RedisConnectionError

    monkeypatch.setattr(registry, "_records", away)
    while not registry.away:
        await asyncio.sleep(0.001)
    count = len(found)
    await asyncio.sleep(0.01)
    assert len(found) == count, "the last known set stays"
    monkeypatch.undo()
    task.cancel()
    await registry.close()
