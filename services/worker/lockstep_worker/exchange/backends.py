"""Which exchange a group uses: as the worker was told, never another one than that."""

from __future__ import annotations

import importlib.util
import logging
from typing import Final

import torch

from lockstep_common.errors import ConfigError, Unsupported
from lockstep_worker.collectives import Group, share_memory
from lockstep_worker.exchange import Exchange
from lockstep_worker.exchange.all_to_all import AllToAll
from lockstep_worker.exchange.symmetric import Room, Symmetric

log = logging.getLogger(__name__)

BACKENDS: Final = ("auto", "all_to_all", "symmetric", "deepep")


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, *, nccl: bool, deterministic: bool, captures: bool
) -> str:
    """What a worker can tell by itself: deepep, symmetric or all_to_all; auto is deepep where it is installed and takes the model,
    and stays auto where the group must find out whether its workers can share memory, see `open_exchange`.

    ConfigError if what was asked for cannot be. All workers of a group must come to the same answer, which is part of what they
    compare.
    """
    if name not in BACKENDS:
        raise ConfigError(f"all2all_backend {name}: expected one of {', '.join(BACKENDS)}", param="all2all_backend")
    between = []
    if device.type != "cuda":
        between.append(f"it needs CUDA, this worker computes on a {device.type}")
    elif not nccl:
        between.append("it needs a GPU a worker, and NCCL between them (--collectives auto)")
    against = {"deepep": [*between, *_against_deepep(dtype, deterministic)], "symmetric": [*between]}
    if not captures:
        against["symmetric"].append("it is for captured steps (--no-enforce-eager)")
    if reasons := against.get(name):
        raise ConfigError(f"all2all_backend {name}: {'; '.join(reasons)}", param="all2all_backend")
    if name != "auto":
        return name
    return "deepep" if not against["deepep"] else "auto" if not against["symmetric"] else "all_to_all"


def open_exchange(
    backend: str, group: Group, room: Room, device: torch.device, *, tokens: int, limit_s: float
) -> Exchange:
    """Of a backend that `choose_backend` chose; auto: symmetric if memory can be shared, else all_to_all.

    room: of captured steps; tokens: the most that a pass of any rank brings; limit_s: after which a wait for another rank's rows is
    given up. All ranks call it together. Unsupported if the backend was asked for and cannot be.
    """
    if backend == "deepep":
        from lockstep_worker.exchange.deepep import DeepEp

        slots = room.ranks * room.local
        return DeepEp(group.world.process_group(), slots, tokens=tokens, hidden=room.hidden, chosen=room.chosen)
    if backend in ("symmetric", "auto"):
        try:
            memory = share_memory(group, sum(room.sizes), device)
        except Unsupported as error:
            if backend == "symmetric":
                raise Unsupported(f"all2all_backend symmetric: {error.message}; use all_to_all") from error
            log.info("tokens go to experts by all_to_all: %s", error.message)
        else:
            exchange = Symmetric(group, room, memory, limit_s=limit_s)
            group.attach(exchange)
            log.info("tokens of captured steps go to experts through symmetric memory, %d bytes", sum(room.sizes))
            return exchange
    return AllToAll(group.world, room.ranks * room.local)


def _against_deepep(dtype: torch.dtype, deterministic: bool) -> list[str]:
    reasons = []
    if dtype != torch.bfloat16:
        reasons.append(f"it carries bfloat16, this model is {str(dtype).removeprefix('torch.')}")
    if deterministic:
        reasons.append("it adds results in an order that depends on where experts are (--deterministic off)")
    if importlib.util.find_spec("deep_ep") is None:
        reasons.append("the module deep_ep is not installed (build it from DeepEP's sources, 2.x)")
    return reasons
