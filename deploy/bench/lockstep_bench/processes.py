"""Starts the services as real processes on free ports and stops exactly those again.

A child that is not stopped (because this process was killed) is killed by the kernel: see lockstep_cli/child.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lockstep_cli import child
from lockstep_common.errors import LockstepError, Unavailable

_CHILD = str(Path(child.__file__))
_TICK = os.sysconf("SC_CLK_TCK")
HOST = "127.0.0.1"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind((HOST, 0))
        port: int = s.getsockname()[1]
        return port


class Process:
    """One child process in its own session; its output goes to a file that `tail` reads."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_dir: Path,
        *,
        env: dict[str, str] | None = None,
        cores: Iterable[int] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.log = log_dir / f"{name}.log"
        with self.log.open("ab") as out, _affinity(cores):
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", _CHILD, str(os.getpid()), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | (env or {}),
                cwd=cwd,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def check(self) -> None:
        """Unavailable, with the end of its log, if it is not running."""
        if (code := self._popen.poll()) is not None:
            raise Unavailable(f"{self.name} exited with {code}:\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def stop(self, grace: float = 8.0) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds, to the process and what it started."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGCONT)  # a stopped process takes no SIGTERM
            self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def kill(self) -> None:
        """SIGKILL, at once."""
        self._popen.kill()
        self._popen.wait()

    def cpu_seconds(self) -> float:
        """User + system seconds of all its threads so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Fleet:
    """Processes that end together: whatever happens inside the context, none is left when it is over."""

    def __init__(self, log_dir: Path | None = None) -> None:
        self._own = None if log_dir else tempfile.TemporaryDirectory(prefix="lockstep-")
        self.log_dir = log_dir or Path(self._own.name if self._own else ".")
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.processes: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for process in reversed(self.processes):
            process.stop()
        if self._own is not None:
            self._own.cleanup()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        cores: Iterable[int] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        process = Process(name, command, self.log_dir, env=env, cores=cores, cwd=cwd)
        self.processes.append(process)
        return process

    def python(
        self,
        name: str,
        *args: str | int | float | Path,
        env: dict[str, str] | None = None,
        cores: Iterable[int] | None = None,
    ) -> Process:
        """`python ARGS` with this interpreter."""
        return self.start(name, [sys.executable, *map(str, args)], env=env, cores=cores)

    def check(self) -> None:
        for process in self.processes:
            process.check()


async def wait_http(host: str, port: int, path: str, *, timeout: float, processes: Iterable[Process] = ()) -> None:
    """Returns once GET answers 200. Unavailable if a process that must run has ended, or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    last = "no answer"
    while time.monotonic() < deadline:
        for process in processes:
            process.check()
        try:
            status, body = await http_get(host, port, path)
            if status == 200:
                return
            last = f"HTTP {status} {body[:300]!r}"
        except (OSError, LockstepError, TimeoutError) as error:
            last = str(error)
        await asyncio.sleep(0.1)
    raise Unavailable(f"http://{host}:{port}{path} did not answer 200 within {timeout:g} s: {last}")


async def http_get(host: str, port: int, path: str, *, timeout: float = 5.0) -> tuple[int, str]:
    """(status, body) of a plain GET over a connection of its own."""
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        finally:
            writer.close()
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise Unavailable(f"no HTTP answer from {host}:{port}")
    return int(words[1]), body.decode(errors="replace")


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of a Prometheus page by name, summed over labels."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            samples[name] = samples.get(name, 0.0) + float(value)
    return samples


class _affinity:
    """Children started inside inherit `cores`; the calling thread has its own cores back afterwards."""

    def __init__(self, cores: Iterable[int] | None) -> None:
        self._cores = set(cores) if cores is not None else None

    def __enter__(self) -> None:
        if self._cores is not None:
            self._before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._cores)

    def __exit__(self, *_: object) -> None:
        if self._cores is not None:
            os.sched_setaffinity(0, self._before)
