"""Run inside a network namespace of its own: `unshare --net python -m tests.system.cut_link MODEL`. Two workers on the two ends of a link
that is cut while they serve, and joined again. Prints what happened as JSON; see test_group_failures."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from lockstep_bench.client import SchedulerSession, wait_serving
from lockstep_bench.processes import Fleet, Process
from lockstep_common.steps import Sampling
from tests.system.harness import ROOT, flag_words

HERE, THERE, BEYOND = "10.231.7.1", "10.231.7.2", f"lockstep-{os.getpid()}"
DEADLINE_S = 2.0
WORKERS = (f"{HERE}:7001", f"{THERE}:7002")
SCHEDULER = f"{HERE}:7003"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def lay_link() -> None:
    ip("link", "set", "lo", "up")
    ip("netns", "add", BEYOND)
    ip("link", "add", "here", "type", "veth", "peer", "name", "there", "netns", BEYOND)
    for where, address, device in (((), HERE, "here"), (("-n", BEYOND), THERE, "there")):
        ip(*where, "addr", "add", f"{address}/24", "dev", device)
        ip(*where, "link", "set", device, "up")
        if where:
            ip(*where, "link", "set", "lo", "up")


def start(fleet: Fleet, name: str, address: str, module: str, **flags: object) -> Process:
    host, port = address.split(":")
    inside = ["ip", "netns", "exec", BEYOND] if host == THERE else []
    command = [*inside, sys.executable, "-m", module, *flag_words({"host": host, "port": port, **flags})]
    return fleet.start(name, command, env={"PYTHONPATH": str(ROOT)})


async def serve(session: SchedulerSession, tokens: int) -> int:
    count = 0
    async for piece in session.submit([3, 4, 5], Sampling(max_tokens=tokens)):
        count += len(piece.tokens)
    return count


async def until_logged(process: Process, pattern: str, within_s: float) -> str:
    """What the first group of the pattern, or all of it, matched; empty: nothing in that time."""
    end = time.monotonic() + within_s
    while not (found := re.search(pattern, process.log.read_text())) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    return found.group(found.re.groups) if found else ""


async def run(model: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    with Fleet() as fleet:
        flags = {"model": model, "dtype": "float32", "device": "cpu", "threads": 1, "dp": 2, "max_num_seqs": 4}
        workers = [
            start(fleet, f"worker{i}", address, "lockstep_worker", rank=i, collective_deadline_s=DEADLINE_S, **flags)
            for i, address in enumerate(WORKERS)
        ]
        scheduler = start(
            fleet, "scheduler", SCHEDULER, "lockstep_scheduler", workers=",".join(WORKERS), max_num_seqs=4, max_window=4
        )
        await wait_serving(SCHEDULER, "lockstep.v1.Scheduler", timeout=90, check=fleet.check)
        session = await SchedulerSession.open(SCHEDULER, timeout=30)
        running = asyncio.create_task(serve(session, 300))
        await asyncio.sleep(0.5)
        ip("link", "set", "here", "down")
        cut = time.monotonic()
        await until_logged(workers[0], rf"has waited .*missing: {re.escape(WORKERS[1])}", 10 * DEADLINE_S)
        found["named_after_s"] = time.monotonic() - cut
        found["error"] = await until_logged(scheduler, "group lost: (.*)", 60)
        ip("link", "set", "here", "up")
        found["tokens"] = await asyncio.wait_for(running, 90)
        await session.close()
        found["restarted"] = [worker.returncode is not None for worker in workers]
        found["log"] = workers[0].tail(40)
    return found


def main() -> None:
    lay_link()
    try:
        print(json.dumps(asyncio.run(run(Path(sys.argv[1])))))
    finally:
        ip("netns", "del", BEYOND)


if __name__ == "__main__":
    main()
