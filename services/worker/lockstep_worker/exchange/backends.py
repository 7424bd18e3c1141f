"""Which exchange a group uses: as the worker was told, never another one than that."""

from __future__ import annotations

import importlib.util
from typing import Final

import torch

from lockstep_common.errors import ConfigError
from lockstep_worker.collectives import Communicator
from lockstep_worker.exchange import Exchange
from lockstep_worker.exchange.all_to_all import AllToAll

BACKENDS: Final = ("auto", "all_to_all", "deepep")


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, *, nccl: bool, deterministic: bool) -> str:
    """all_to_all or deepep; auto: deepep where it is installed and takes the model. ConfigError if what was asked for cannot
    be; all workers of a group must come to the same answer, which is part of what they compare."""
    if name not in BACKENDS:
        raise ConfigError(f"all2all_backend {name}: expected one of {', '.join(BACKENDS)}", param="all2all_backend")
    reasons = []
    if device.type != "cuda":
        reasons.append(f"it needs CUDA, this worker computes on a {device.type}")
    elif not nccl:
        reasons.append("it needs a GPU a worker, and NCCL between them (--collectives auto)")
    if dtype != torch.bfloat16:
        reasons.append(f"it carries bfloat16, this model is {str(dtype).removeprefix('torch.')}")
    if deterministic:
        reasons.append("it adds results in an order that depends on where experts are (--deterministic off)")
    if importlib.util.find_spec("deep_ep") is None:
        reasons.append("the module deep_ep is not installed (build it from DeepEP's sources, 2.x)")
    if name == "deepep" and reasons:
        raise ConfigError(f"all2all_backend deepep: {'; '.join(reasons)}", param="all2all_backend")
    return "all_to_all" if name == "all_to_all" or reasons else "deepep"


def open_exchange(backend: str, world: Communicator, slots: int, *, tokens: int, hidden: int, chosen: int) -> Exchange:
    """Of a backend that `choose_backend` chose. tokens: the most that a pass of any rank brings; chosen: slots of a token."""
    if backend == "deepep":
        from lockstep_worker.exchange.deepep import DeepEp

        return DeepEp(world.process_group(), slots, tokens=tokens, hidden=hidden, chosen=chosen)
    return AllToAll(world, slots)
