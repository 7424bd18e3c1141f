"""A group that has lost a worker and formed again: requests go on with the same tokens, and who is left has kept its cache.

Real processes over gloo. How long it takes is printed (pytest -s): from SIGKILL to the first token afterwards.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from pathlib import Path

import pytest

from lockstep_bench.client import Request, SchedulerSession
from lockstep_bench.processes import HOST, free_port, http_get, parse_metrics
from lockstep_common.steps import Sampling
from tests.moe_model import MoeShape, make_tiny_moe
from tests.system.harness import Service, Stack, stack

BLOCK = 16
LONG, SHORT = 300, 20  # prompt tokens
GREEDY = Sampling(max_tokens=150)
BEFORE = 30  # tokens that the long request has when the worker is killed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("reforming") / "moe", layers=2)


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(MoeShape().vocab - 3) for _ in range(length)]


class Reading:
    """A request's tokens as they come, and when."""

    def __init__(self, request: Request) -> None:
        self.tokens: list[int] = []
        self.last_s = 0.0
        self.pause_s = 0.0  # the longest between two tokens
        self.resumed_s = 0.0  # its end
        self.task = asyncio.create_task(self._read(request))

    async def _read(self, request: Request) -> None:
        async for piece in request:
            now = time.monotonic()
            if self.tokens and now - self.last_s > self.pause_s:
                self.pause_s, self.resumed_s = now - self.last_s, now
            self.tokens += piece.tokens.tolist()
            self.last_s = now

    async def until(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.tokens) < count:
                await asyncio.sleep(0.005)


async def recomputed(port: int) -> int:
    _, body = await http_get(HOST, port, "/metrics")
    return int(parse_metrics(body)["lockstep_recomputed_tokens_total"])


async def undisturbed(session: SchedulerSession) -> list[list[int]]:
    answers = [await session.submit(prompt(length), GREEDY, salt="alone").answer() for length in (LONG, SHORT)]
    return [list(answer.tokens[0]) for answer in answers]


async def killed_and_back(s: Stack, victim: Service, session: SchedulerSession) -> tuple[list[Reading], float]:
    """Two requests, the long one on DP rank 0, the short one on the next if there is one, while a worker is killed."""
    long = Reading(session.submit(prompt(LONG), GREEDY, salt="first"))
    await long.until(4)
    short = Reading(session.submit(prompt(SHORT), GREEDY, salt="second"))
    await asyncio.gather(long.until(BEFORE), short.until(4))
    assert len(long.tokens) < GREEDY.max_tokens - 8
    victim.running.kill()
    at = time.monotonic()
    victim.start()
    async with asyncio.timeout(60):
        await asyncio.gather(long.task, short.task)
    return [long, short], at


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dp", "cp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)]
)
async def test_a_killed_worker_costs_no_request_and_only_its_own_rank_computes_again(
    model: Path, dp: int, cp: int, caching: bool
) -> None:
    port = free_port()
    scheduler = {"max_num_seqs": 4, "max_window": 4, "metrics_port": port, "enable_prefix_caching": caching}
    async with (
        stack(
            model, coupled=dp, cp=cp, with_router=False, scheduler=scheduler, worker={"collective_deadline_s": 2.0}
        ) as s,
        s.session() as session,
    ):
        expected = await undisturbed(session)
        victim, survivors = s.workers[-1], [worker.running.pid for worker in s.workers[:-1]]
        readings, at = await killed_and_back(s, victim, session)
        assert [reading.tokens for reading in readings] == expected
        assert [worker.running.pid for worker in s.workers[:-1]] == survivors
        again = await recomputed(port)
        if dp > 1:
            most = SHORT + GREEDY.max_tokens + BLOCK * cp
            assert SHORT <= again < most < LONG, "the long request's rank has kept its cache"
        else:
            assert again > LONG + SHORT, "no rank is left whole"
        log = s.schedulers[0].running.log.read_text()
        assert len(re.findall(r"group formed: epoch", log)) == 2, log[-2000:]
        first = max(reading.resumed_s for reading in readings) - at
        print(f"\n{dp} x {cp}: first tokens {first:.2f} s after SIGKILL, {again} tokens computed again")
