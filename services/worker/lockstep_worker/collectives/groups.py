"""Groups of workers that step together. A group of one has no collectives; a coupled group has one a step at least."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lockstep_common.errors import Conflict, DeadlineExceeded, Unavailable
from lockstep_common.steps import GroupConfig
from lockstep_worker.collectives.record import CollectiveId, Recorder
from lockstep_worker.collectives.watchdog import Watchdog
from lockstep_worker.protocol import GroupLost

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Membership:
    """What a rank brings into a group."""

    config_hash: str
    num_blocks: int


class Group(Protocol):
    """The other workers, as the runner sees them."""

    coupled: bool
    num_blocks: int  # agreed: the smallest of all ranks

    def step(self, seq: int, step: int, live: int) -> int:
        """Begins a step together; returns the largest number of live rows of any rank. GroupLost if another is gone."""
        ...

    def close(self) -> None: ...


class Alone:
    """A group of one: steps need nobody."""

    coupled = False

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def step(self, seq: int, step: int, live: int) -> int:
        return live

    def close(self) -> None:
        pass


class Coupled:
    """A group over gloo on the CPU and, where the model runs on CUDA, NCCL for what stays on the device."""

    coupled = True

    def __init__(
        self,
        config: GroupConfig,
        mine: Membership,
        device: torch.device,
        *,
        deadline_s: float,
        timeout_s: float,
        report: Callable[[str], None],
    ) -> None:
        """Blocks until all ranks have come. Conflict: unequal config hashes; DeadlineExceeded: names the missing ranks."""
        self._rank = config.rank
        self._size = config.dp * config.cp
        self._peers = config.peers or tuple(f"rank {rank}" for rank in range(self._size))
        timeout = timedelta(seconds=timeout_s)
        try:
            store = TCPStore(
                config.store_host,
                config.store_port,
                world_size=self._size,
                is_master=config.rank == 0,
                timeout=timeout,
                wait_for_workers=False,
            )
        except (RuntimeError, dist.DistError) as error:
            where = f"{config.store_host}:{config.store_port}"
            raise Unavailable(
                f"the group's store at {where} (hosted by {self._peers[0]}) cannot be used: {error}"
            ) from error
        self._store = PrefixStore(f"epoch-{config.epoch}", store)
        self.num_blocks = self._agree(mine, timeout)
        dist.init_process_group("gloo", store=self._store, rank=self._rank, world_size=self._size, timeout=timeout)
        self.device_group = dist.new_group(backend="nccl") if device.type == "cuda" else dist.group.WORLD
        self._live = torch.zeros(1, dtype=torch.int64)
        self.recorder = Recorder()
        self._watchdog = Watchdog(
            self.recorder,
            _StoreBoard(self._store),
            rank=self._rank,
            peers=self._peers,
            deadline_s=deadline_s,
            report=report,
        )
        self._watchdog.start()

    def step(self, seq: int, step: int, live: int) -> int:
        self._live[0] = live
        collective = CollectiveId(seq, step, 0, "step")
        with self.recorder.during(collective):
            try:
                dist.all_reduce(self._live, op=dist.ReduceOp.MAX)
            except RuntimeError as error:
                raise GroupLost(f"the group broke in {collective}: {error}") from error
        return int(self._live[0])

    def close(self) -> None:
        self._watchdog.stop()
        dist.destroy_process_group()

    def _agree(self, mine: Membership, timeout: timedelta) -> int:
        """Exchanges memberships through the store, before any process group exists; returns the blocks that all have."""
        self._store.set(f"member-{self._rank}", f"{mine.num_blocks} {mine.config_hash}")
        keys = [f"member-{rank}" for rank in range(self._size)]
        try:
            self._store.wait(keys, timeout)
        except (RuntimeError, dist.DistError) as error:
            missing = [peer for key, peer in zip(keys, self._peers, strict=True) if not self._store.check([key])]
            raise DeadlineExceeded(f"not everybody came to the group; missing: {', '.join(missing)}") from error
        members = [self._store.get(key).decode().partition(" ") for key in keys]
        self._store.set(f"read-{self._rank}", "")
        if self._rank == 0:  # whoever hosts the store must not leave before everybody has read
            self._store.wait([f"read-{rank}" for rank in range(self._size)], timeout)
        smallest = mine.num_blocks
        for (blocks, _, config_hash), peer in zip(members, self._peers, strict=True):
            if config_hash != mine.config_hash:
                raise Conflict(
                    f"config hash {mine.config_hash} of {self._peers[self._rank]} is not {config_hash} of {peer}: "
                    "start all workers of a group with the same model and settings"
                )
            smallest = min(smallest, int(blocks))
        return smallest


class _StoreBoard:
    def __init__(self, store: Store) -> None:
        self._store = store

    def post(self, rank: int, waiting_in: str) -> None:
        self._store.set(f"waiting-{rank}", waiting_in)

    def read(self, rank: int) -> str:
        key = f"waiting-{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""


def form(
    config: GroupConfig,
    mine: Membership,
    device: torch.device,
    *,
    deadline_s: float,
    timeout_s: float,
    report: Callable[[str], None],
) -> Group:
    """Joins the group of `config`: a group of one at once, a coupled one when everybody is there."""
    if config.dp * config.cp == 1:
        return Alone(mine.num_blocks)
    return Coupled(config, mine, device, deadline_s=deadline_s, timeout_s=timeout_s, report=report)
