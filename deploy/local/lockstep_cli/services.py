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


@dataclass(frozen=True)
class Seat:
    """A worker's place: its number in its group of dp x cp workers."""

    dp: int
    cp: int
    rank: int


def groups(config: UpConfig, routed_experts: bool) -> list[list[Seat]]:
    """The workers of each engine group. DP ranks are coupled if experts are sharded over them, or if the user says so."""
    coupled = routed_experts or config.lockstep == "always"
    count, dp = (1, config.dp) if coupled else (config.dp, 1)
    return [[Seat(dp, config.cp, rank) for rank in range(dp * config.cp)] for _ in range(count)]


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
    experts = has_routed_experts(directory)
    if (config.enable_eplb or config.num_redundant_experts) and not experts:
        flag = "--enable-eplb" if config.enable_eplb else "--num-redundant-experts"
        raise ConfigError(f"{flag}: {model_name(config, directory)} has no routed experts")
    if config.enable_dbo and not (experts and config.dp * config.cp > 1):
        why = "give --dp" if experts else f"{model_name(config, directory)} has none"
        raise ConfigError(f"--enable-dbo needs routed experts that several workers share: {why}")
    found = groups(config, experts)
    count = config.dp * config.cp
    addresses = [f"{LOOPBACK}:{port}" for port in machine.ports]
    _check_shards(config, found)
    workers, schedulers = addresses[:count], addresses[count : count + len(found) * config.shards]
    redis_url = config.redis_url or f"unix://{machine.valkey_socket}"
    seats = [seat for group in found for seat in group]
    services = [
        _worker(config, directory, machine, number, seat, workers[number], token) for number, seat in enumerate(seats)
    ]
    for number, group in enumerate(found):
        own = _Group(
            tuple(workers[number * len(group) : (number + 1) * len(group)]),
            tuple(schedulers[number * config.shards : (number + 1) * config.shards]),
        )
        for shard in range(config.shards):
            name = f"shard-{number * config.shards + shard}"
            services.append(_scheduler(config, model_name(config, directory), name, own, shard, redis_url, token))
    services.append(_router(config, directory, machine.rest_port, schedulers, redis_url, token))
    if machine.valkey and not config.redis_url:
        services.insert(0, Service("valkey", Role.VALKEY, machine.valkey, machine.valkey_socket))
    return tuple(services)


def _worker(
    config: UpConfig, directory: Path, machine: Machine, number: int, seat: Seat, address: str, token: str
) -> Service:
    env = {"LOCKSTEP_WORKER_INTERNAL_TOKEN": token}
    if machine.gpus and config.device != "cpu":
        env["CUDA_VISIBLE_DEVICES"] = machine.gpus[number]
    options = {
        "dp": seat.dp,
        "cp": seat.cp,
        "rank": seat.rank,
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
        "num-redundant-experts": config.num_redundant_experts,
        "threads": config.threads or max(1, machine.cores // (config.dp * config.cp)),
    }
    return _python(Role.WORKER, f"worker-{number}", "lockstep_worker", address, options, config, env)


@dataclass(frozen=True)
class _Group:
    """Addresses of an engine group's workers by rank, and of the schedulers that drive it."""

    workers: tuple[str, ...]
    schedulers: tuple[str, ...]


def _check_shards(config: UpConfig, found: list[list[Seat]]) -> None:
    if config.shards > 1 and len(found) > 1:
        raise ConfigError(
            f"--shards {config.shards}: without routed experts each of the {config.dp} ranks is a group with a scheduler of its "
            "own; leave it out, or couple the ranks with --lockstep always"
        )
    if config.shards > config.dp:
        raise ConfigError(f"--shards {config.shards}: each needs a DP rank at least, and there are {config.dp} (--dp)")


def _scheduler(
    config: UpConfig, model: str, name: str, group: _Group, shard: int, redis_url: str, token: str
) -> Service:
    options = {
        "workers": ",".join(group.workers),
        **({"shards": ",".join(group.schedulers), "shard": shard} if len(group.schedulers) > 1 else {}),
        "lockstep": config.lockstep,
        "max-num-seqs": config.max_num_seqs,
        "max-model-len": config.max_model_len,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "vote-interval-ms": config.vote_interval_ms,
        **_eplb(config),
        **_dbo(config),
        "redis-url": redis_url,
        "shard-id": name,
        "model": model,
    }
    env = {"LOCKSTEP_SCHEDULER_INTERNAL_TOKEN": token}
    label = name.replace("shard", "scheduler")
    return _python(Role.SCHEDULER, label, "lockstep_scheduler", group.schedulers[shard], options, config, env)


def _eplb(config: UpConfig) -> dict[str, object]:
    if not config.enable_eplb:
        return {}
    return {
        "enable-eplb": True,
        "eplb-window": config.eplb_window,
        "eplb-interval-s": config.eplb_interval_s,
        "eplb-threshold": config.eplb_threshold,
    }


def _dbo(config: UpConfig) -> dict[str, object]:
    if not config.enable_dbo:
        return {}
    return {
        "enable-dbo": True,
        "dbo-decode-token-threshold": config.dbo_decode_token_threshold,
        "dbo-prefill-token-threshold": config.dbo_prefill_token_threshold,
    }


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
    flags = [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items()]
    return Service(name, role, (sys.executable, "-m", module, *flags), address, env)
