"""What the loss of one of four workers costs the group: the others name it, none of them restarts, the group forms again, and what
ran goes on with the same tokens."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep_bench.client import Request, SchedulerSession
from lockstep_common.steps import Sampling
from tests.moe_model import make_tiny_moe
from tests.system.harness import ROOT, Stack, stack

PROMPT, LONG = [3, 4, 5], Sampling(max_tokens=120)
DEADLINE_S = 2.0
NAMED_WITHIN_S = 3 * DEADLINE_S  # the deadline, the grace in which ranks tell each other, and a busy machine
FAULTY = "tests.faulty_worker"


def can_unshare() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("ip")):
        return False
    return subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("group-failures") / "moe")


@asynccontextmanager
async def busy_group(
    model: Path, **options: Any
) -> AsyncIterator[tuple[Stack, SchedulerSession, asyncio.Task[list[int]]]]:
    """Two by two workers, and a request that runs: its tokens."""
    worker = {"collective_deadline_s": DEADLINE_S, "max_num_seqs": 4, **options.pop("worker", {})}
    group = {"coupled": 2, "cp": 2, "with_router": False, "scheduler": {"max_num_seqs": 4, "max_window": 4}}
    async with stack(model, worker=worker, **group, **options) as s, s.session() as session:
        request = session.submit(PROMPT, LONG)
        piece = await anext(aiter(request))
        yield s, session, asyncio.create_task(to_its_end(request, piece.tokens.tolist()))


async def to_its_end(request: Request, tokens: list[int]) -> list[int]:
    async for piece in request:
        assert piece.offset == len(tokens)
        tokens += piece.tokens.tolist()
    return tokens


def logs(s: Stack, *numbers: int) -> str:
    return "\n".join(s.workers[i].running.log.read_text() for i in numbers)


async def until_logged(s: Stack, pattern: str, *numbers: int, within_s: float = NAMED_WITHIN_S) -> None:
    """Every one of these workers has logged it."""
    end = time.monotonic() + within_s
    while not all(re.search(pattern, logs(s, i)) for i in numbers):
        assert time.monotonic() < end, f"no {pattern!r} within {within_s} s:\n{logs(s, *numbers)[-3000:]}"
        await asyncio.sleep(0.1)


async def until_lost(s: Stack, *, names: str = "", within_s: float = 30) -> None:
    """The scheduler has given the group up."""
    end, log = time.monotonic() + within_s, s.schedulers[0].running.log
    while not re.search(f"group lost: .*{re.escape(names)}", log.read_text()):
        assert time.monotonic() < end, f"the group is not lost within {within_s} s:\n{log.read_text()[-3000:]}"
        await asyncio.sleep(0.1)


async def goes_on(session: SchedulerSession, running: asyncio.Task[list[int]]) -> None:
    """The request ends with the tokens that it has undisturbed, and others are served."""
    tokens = await asyncio.wait_for(running, 60)
    undisturbed = await session.submit(PROMPT, LONG).answer()
    assert tuple(tokens) == undisturbed.tokens[0] and len(tokens) == LONG.max_tokens


async def test_a_killed_worker_is_named_and_the_others_serve_on_with_a_new_one(model: Path) -> None:
    async with busy_group(model) as (s, session, running):
        survivors = [s.workers[i].running.pid for i in (0, 1, 3)]
        s.workers[2].running.kill()
        await until_lost(s, names=s.workers[2].address)
        s.workers[2].start()
        await goes_on(session, running)
        assert [s.workers[i].running.pid for i in (0, 1, 3)] == survivors
        assert all(s.workers[i].running.returncode is None for i in (0, 1, 3))


@pytest.mark.slow
async def test_a_stopped_worker_is_named_by_the_others_and_comes_back(model: Path) -> None:
    async with busy_group(model) as (s, session, running):
        pids = [worker.running.pid for worker in s.workers]
        s.workers[2].running.signal(signal.SIGSTOP)
        try:
            await until_logged(s, f"missing: {re.escape(s.workers[2].address)}", 0, 1)
            await until_lost(s)
            await asyncio.sleep(20 - NAMED_WITHIN_S)
            assert not running.done()
        finally:
            s.workers[2].running.signal(signal.SIGCONT)
        await goes_on(session, running)
        assert [worker.running.pid for worker in s.workers] == pids
        assert all(worker.running.returncode is None for worker in s.workers)


@pytest.mark.slow
async def test_a_worker_that_skips_a_collective_is_named_with_what_it_skipped(model: Path, tmp_path: Path) -> None:
    fault = tmp_path / "fault.json"
    fault.write_text(json.dumps({"rank": 2, "at": "experts 1, results", "after": 40, "does": "skip"}))
    async with busy_group(model, worker_module=FAULTY, worker={"fault": fault, "debug_collectives": True}) as (
        s,
        _,
        running,
    ):
        await until_lost(s, within_s=60)
        running.cancel()
        named = f"out of step: {re.escape(s.workers[2].address)} had .* where this rank had .*experts 1, results"
        await until_logged(s, named, 0, 1, 3)


@pytest.mark.slow
async def test_a_worker_whose_steps_hang_is_expelled_and_the_others_wait_for_a_new_one(
    model: Path, tmp_path: Path
) -> None:
    fault = tmp_path / "fault.json"
    fault.write_text(json.dumps({"rank": 2, "at": "experts 1, rows", "after": 40, "does": "hang"}))
    worker = {"fault": fault, "reform_timeout_s": 5 * DEADLINE_S}
    async with busy_group(model, worker_module=FAULTY, worker=worker) as (s, session, running):
        await until_lost(s, within_s=60)
        hung, others = s.workers[2], [s.workers[i].running for i in (0, 1, 3)]
        end = time.monotonic() + 60
        while hung.running.returncode is None:
            assert time.monotonic() < end, "the worker that hangs goes on"
            await asyncio.sleep(0.2)
        assert hung.running.returncode == 1 and "expelled from the group" in hung.running.log.read_text()
        fault.write_text(json.dumps({"rank": -1}))
        hung.start()
        await goes_on(session, running)
        assert all(process.returncode is None for process in others)


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="needs the right to make network namespaces")
def test_a_cut_link_is_named_and_the_group_forms_again_when_it_is_joined(model: Path) -> None:
    command = ["unshare", "--net", sys.executable, "-m", "tests.system.cut_link", str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["named_after_s"] < NAMED_WITHIN_S, found["log"]
    assert found["error"] and found["tokens"] == 300 and found["restarted"] == [False, False], found
