"""Which schedulers there are: a fixed list, and what registers in Redis.

A scheduler keeps the key `lockstep:scheduler:<shard-id>` = {"address": "host:port", "model": name} alive for as long as
it lives. When Redis is away the last known set stays: a router serves without it, and starts without it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import redis.asyncio
from redis.exceptions import RedisError

from lockstep_router.client import SchedulerSession
from lockstep_router.fleet import Fleet

log = logging.getLogger(__name__)

KEYS: Final = "lockstep:scheduler:*"
SCAN_SECONDS: Final = 2.0
REDIS_SECONDS: Final = 1.0  # bound on each call
MAX_SCHEDULERS: Final = 1024


class Links:
    """Keeps one running session for each known address, and the fleet's list with them."""

    def __init__(self, fleet: Fleet, connect: Callable[[str], SchedulerSession], fixed: Iterable[str]) -> None:
        self._fleet = fleet
        self._connect = connect
        self._fixed = frozenset(fixed)
        self._sessions: dict[str, tuple[SchedulerSession, asyncio.Task[None]]] = {}
        self.update(())

    def update(self, found: Collection[str]) -> None:
        """Connects to addresses that are new and drops idle ones that are gone; one in use stays until it is idle."""
        wanted = self._fixed | set(found)
        for address in sorted(wanted - self._sessions.keys()):
            session = self._connect(address)
            self._sessions[address] = (session, asyncio.create_task(session.run(), name=f"scheduler {address}"))
        for address in self._sessions.keys() - wanted:
            session, task = self._sessions[address]
            if not session.in_flight and not session.connected:
                task.cancel()
                del self._sessions[address]
        self._fleet.links[:] = [session for session, _ in self._sessions.values()]

    async def close(self) -> None:
        tasks = [task for _, task in self._sessions.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RedisRegistry:
    """Looks for schedulers of one model in Redis."""

    def __init__(self, url: str, models: Collection[str]) -> None:
        self._redis: Any = redis.asyncio.from_url(
            url, socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS, decode_responses=True
        )
        self._models = frozenset(models)
        self.away = False

    async def watch(self, update: Callable[[Collection[str]], None]) -> None:
        """Calls `update` with the addresses found, every two seconds, until cancelled; not at all while Redis is away."""
        while True:
            try:
                async with asyncio.timeout(3 * REDIS_SECONDS):
                    records = await self._records()
            except (RedisError, OSError, TimeoutError) as error:
                if not self.away:
                    log.warning("Redis is away (%s): the schedulers known so far stay", type(error).__name__)
                self.away = True
            else:
                self.away = False
                update(addresses(records, self._models))
            await asyncio.sleep(SCAN_SECONDS)

    async def _records(self) -> dict[str, str]:
        keys = []
        async for key in self._redis.scan_iter(match=KEYS, count=256):
            keys.append(key)
            if len(keys) >= MAX_SCHEDULERS:
                break
        values = await self._redis.mget(keys) if keys else []
        return {key: value for key, value in zip(keys, values, strict=True) if value is not None}

    async def close(self) -> None:
        await self._redis.aclose()


def addresses(records: Mapping[str, str], models: Collection[str]) -> list[str]:
    """The addresses of valid records that serve one of `models` (or do not say what they serve)."""
    found = set()
    for key, text in records.items():
        try:
            record = json.loads(text)
            address, model = record["address"], record.get("model", "")
        except (ValueError, TypeError, KeyError, AttributeError):
            log.warning("ignoring the registration %s: it is not {address, model}", key)
            continue
        if isinstance(address, str) and ":" in address and (not model or model in models):
            found.add(address)
    return sorted(found)
