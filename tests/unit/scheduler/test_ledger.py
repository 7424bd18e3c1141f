"""The ledger against a Redis in memory: appends count once, a lower term cannot write, an outage degrades."""

from __future__ import annotations

import asyncio
from typing import Any

import fakeredis
import numpy as np
import pytest

from lockstep_common.steps import Sampling
from lockstep_scheduler import redis_ledger as module
from lockstep_scheduler.redis_ledger import RedisLedger
from lockstep_scheduler.request import Choice, End, Request


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> RedisLedger:
    server = fakeredis.FakeServer()
    monkeypatch.setattr(module.redis, "from_url", lambda url, **options: fakeredis.FakeAsyncRedis(server=server))
    made = RedisLedger("redis://memory", "shard-0", ttl=60)
    made.term = 3
    made.server = server  # type: ignore[attr-defined]
    return made


def request(request_id: str = "r1") -> Request:
    made = Request(request_id, 1, 1, np.array([1, 2, 3], np.uint32), Sampling(), 1, 0, 1, 0.0, 10)
    made.choices = [Choice(made, 0)]
    return made


async def run_once(ledger: RedisLedger) -> None:
    await ledger._flush()


def tokens(*values: int) -> Any:
    return np.array(values, np.uint32)


async def test_record_and_tokens(ledger: RedisLedger) -> None:
    held = request()
    assert await ledger.open(held, 1.0)
    ledger.append(2, [(held.choices[0], 0, tokens(7, 8))])
    ledger.append(3, [(held.choices[0], 2, tokens(9))])
    await run_once(ledger)
    assert ledger.acked == 2, "plan 3 may still report"
    stored = await ledger._redis.get("lockstep:tokens:r1:0")
    assert np.frombuffer(stored, "<u4").tolist() == [7, 8, 9]
    held.choices[0].end = End.STOP
    ledger.end(held.choices[0], 3)
    await run_once(ledger)
    record = await ledger._redis.hgetall("lockstep:request:r1")
    assert record[b"end:0"] == b"stop" and record[b"tokens:0"] == b"3"
    assert 0 < await ledger._redis.ttl("lockstep:request:r1") <= 60


async def test_a_retried_append_counts_once_and_a_gap_never(ledger: RedisLedger) -> None:
    held = request()
    await ledger.open(held, 1.0)
    for offset, values in ((0, (7, 8)), (0, (7, 8)), (4, (1,)), (2, (9,))):
        ledger.append(1, [(held.choices[0], offset, tokens(*values))])
    await run_once(ledger)
    assert np.frombuffer(await ledger._redis.get("lockstep:tokens:r1:0"), "<u4").tolist() == [7, 8, 9]


async def test_an_old_owner_cannot_write(ledger: RedisLedger) -> None:
    held = request()
    await ledger.open(held, 1.0)
    ledger.term = 2
    ledger.append(1, [(held.choices[0], 0, tokens(7))])
    await run_once(ledger)
    assert await ledger._redis.get("lockstep:tokens:r1:0") is None


async def test_an_outage_degrades_and_ends(ledger: RedisLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_AFTER", 0.05)
    held = request()
    await ledger.open(held, 1.0)
    ledger.server.connected = False  # type: ignore[attr-defined]
    ledger.append(2, [(held.choices[0], 0, tokens(7))])
    await run_once(ledger)
    assert not ledger.durable and not await ledger.open(request("r2"), 0.01)
    ledger.append(5, [(held.choices[0], 1, tokens(8))])
    await run_once(ledger)
    assert ledger.acked == 4, "what was forwarded may be forgotten"
    ledger.server.connected = True  # type: ignore[attr-defined]
    await asyncio.sleep(0.06)
    await run_once(ledger)
    assert ledger.durable
    assert np.frombuffer(await ledger._redis.get("lockstep:tokens:r1:0"), "<u4").tolist() == [7, 8]


async def test_the_registry_entry_expires(ledger: RedisLedger) -> None:
    await ledger.register("127.0.0.1:8002", "m")
    assert await ledger._redis.get("lockstep:scheduler:shard-0") == b'{"address": "127.0.0.1:8002", "model": "m"}'
    assert 0 < await ledger._redis.ttl("lockstep:scheduler:shard-0") <= module.REGISTRY_TTL
    await ledger.close()
    assert await fakeredis.FakeAsyncRedis(server=ledger.server).get("lockstep:scheduler:shard-0") is None  # type: ignore[attr-defined]


async def test_a_flush_that_spans_two_epochs_acknowledges_nothing_of_the_new_one(ledger: RedisLedger) -> None:
    held = request()
    await ledger.open(held, 1.0)
    ledger.append(500, [(held.choices[0], 0, tokens(7))])
    write = ledger._write

    async def write_while_the_group_forms_anew(batch: list[tuple[Any, ...]]) -> None:
        ledger.restart()
        await write(batch)

    ledger._write = write_while_the_group_forms_anew  # type: ignore[method-assign]
    await run_once(ledger)
    assert ledger.acked == 0
    assert np.frombuffer(await ledger._redis.get("lockstep:tokens:r1:0"), "<u4").tolist() == [7]
