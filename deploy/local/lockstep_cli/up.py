"""`lockstep up`: a model served on this machine, from the first download to the last process gone."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path

from lockstep_cli import models
from lockstep_cli.client import Probe
from lockstep_cli.config import UpConfig, model_name, parse_up
from lockstep_cli.machine import survey
from lockstep_cli.paths import cache_root, run_directory
from lockstep_cli.progress import ProgressDisplay
from lockstep_cli.services import Machine, Role, Service, compose
from lockstep_cli.supervisor import Supervisor
from lockstep_common import rpc
from lockstep_common.errors import ConfigError

_QUESTION = "Why is the sky blue?"


def run(argv: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM; the exit status."""
    config = parse_up(argv)
    with run_directory() as run_dir:
        machine = survey(config, run_dir)
        with ProgressDisplay(sys.stderr) as display:
            directory = models.resolve(config.model, display)
        return asyncio.run(_serve(config, directory, machine))


async def _serve(config: UpConfig, directory: Path, machine: Machine) -> int:
    begin = time.monotonic()
    stop, hurry = _signals()
    token = secrets.token_hex(16)
    services = compose(config, directory, machine, token)
    probe = Probe(rpc.Security(token=token))
    log_dir = _log_directory(config, machine.rest_port)
    supervisor = Supervisor(services, log_dir, _say, probe.ready)
    try:
        await supervisor.start()
        with ProgressDisplay(sys.stderr) as display:
            waiting = supervisor.wait_ready(_ReadyDisplay(display, probe).show, config.start_timeout_s)
            came_up = await _unless(stop, waiting)
        if came_up:
            took_s = time.monotonic() - begin
            print(banner(config, model_name(config, directory), machine.rest_port, log_dir, took_s), flush=True)
            await _unless(stop, supervisor.watch())
    finally:
        if stop.is_set():
            _say("stopping")
        if not await _unless(hurry, supervisor.stop()):
            await supervisor.kill()
        await probe.close()
    return 0


class _ReadyDisplay:
    """What each process is doing while we wait for it."""

    def __init__(self, display: ProgressDisplay, probe: Probe) -> None:
        self._display = display
        self._probe = probe

    async def show(self, service: Service, ready: bool) -> None:
        if ready:
            self._display(service.name, 1.0, "ready")
        elif service.role is Role.WORKER:
            fraction, message = await self._probe.loaded(service)
            self._display(service.name, min(fraction, 0.99), message.partition(":")[0] or "starting")
        else:
            self._display(service.name, 0.0, "starting" if service.role is Role.VALKEY else "waiting for the workers")


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """(stop, hurry): set by the first and by the second SIGINT, SIGTERM or SIGHUP."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    return stop, hurry


async def _unless(event: asyncio.Event, work: Awaitable[None]) -> bool:
    """True when `work` is done; False, and `work` is cancelled, when `event` is set before."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        waiter.cancel()
        task.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)


def _log_directory(config: UpConfig, port: int) -> Path:
    path = Path(config.log_dir).expanduser() if config.log_dir else cache_root() / "logs" / str(port)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir {path}: {error.strerror}") from error
    return path


def _say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def banner(config: UpConfig, model: str, port: int, log_dir: Path, took_s: float) -> str:
    """What a person needs once it runs."""
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    url = f"http://{host}:{port}/v1"
    grpc_line = f"\n  gRPC   {host}:{config.grpc_port}" if config.grpc_port else ""
    header = ' \\\n    -H "Authorization: Bearer $LOCKSTEP_API_KEY"' if config.api_key else ""
    key = 'os.environ["LOCKSTEP_API_KEY"]' if config.api_key else '"none"'
    import_os = "import os\n  " if config.api_key else ""
    return f"""
{model} is served, ready after {took_s:.1f} s

  REST   {url}{grpc_line}
  Logs   {log_dir}

Try it:

  curl -N {url}/chat/completions -H "Content-Type: application/json"{header} \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "{_QUESTION}"}}]}}'

  {import_os}from openai import OpenAI
  client = OpenAI(base_url="{url}", api_key={key})
  messages = [{{"role": "user", "content": "{_QUESTION}"}}]
  for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

or talk to it from another terminal: lockstep chat{"" if port == 8000 else f" --url {url}"}

Ctrl-C stops everything."""
