"""The supervisor over small real processes: restarts, start-up failures, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lockstep_cli.services import Role, Service
from lockstep_cli.supervisor import StartFailed, Supervisor

SLEEPER = "import pathlib, os, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
PARENT = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1] + '.child']); " + SLEEPER
)


def service(name: str, script: str, folder: Path, *more: str) -> Service:
    """A process that writes its pid to `folder/name`; it is ready as soon as that file exists."""
    marker = str(folder / name)
    return Service(name, Role.WORKER, (sys.executable, "-c", script, marker, *more), marker)


async def ready(service: Service) -> bool:
    return Path(service.address).exists() and Path(service.address).read_text() != ""


async def shown(service: Service, is_ready: bool) -> None:
    pass


def pid_of(name: str, folder: Path) -> int:
    return int((folder / name).read_text())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(*services: Service, folder: Path, said: list[str]) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(services, folder, said.append, ready)
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.kill()


async def test_what_dies_comes_back(tmp_path: Path) -> None:
    said: list[str] = []
    async with running(
        service("a", SLEEPER, tmp_path), service("b", SLEEPER, tmp_path), folder=tmp_path, said=said
    ) as s:
        await s.wait_ready(shown, 10)
        watch = asyncio.create_task(s.watch())
        first, other = pid_of("a", tmp_path), pid_of("b", tmp_path)
        (tmp_path / "a").unlink()
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(said) == 2)
        assert said[0].startswith("a was killed by SIGKILL; restarting it in 1 s") and "ready again" in said[1]
        assert pid_of("a", tmp_path) != first and alive(pid_of("a", tmp_path)) and alive(other)
        watch.cancel()


async def test_the_end_is_quick_and_takes_everything_along(tmp_path: Path) -> None:
    services = [
        service("polite", SLEEPER, tmp_path),
        service("stubborn", STUBBORN, tmp_path),
        service("parent", PARENT, tmp_path, STUBBORN),
    ]
    async with running(*services, folder=tmp_path, said=[]) as supervisor:
        await supervisor.wait_ready(shown, 10)
        await until((tmp_path / "parent.child").exists)
        begin = time.monotonic()
        await supervisor.stop()
        assert time.monotonic() - begin < 5
        pids = [pid_of(name, tmp_path) for name in ("polite", "stubborn", "parent", "parent.child")]
        await until(lambda: not any(alive(pid) for pid in pids), 1)


async def test_a_failed_start_shows_the_last_words(tmp_path: Path) -> None:
    broken = service("broken", "import sys; print('no such model'); sys.exit(3)", tmp_path)
    async with running(service("a", SLEEPER, tmp_path), broken, folder=tmp_path, said=[]) as supervisor:
        with pytest.raises(StartFailed, match=r"broken ended with status 3.*\n.*no such model"):
            await supervisor.wait_ready(shown, 10)


async def test_a_start_that_takes_too_long_names_who_is_missing(tmp_path: Path) -> None:
    slow = service("slow", "import time; time.sleep(60)", tmp_path)
    async with running(slow, folder=tmp_path, said=[]) as supervisor:
        with pytest.raises(StartFailed, match="slow"):
            await supervisor.wait_ready(shown, 0.3)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
async def test_processes_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = """
import asyncio, pathlib, sys
sys.path.insert(0, sys.argv[2])
from tests.deploy.test_supervisor import SLEEPER, ready, service, shown
from lockstep_cli.supervisor import Supervisor
async def main(folder):
    supervisor = Supervisor([service("a", SLEEPER, folder)], folder, print, ready)
    await supervisor.start()
    await supervisor.watch()
asyncio.run(main(pathlib.Path(sys.argv[1])))
"""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(root)]) as owner:
        try:
            await until(lambda: (tmp_path / "a").exists() and (tmp_path / "a").read_text() != "", 10)
        finally:
            owner.kill()
    await until(lambda: not alive(pid_of("a", tmp_path)), 2)
