"""A loaded model, where it runs and the room it has, and what a worker says of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep_common.steps import KvGroup, WorkerFacts
from lockstep_worker.collectives import ONLY, Place
from lockstep_worker.models import Model
from lockstep_worker.sampling import Sampler, SamplingRows


class Mark(Protocol):
    """A point in an asynchronous device's work."""

    def synchronize(self) -> None:
        """Returns when the device has come to it."""
        ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


@dataclass(frozen=True)
class Loaded:
    """A model, where it runs, and the room it has.

    `make_sampler` gets the sampling state of the rows. `mark` marks the end of the work queued so far on an asynchronous device;
    None: operations are done when they return. `graphs`: decode steps are captured. `place` that the worker was started for;
    `nccl`: devices of a group talk to each other, else their hosts do.
    """

    model: Model
    make_sampler: Callable[[SamplingRows], Sampler]
    name: str
    dtype: str
    device: torch.device
    deterministic: bool
    max_rows: int
    max_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    mark: Callable[[], Mark] | None = None
    graphs: bool = False
    place: Place = ONLY
    nccl: bool = True

    def config_hash(self) -> str:
        """Over everything that must be equal on all ranks of a group."""
        kept = tuple(_name(spec.dtype) for spec in self.model.kv_specs())
        parts = (
            self.model.config_hash,
            self.dtype,
            *kept,
            self.device.type,
            self.deterministic,
            self.block_size,
        )
        return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]

    def facts(self, place: Place, num_blocks: int, kept_epoch: int) -> WorkerFacts:
        """Of a worker at this place of a group, whose cache is as the plans of `kept_epoch` have left it (0: of none)."""
        experts = self.model.experts
        return WorkerFacts(
            model=self.name,
            config_hash=self.config_hash(),
            device=str(self.device),
            dtype=self.dtype,
            vocab_size=self.model.vocab_size,
            max_model_len=self.max_model_len,
            max_rows=self.max_rows,
            weights_epoch=0,
            groups=tuple(
                KvGroup(spec.kind, self.block_size * place.cp, num_blocks, _name(spec.dtype))
                for spec in self.model.kv_specs()
            ),
            deterministic=self.deterministic and self.model.deterministic,
            routed_experts=self.model.routed_experts,
            moe_layers=0 if experts is None else len(experts.layers),
            routed_expert_count=0 if experts is None else experts.experts,
            expert_slots=0 if experts is None else experts.slots,
            expert_groups=1 if experts is None else experts.groups,
            generated_reusable=self.model.generated_reusable,
            dp=self.place.dp,
            cp=self.place.cp,
            rank=self.place.rank,
            kept_epoch=kept_epoch,
            max_batched_tokens=self.max_batched_tokens,
        )


def cuda_mark() -> Mark:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
