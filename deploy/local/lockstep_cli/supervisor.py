"""Starts a set of processes, restarts those that die, and stops all of them.

Each process has a group of its own (Ctrl-C in a terminal reaches the supervisor only), writes to a log of its own, and is
killed by the kernel if the supervisor dies first (child.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from lockstep_cli.services import Role, Service
from lockstep_common.errors import LockstepError

_CHILD = str(Path(__file__).with_name("child.py"))
_POLL_S = 0.05
_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 10.0
_STABLE_S = 60.0  # a process that ran so long starts over with the first backoff
_TAIL_LINES = 20
# Who is told to stop when, and how long all before and with them may take: within 5 s everything is gone.
_STOP_ORDER: tuple[tuple[tuple[Role, ...], float], ...] = (
    ((Role.ROUTER,), 1.5),
    ((Role.SCHEDULER,), 2.5),
    ((Role.WORKER,), 3.5),
    ((Role.VALKEY,), 4.0),
)


class StartFailed(LockstepError):
    """A process ended before everything was ready, or the time was up; the message holds its last words."""


class Supervisor:
    """`say` tells a person what happens; `ready` asks one process whether it can do its work."""

    def __init__(
        self,
        services: Sequence[Service],
        log_dir: Path,
        say: Callable[[str], None],
        ready: Callable[[Service], Awaitable[bool]],
    ) -> None:
        self._children = [Child(service, log_dir / f"{service.name}.log") for service in services]
        self._say = say
        self._ready = ready

    async def start(self) -> None:
        """Starts all processes at once; they wait for each other by themselves."""
        for child in self._children:
            await child.spawn(first=True)

    async def wait_ready(self, show: Callable[[Service, bool], Awaitable[None]], timeout_s: float) -> None:
        """Returns when every process is ready; StartFailed if one ends or the time is up. `show` is called while waiting."""
        deadline = time.monotonic() + timeout_s
        waiting = list(self._children)
        while waiting:
            for child in self._children:
                if child.exit_code is not None:
                    raise StartFailed(f"{child.service.name} {child.how_it_ended()}; its log ends:\n{child.tail()}")
            if time.monotonic() > deadline:
                names = ", ".join(child.service.name for child in waiting)
                raise StartFailed(f"not ready after {timeout_s:.0f} s: {names}; the log ends:\n{waiting[0].tail()}")
            states = await asyncio.gather(*(self._ready(child.service) for child in waiting))
            for child, is_ready in zip(waiting, states, strict=True):
                await show(child.service, is_ready)
            waiting = [child for child, is_ready in zip(waiting, states, strict=True) if not is_ready]
            await asyncio.sleep(_POLL_S)

    async def watch(self) -> None:
        """Restarts what dies, for ever; cancel it before `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for child in self._children:
                tasks.create_task(self._keep_alive(child))

    async def stop(self) -> None:
        """Asks all processes to end, front to back, and kills those that do not; takes less than 5 s."""
        begin = time.monotonic()
        for roles, until_s in _STOP_ORDER:
            told = [child for child in self._children if child.service.role in roles]
            for child in told:
                child.signal(signal.SIGTERM)
            await _wait_all(told, begin + until_s - time.monotonic())
        await self.kill()

    async def kill(self) -> None:
        """Ends all processes at once, with everything they started."""
        for child in self._children:
            child.kill()
        await _wait_all(self._children, _STOP_ORDER[-1][1])

    async def _keep_alive(self, child: Child) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            await child.wait()
            if child.age_s() > _STABLE_S:
                backoff = _FIRST_BACKOFF_S
            name = child.service.name
            self._say(f"{name} {child.how_it_ended()}; restarting it in {backoff:.0f} s (log: {child.log})")
            child.kill()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)
            await child.spawn(first=False)
            if await self._came_up(child):
                self._say(f"{name} is ready again, {child.age_s():.1f} s after its restart")

    async def _came_up(self, child: Child) -> bool:
        while child.exit_code is None:
            if await self._ready(child.service):
                return True
            await asyncio.sleep(4 * _POLL_S)
        return False


class Child:
    """One process and its log."""

    def __init__(self, service: Service, log: Path) -> None:
        self.service = service
        self.log = log
        self._process: asyncio.subprocess.Process | None = None
        self._started = 0.0

    async def spawn(self, *, first: bool) -> None:
        with self.log.open("wb" if first else "ab") as log:
            if not first:
                log.write(f"--- restarted at {time.strftime('%H:%M:%S')} ---\n".encode())
                log.flush()
            self._started = time.monotonic()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", _CHILD, str(os.getpid())),
                *self.service.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.service.env},
                process_group=0,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode if self._process else None

    async def wait(self) -> None:
        if self._process:
            await self._process.wait()

    def age_s(self) -> float:
        return time.monotonic() - self._started

    def signal(self, number: signal.Signals) -> None:
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the whole group: also what the process started and left."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def how_it_ended(self) -> str:
        code = self.exit_code
        if code is None:
            return "still runs"
        return f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def tail(self) -> str:
        with self.log.open(errors="replace") as log:
            return "".join(f"  | {line}" for line in deque(log, _TAIL_LINES)).rstrip()


async def _wait_all(children: Sequence[Child], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(timeout_s, 0.0)):
            await asyncio.gather(*(child.wait() for child in children))
