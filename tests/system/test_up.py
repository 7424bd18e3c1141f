"""`lockstep up` as a person runs it: a real model, real processes, and nothing left when it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep_cli import models

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

START_S = 60.0  # far above what it takes: this machine may be busy
STOP_S = 5.0
LAST_LINE = "Ctrl-C stops everything."


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    """In the cache before the clocks run."""
    models.get(models.DEFAULT_MODEL, lambda label, fraction, note="": None)


@pytest.fixture
def home() -> Iterator[Path]:
    """A temporary directory with a short name (it will hold a socket)."""
    path = Path(tempfile.mkdtemp(prefix="ls-"))
    yield path
    shutil.rmtree(path)


@dataclass
class Up:
    """A running `lockstep up`."""

    process: subprocess.Popen[str]
    home: Path
    port: int
    out: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, text: str, seconds: float) -> None:
        def said() -> bool:
            return any(text in line for line in self.out) or self.process.poll() is not None

        until(said, seconds, lambda: f"no {text!r} in:\n{''.join(self.out)}")
        assert any(text in line for line in self.out), "".join(self.out)

    def children(self) -> dict[str, int]:
        """Process ids by module, of the processes that this one started."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                command = (stat.parent / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self.process.pid:
                name = (stat.parent / "comm").read_text().strip()
                found[command[2].decode() if command[1:2] == [b"-m"] else name] = int(stat.parent.name)
        return found

    def ask(self, **more: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0, **more}
        body.setdefault("model", models.DEFAULT_MODEL)
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def stop(self, number: signal.Signals) -> float:
        """Seconds from the signal to the end."""
        begin = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(STOP_S + 5)
        return time.monotonic() - begin


def until(condition: Callable[[], bool], seconds: float, complaint: Callable[[], str] = lambda: "too late") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def up(home: Path) -> Iterator[Callable[..., Up]]:
    """Starts `lockstep up` with options; whatever is left of it at the end is killed."""
    started: list[Up] = []

    def start(*options: str) -> Up:
        port = free_port()
        command = [sys.executable, "-m", "lockstep_cli", "up", "--port", str(port), "--grpc-port", "0"]
        command += ["--log-dir", str(home / "logs"), "--max-model-len", "512", "--max-num-seqs", "8", *options]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": str(home)},
        )
        assert process.stdout is not None
        running = Up(process, home, port)
        reader = threading.Thread(target=running.out.extend, args=(iter(process.stdout.readline, ""),))
        reader.start()
        started.append(running)
        return running

    yield start
    for running in started:
        if running.process.poll() is None:
            running.stop(signal.SIGTERM)


def nothing_left(running: Up, pids: list[int]) -> None:
    until(lambda: not any(alive(pid) for pid in pids), 1, lambda: f"still alive: {[p for p in pids if alive(p)]}")
    assert [path.name for path in running.home.iterdir()] == ["logs"]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", running.port)) != 0


def test_answers_survives_the_death_of_a_worker_and_ends(up: Callable[..., Up]) -> None:
    running = up()
    running.wait_for(LAST_LINE, START_S)
    pids = running.children()
    assert set(pids) == {"lockstep_worker", "lockstep_scheduler", "lockstep_router", "valkey-server"}

    before = running.ask()["choices"][0]["message"]["content"]
    assert before and running.ask()["choices"][0]["message"]["content"] == before

    os.kill(pids["lockstep_worker"], signal.SIGKILL)
    running.wait_for("worker-0 was killed by SIGKILL", 5)
    running.wait_for("worker-0 is ready again", START_S)
    until(lambda: httpx.get(f"{running.url}/readyz").status_code == 200, START_S)
    assert running.ask()["choices"][0]["message"]["content"] == before
    assert running.children()["lockstep_worker"] != pids["lockstep_worker"]

    everything = [*pids.values(), *running.children().values()]
    assert running.stop(signal.SIGTERM) < STOP_S
    assert running.process.returncode == 0
    nothing_left(running, everything)


def test_without_redis_and_with_a_key(up: Callable[..., Up]) -> None:
    running = up("--redis-url", "none", "--api-key", "hunter2", "--served-model-name", "mine")
    running.wait_for(LAST_LINE, START_S)
    assert "valkey-server" not in running.children()
    assert not any("hunter2" in line for line in running.out)
    assert httpx.get(f"{running.url}/v1/models").status_code == 401
    chat = [
        sys.executable,
        "-m",
        "lockstep_cli",
        "chat",
        "--url",
        f"{running.url}/v1",
        "--max-tokens",
        "5",
        "Say hello.",
    ]
    refused = subprocess.run(chat, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "401" in refused.stderr
    env = {**os.environ, "LOCKSTEP_API_KEY": "hunter2"}
    answered = subprocess.run(chat, capture_output=True, text=True, timeout=60, env=env)
    assert answered.returncode == 0 and answered.stdout.strip() and re.search(r"\d tokens, .* tok/s", answered.stderr)
    pids = list(running.children().values())
    assert running.stop(signal.SIGINT) < STOP_S
    nothing_left(running, pids)


def test_two_coupled_ranks_give_the_same_answer_and_die_with_their_supervisor(up: Callable[..., Up]) -> None:
    running = up("--dp", "2", "--lockstep", "always")
    running.wait_for(LAST_LINE, 2 * START_S)
    answers = {running.ask(max_tokens=16)["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(answers) == 1
    pids = list(running.children().values())
    running.stop(signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in pids), 2)


def test_a_model_that_cannot_be_loaded_ends_it_with_the_workers_words(up: Callable[..., Up], home: Path) -> None:
    folder = home / "no-model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).symlink_to(models.directory_of(models.DEFAULT_MODEL) / name)
    (folder / "config.json").write_text('{"architectures": ["UnheardOf"], "model_type": "unheard-of"}')
    running = up(str(folder))
    assert running.process.wait(START_S) == 1
    running.wait_for("UnheardOf", 5)
    shutil.rmtree(folder)
    nothing_left(running, [])


def test_a_port_in_use_is_refused_at_once(up: Callable[..., Up]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = up("--port", str(port))
        assert running.process.wait(10) == 2
    running.wait_for(f"--port {port} is in use", 5)
