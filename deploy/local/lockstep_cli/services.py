"""Which processes `lockstep up` runs, with which arguments: a pure function of the settings and of what is free here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from lockstep_cli.config import UpConfig, model_name
from lockstep_common.errors import ConfigError

LOOPBACK = "127.0.0.1"
ROUTER_DRAIN_S = 0.5  # a person who presses Ctrl-C waits; streams end with an error in-band
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class Role(Enum):
    VALKEY = "valkey"
    WORKER = "worker"
    SCHEDULER = "scheduler"
    ROUTER = "router"


@dataclass(frozen=True)
class Service:
    """One process. `address` is where it answers: host:port, or the path of a socket."""

    name: str
    role: Role
    command: tuple[str, ...]
    address: str
    env: dict[str, str] = field(
        default_factory=dict, repr=False
    )  # secrets travel here: arguments are visible to everyone


@dataclass(frozen=True)
class Machine:
    """What is free on this machine."""

    cores: int
    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    ports: tuple[int, ...]  # one for each worker, then one for each scheduler
    rest_port: int
    valkey: tuple[str, ...] = ()  # the server's command; empty if there is none to start
    valkey_socket: str = ""


def groups(config: UpConfig, routed_experts: bool) -> list[list[int]]:
    """The DP ranks of each engine group. Ranks are coupled if experts are sharded over them, or if the user says so."""
    ranks = list(range(config.dp))
    return [ranks] if routed_experts or config.lockstep == "always" else [[rank] for rank in ranks]


def has_routed_experts(directory: Path) -> bool:
    """True if the model's config.json names a number of experts."""
    path = directory / "config.json"
    try:
        model = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    text = model.get("text_config", model)
    return any((text.get(name) or 0) > 1 for name in _EXPERT_FIELDS)


def compose(config: UpConfig, directory: Path, machine: Machine, token: str) -> tuple[Service, ...]:
    """All processes in the order in which they are started. `token` is what the services show each other."""
    coupled = groups(config, has_routed_experts(directory))
    worker_ports, scheduler_ports = machine.ports[: config.dp], machine.ports[config.dp :]
    workers = [f"{LOOPBACK}:{port}" for port in worker_ports]
    schedulers = [f"{LOOPBACK}:{port}" for port in scheduler_ports[: len(coupled)]]
    redis_url = config.redis_url or f"unix://{machine.valkey_socket}"
    services = [_worker(config, directory, machine, rank, workers[rank], token) for rank in range(config.dp)]
    for shard, ranks in enumerate(coupled):
        peers = [workers[rank] for rank in ranks]
        name = model_name(config, directory)
        services.append(_scheduler(config, name, shard, schedulers[shard], peers, redis_url, token))
    services.append(_router(config, directory, machine.rest_port, schedulers, redis_url, token))
    if machine.valkey and not config.redis_url:
        services.insert(0, Service("valkey", Role.VALKEY, machine.valkey, machine.valkey_socket))
    return tuple(services)


def _worker(config: UpConfig, directory: Path, machine: Machine, rank: int, address: str, token: str) -> Service:
    env = {"LOCKSTEP_WORKER_INTERNAL_TOKEN": token}
    if machine.gpus and config.device != "cpu":
        env["CUDA_VISIBLE_DEVICES"] = machine.gpus[rank]
    options = {
        "model": directory,
        "served-model-name": model_name(config, directory),
        "dtype": config.dtype,
        "kv-cache-dtype": config.kv_cache_dtype,
        "device": config.device,
        "max-num-seqs": config.max_num_seqs,
        "max-model-len": config.max_model_len,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "block-size": config.block_size,
        "kv-cache-memory-gb": config.kv_cache_memory_gb,
        "threads": config.threads or max(1, machine.cores // config.dp),
    }
    return _python(Role.WORKER, f"worker-{rank}", "lockstep_worker", address, options, config, env)


def _scheduler(
    config: UpConfig, model: str, shard: int, address: str, workers: Sequence[str], redis_url: str, token: str
) -> Service:
    options = {
        "workers": ",".join(workers),
        "lockstep": config.lockstep,
        "max-num-seqs": config.max_num_seqs,
        "max-model-len": config.max_model_len,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "vote-interval-ms": config.vote_interval_ms,
        "redis-url": redis_url,
        "shard-id": f"shard-{shard}",
        "model": model,
    }
    env = {"LOCKSTEP_SCHEDULER_INTERNAL_TOKEN": token}
    return _python(Role.SCHEDULER, f"scheduler-{shard}", "lockstep_scheduler", address, options, config, env)


def _router(
    config: UpConfig, directory: Path, port: int, schedulers: Sequence[str], redis_url: str, token: str
) -> Service:
    options = {
        "grpc-port": config.grpc_port,
        "schedulers": ",".join(schedulers),
        "redis-url": redis_url,
        "model": directory,
        "served-model-name": model_name(config, directory),
        "seed": config.seed,
        "drain-timeout": ROUTER_DRAIN_S,
    }
    env = {"LOCKSTEP_ROUTER_INTERNAL_TOKEN": token, "LOCKSTEP_ROUTER_API_KEY": config.api_key}
    return _python(Role.ROUTER, "router", "lockstep_router", f"{config.host}:{port}", options, config, env)


def _python(
    role: Role,
    name: str,
    module: str,
    address: str,
    options: dict[str, object],
    config: UpConfig,
    env: dict[str, str],
) -> Service:
    host, _, port = address.rpartition(":")
    options = {"host": host, "port": port, "log-level": config.log_level, **options}
    flags = [f"--{key}={value}" for key, value in options.items()]
    return Service(name, role, (sys.executable, "-m", module, *flags), address, env)
