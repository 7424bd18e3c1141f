"""The request ledger and the registry of schedulers, in Redis. Never on the path of a step.

Keys:
    lockstep:request:<id>            hash: shard, term, created, sampling, n, prompt (packed uint32), end:<choice>, tokens:<choice>
    lockstep:tokens:<id>:<choice>    string: packed uint32, the choice's generated tokens
    lockstep:scheduler:<shard-id>    string with a time to live: JSON {"address", "model"}

The scheduler that holds a request is its record's only writer. An append carries its term and its offset and counts only if
the term is the record's and the offset is where the tokens end, so a retried append cannot count twice and an old owner
cannot write.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from lockstep_common.steps import U32
from lockstep_scheduler.request import Choice, Request

log = logging.getLogger(__name__)

PREFIX = "lockstep:"
REGISTRY_TTL = 10
CALL_TIMEOUT = 0.25  # of one pipeline; a Redis that hangs must not hold memory for long
RETRY_AFTER = 1.0  # after a failure nothing is tried for so long
BATCH_SECONDS = 0.004
MAX_PENDING = 20_000  # entries kept while Redis is away; the oldest are dropped, their records stop there

# KEYS: record, tokens. ARGV: term, offset in bytes, data, ttl. 1 appended, 0 was there already, -1 refused.
_APPEND = """
if redis.call('HGET', KEYS[1], 'term') ~= ARGV[1] then return -1 end
local have = redis.call('STRLEN', KEYS[2])
local offset = tonumber(ARGV[2])
if have == offset then redis.call('APPEND', KEYS[2], ARGV[3]); redis.call('EXPIRE', KEYS[2], ARGV[4]); return 1 end
if have >= offset + #ARGV[3] then return 0 end
return -1
"""


class RedisLedger:
    """Writes records and appends in batches. Redis away: serving goes on, `durable` is False, the batch waits (bounded)."""

    wanted = True

    def __init__(self, url: str, shard_id: str, ttl: int) -> None:
        self._redis: Any = redis.from_url(
            url, socket_timeout=CALL_TIMEOUT, socket_connect_timeout=CALL_TIMEOUT, protocol=2
        )
        self._shard_id = shard_id
        self._ttl = ttl
        self._script = self._redis.register_script(_APPEND)
        self._pending: list[
            tuple[Any, ...]
        ] = []  # ("append", id, choice, term, offset, data) | ("end", id, choice, reason, n)
        self._pending_seq = 0
        self._epochs = 0
        self._wake = asyncio.Event()
        self._down_until = 0.0
        self.acked = 0
        self.term = 0
        self.dropped = 0

    @property
    def durable(self) -> bool:
        return time.monotonic() >= self._down_until

    async def open(self, request: Request, timeout: float) -> bool:
        """Writes a request's record; False if Redis did not confirm it in time."""
        if not self.durable:
            return False
        record = {
            "shard": self._shard_id,
            "term": self.term,
            "created": time.time(),
            "n": request.n,
            "sampling": json.dumps(asdict(request.sampling)),
            "prompt": request.prompt.tobytes(),
        }
        key = f"{PREFIX}request:{request.request_id}"
        try:
            async with asyncio.timeout(timeout):
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.hset(key, mapping=record).expire(key, self._ttl + 24 * 3600)
                    await pipe.execute()
            return True
        except (TimeoutError, RedisError, OSError) as error:
            self._failed(error)
            return False

    def append(self, seq: int, entries: Sequence[tuple[Choice, int, U32]]) -> None:
        for choice, offset, tokens in entries:
            if len(tokens):
                self._pending.append(
                    ("append", choice.request.request_id, choice.index, self.term, 4 * offset, tokens.tobytes())
                )
        self._pending_seq = max(self._pending_seq, seq - 1)
        if len(self._pending) > MAX_PENDING:
            self.dropped += len(self._pending) - MAX_PENDING
            del self._pending[: len(self._pending) - MAX_PENDING]
        self._wake.set()

    def end(self, choice: Choice, tokens: int) -> None:
        self._pending.append(("end", choice.request.request_id, choice.index, choice.end.name.lower(), tokens))
        self._wake.set()

    def restart(self) -> None:
        """A new epoch counts its plans from 1."""
        self.acked = self._pending_seq = 0
        self._epochs += 1

    async def run(self) -> None:
        """Writes what is pending, a batch every few milliseconds; until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(BATCH_SECONDS)
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        if not self.durable:
            self.acked = self._pending_seq  # degraded: what was forwarded may be forgotten
            await asyncio.sleep(max(0.0, self._down_until - time.monotonic()))
            self._wake.set()
            return
        batch, self._pending = self._pending, []
        seq, epochs = self._pending_seq, self._epochs
        try:
            await self._write(batch)
            if epochs == self._epochs:  # a seq of the epoch before would acknowledge plans that have not run
                self.acked = max(self.acked, seq)
        except (TimeoutError, RedisError, OSError) as error:
            self._pending = batch + self._pending
            self._failed(error)
            self._wake.set()

    async def _write(self, batch: list[tuple[Any, ...]]) -> None:
        if not batch:
            return
        async with asyncio.timeout(2 * CALL_TIMEOUT):
            async with self._redis.pipeline(transaction=False) as pipe:
                for kind, request_id, choice, *rest in batch:
                    record, tokens = f"{PREFIX}request:{request_id}", f"{PREFIX}tokens:{request_id}:{choice}"
                    if kind == "append":
                        term, offset, data = rest
                        await self._script(
                            keys=[record, tokens], args=[term, offset, data, self._ttl + 24 * 3600], client=pipe
                        )
                    else:
                        reason, count = rest
                        pipe.hset(record, mapping={f"end:{choice}": reason, f"tokens:{choice}": count})
                        pipe.expire(record, self._ttl).expire(tokens, self._ttl)
                await pipe.execute()

    async def register(self, address: str, model: str) -> None:
        """One refresh of this scheduler's entry in the registry."""
        key = f"{PREFIX}scheduler:{self._shard_id}"
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                await self._redis.set(key, json.dumps({"address": address, "model": model}), ex=REGISTRY_TTL)
        except (TimeoutError, RedisError, OSError) as error:
            self._failed(error)

    async def close(self, deregister: bool = True) -> None:
        """Writes what is pending, once, and leaves the registry."""
        try:
            async with asyncio.timeout(4 * CALL_TIMEOUT):
                await self._write(self._pending)
                if deregister:
                    await self._redis.delete(f"{PREFIX}scheduler:{self._shard_id}")
        except (TimeoutError, RedisError, OSError) as error:
            log.warning("the ledger could not be closed: %s", error or type(error).__name__)
        await self._redis.aclose()

    def _failed(self, error: BaseException) -> None:
        if self.durable:
            log.warning(
                "Redis does not answer (%s): serving goes on, nothing is durable", error or type(error).__name__
            )
        self._down_until = time.monotonic() + RETRY_AFTER
