"""Groups of workers that step together: dp x cp of them, each with its place, and the communicators between them.

A group of one has nobody to talk to. In a larger one a DP rank's `cp` workers share its requests and KV cache; the routed
experts are sharded over all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lockstep_common.errors import Conflict, DeadlineExceeded, Unavailable
from lockstep_common.steps import GroupConfig
from lockstep_worker.collectives.communicator import Alone, Communicator, OverHost, OverNccl
from lockstep_worker.collectives.record import Recorder
from lockstep_worker.collectives.watchdog import Board, Watchdog, first_difference, shared
from lockstep_worker.protocol import GroupLost

log = logging.getLogger(__name__)

LONGEST_PLAN: Final = 64 << 20  # bytes
ALONE: Final = Alone()
GIVEN_UP: Final = 2  # deadlines after which a collective through the hosts fails: gloo cannot be interrupted before


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands in its group: rank = dp_rank * cp + cp_rank."""

    dp: int = 1
    cp: int = 1
    rank: int = 0

    @property
    def size(self) -> int:
        return self.dp * self.cp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.cp

    @property
    def cp_rank(self) -> int:
        return self.rank % self.cp

    def share(self, rank: int) -> tuple[str, ...]:
        """The communicators that this rank and another one have in common."""
        return ("everybody", "world", "cp") if rank // self.cp == self.dp_rank else ("everybody", "world")


ONLY: Final = Place()


@dataclass(frozen=True, slots=True)
class Membership:
    """What a rank brings into a group."""

    config_hash: str
    num_blocks: int


class OnDevice(Protocol):
    """What waits for other ranks on a device, by itself, as long as a group lasts."""

    def fault(self) -> str:
        """Which ranks a wait ended without; empty: none."""
        ...

    def abort(self) -> None:
        """Ends its waits; from any thread."""
        ...

    def close(self) -> None:
        """Gives back its memory, when the group is left."""
        ...


class Group:
    """The other workers, as the runner sees them; without arguments a group of one.

    `world` and `cp` carry what the model computes, from device to device where they can: all workers, and those of this DP
    rank. `control` is for the host: those of this DP rank. `everybody` too: all workers.
    """

    def __init__(
        self,
        place: Place = ONLY,
        num_blocks: int = 0,
        *,
        world: Communicator = ALONE,
        cp: Communicator = ALONE,
        control: Communicator = ALONE,
        everybody: Communicator = ALONE,
        recorder: Recorder | None = None,
        board: Board | None = None,
        peers: tuple[str, ...] = (),
        on_close: Callable[[], None] = lambda: None,
        timeout_s: float = 60.0,
    ) -> None:
        self.place = place
        self.num_blocks = num_blocks  # agreed: the smallest of all ranks
        self.world = world
        self.cp = cp
        self.control = control
        self.everybody = everybody
        self.recorder = recorder or Recorder()
        self._board = board
        self._peers = peers
        self._on_close = on_close
        self.timeout_s = timeout_s  # after which waits for others are given up
        self._on_device: list[OnDevice] = []
        self.aborted = False

    @property
    def coupled(self) -> bool:
        return self.place.size > 1

    @property
    def follows(self) -> bool:
        """Whether plans come from the DP rank's driver."""
        return self.place.cp_rank > 0

    def begin(self, seq: int, step: int) -> None:
        """What comes belongs to this step. GroupLost if the group was given up."""
        self.check()
        self.recorder.at(seq, step)

    def meet(self, mine: int) -> int:
        """Waits for everybody; the largest number that any rank brought. GroupLost if another rank is gone."""
        return int(self.everybody.maximum("step", torch.tensor([mine])))

    def compare(self, seq: int) -> None:
        """Compares all ranks' collectives of a plan that has run; GroupLost names the first difference. For debugging: it costs
        several messages a plan."""
        if self._board is None:
            return
        mine = [f"{seq}.begins.everybody.0.plan", *self.recorder.of_plan(seq)]
        self._board.post(self.place.rank, "\n".join(mine))
        self.meet(0)
        for rank, peer in enumerate(self._peers):
            theirs, together = self._board.read(rank).splitlines(), self.place.share(rank)
            if difference := first_difference(shared(mine, together), shared(theirs, together)):
                raise GroupLost(f"the collectives of plan {seq} are not those of {peer}, which {difference}")
        self.meet(0)

    def forward_plan(self, data: bytes) -> None:
        """The driver's: gives the bytes of a plan (none: a sign of life) to its followers."""
        if self.control.size == 1:
            return
        self.control.broadcast("plan, length", torch.tensor([len(data)]))
        if data:
            self.control.broadcast("plan", torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def next_plan(self) -> bytes:
        """A follower's: the bytes of the next plan; none if the driver only gave a sign of life."""
        length = int(self.control.broadcast("plan, length", torch.zeros(1, dtype=torch.int64)))
        if not 0 <= length <= LONGEST_PLAN:
            raise Conflict(f"the driver announced a plan of {length} bytes")
        if not length:
            return b""
        return self.control.broadcast("plan", torch.empty(length, dtype=torch.uint8)).numpy().tobytes()

    def attach(self, waiting: OnDevice) -> None:
        """It belongs to this group from now on."""
        self._on_device.append(waiting)

    def peer(self, rank: int) -> str:
        """The name of a rank."""
        return self._peers[rank] if rank < len(self._peers) else f"rank {rank}"

    def abort(self) -> None:
        """Gives the group up: collectives that wait on a device come to an end, with results that mean nothing. From any thread."""
        self.aborted = True
        for waiting in self._on_device:
            waiting.abort()
        for communicator in (self.world, self.cp):
            communicator.abort()

    def check(self) -> None:
        """GroupLost if the group was given up, or a device has."""
        if self.aborted:
            raise GroupLost("the group was given up")
        if faults := [fault for waiting in self._on_device if (fault := waiting.fault())]:
            raise GroupLost("; ".join(faults))

    def close(self) -> None:
        self._on_close()
        for waiting in self._on_device:
            waiting.abort()
        for communicator in (self.world, self.cp, self.control, self.everybody):
            communicator.close()
        for waiting in self._on_device:  # nothing on the device waits any more
            waiting.close()


def form(
    config: GroupConfig,
    mine: Membership,
    device: torch.device,
    *,
    deadline_s: float,
    timeout_s: float,
    report: Callable[[str], None],
    nccl: bool = True,
    debug: bool = False,
) -> Group:
    """Joins the group of `config`: a group of one at once, a coupled one when everybody is there.

    `nccl`: devices talk to each other; else through their hosts, as ranks must that share a GPU. `debug`: before each collective
    through the hosts all compare which one they begin. Conflict: unequal config
    hashes; DeadlineExceeded: names the missing ranks.
    """
    place = Place(config.dp, config.cp, config.rank)
    if place.size == 1:
        return Group(place, mine.num_blocks)
    if (config.dp_rank, config.cp_rank) != (place.dp_rank, place.cp_rank):
        raise Conflict(
            f"rank {config.rank} of {config.dp} x {config.cp} is not dp {config.dp_rank}, cp {config.cp_rank}"
        )
    peers = config.peers or tuple(f"rank {rank}" for rank in range(place.size))
    timeout = timedelta(seconds=timeout_s)
    store = _open_store(config, peers[0], place, timeout)
    num_blocks = _agree(store, mine, place, peers, timeout)
    recorder = Recorder()
    host = peers[place.rank].rpartition(":")[0] if config.peers else config.store_host

    def over(name: str, rank: int, size: int, *, of_device: bool, recorder: Recorder = recorder) -> Communicator:
        if size == 1:
            return ALONE
        scope, named = name.partition("-")[0], PrefixStore(name, store)
        if of_device and nccl and device.type == "cuda":
            return OverNccl(scope, named, recorder, rank, size, timeout=timeout)
        patience = timedelta(seconds=GIVEN_UP * deadline_s)
        communicator = OverHost(scope, named, recorder, rank, size, host=host, timeout=patience)
        if debug and scope != "control":
            communicator.compared = peers if size == place.size else peers[place.rank - rank :][:size]
        return communicator

    try:
        everybody = over("everybody", place.rank, place.size, of_device=False)
        world = over("world", place.rank, place.size, of_device=True)
        # Signs of life come when nothing else does, on each DP rank at another time: they are no part of the order of steps.
        control = over(f"control-{place.dp_rank}", place.cp_rank, place.cp, of_device=False, recorder=Recorder())
        cp = over(f"cp-{place.dp_rank}", place.cp_rank, place.cp, of_device=True)
    except RuntimeError as error:
        raise Unavailable(f"the group's workers cannot connect to each other: {error}") from error
    board = StoreBoard(store)
    watchdog = Watchdog(
        recorder, board, rank=place.rank, peers=peers, deadline_s=deadline_s, report=report, together=place.share
    )
    watchdog.start()
    return Group(
        place,
        num_blocks,
        world=world,
        cp=cp,
        control=control,
        everybody=everybody,
        recorder=recorder,
        board=board,
        peers=peers,
        on_close=watchdog.stop,
        timeout_s=timeout_s,
    )


def _open_store(config: GroupConfig, host: str, place: Place, timeout: timedelta) -> Store:
    try:
        store = TCPStore(
            config.store_host,
            config.store_port,
            world_size=place.size,
            is_master=place.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
        )
    except (RuntimeError, DistError) as error:
        where = f"{config.store_host}:{config.store_port}"
        raise Unavailable(f"the group's store at {where} (hosted by {host}) cannot be used: {error}") from error
    return PrefixStore(f"epoch-{config.epoch}", store)


def _agree(store: Store, mine: Membership, place: Place, peers: tuple[str, ...], timeout: timedelta) -> int:
    """Exchanges memberships through the store, before any process group exists; returns the blocks that all have."""
    store.set(f"member-{place.rank}", f"{mine.num_blocks} {mine.config_hash}")
    keys = [f"member-{rank}" for rank in range(place.size)]
    try:
        store.wait(keys, timeout)
    except (RuntimeError, DistError) as error:
        missing = [peer for key, peer in zip(keys, peers, strict=True) if not store.check([key])]
        raise DeadlineExceeded(f"not everybody came to the group; missing: {', '.join(missing)}") from error
    members = [store.get(key).decode().partition(" ") for key in keys]
    store.set(f"read-{place.rank}", "")
    if place.rank == 0:  # whoever hosts the store must not leave before everybody has read
        store.wait([f"read-{rank}" for rank in range(place.size)], timeout)
    smallest = mine.num_blocks
    for (blocks, _, config_hash), peer in zip(members, peers, strict=True):
        if config_hash != mine.config_hash:
            raise Conflict(
                f"config hash {mine.config_hash} of {peers[place.rank]} is not {config_hash} of {peer}: "
                "start all workers of a group with the same model and settings"
            )
        smallest = min(smallest, int(blocks))
    return smallest


class StoreBoard:
    """A board in the group's store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def post(self, rank: int, text: str) -> None:
        self._store.set(f"record-{rank}", text)

    def read(self, rank: int) -> str:
        key = f"record-{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""
