"""Several ranks in one process: a thread each, with real gloo communicators between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import HashStore, PrefixStore, Store

from lockstep_worker.collectives import Alone, Communicator, Group, OverHost, Place, Recorder
from lockstep_worker.collectives.groups import StoreBoard

T = TypeVar("T")

TIMEOUT_S = 20.0


def run_ranks(
    dp: int, cp: int, work: Callable[[Group], T], *, num_blocks: int = 0, timeout_s: float = TIMEOUT_S
) -> list[T]:
    """What `work` returns on each of the dp x cp ranks, by rank. Raises what the first rank that failed raised."""
    store: Store = HashStore()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            group = make_group(store, Place(dp, cp, rank), num_blocks, timeout_s=timeout_s)
            with torch.inference_mode():
                results[rank] = work(group)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(dp * cp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors.values():  # the first one: the others may have broken down with it
        raise error
    return [results[rank] for rank in range(dp * cp)]


def make_group(
    store: Store, place: Place, num_blocks: int = 0, *, timeout_s: float = TIMEOUT_S, board: bool = False
) -> Group:
    """A group over gloo whose ranks share the store; with a `board` it can compare its records. Blocks until all have come."""
    recorder = Recorder()

    def over(name: str, rank: int, size: int, recorder: Recorder = recorder) -> Communicator:
        if size == 1:
            return Alone()
        return OverHost(
            name.partition("-")[0],
            PrefixStore(name, store),
            recorder,
            rank,
            size,
            host="127.0.0.1",
            timeout=timedelta(seconds=timeout_s),
        )

    everybody = over("everybody", place.rank, place.size)
    world = over("world", place.rank, place.size)
    control = over(f"control-{place.dp_rank}", place.cp_rank, place.cp, Recorder())
    cp = over(f"cp-{place.dp_rank}", place.cp_rank, place.cp)
    return Group(
        place,
        num_blocks,
        world=world,
        cp=cp,
        control=control,
        everybody=everybody,
        recorder=recorder,
        board=StoreBoard(store) if board else None,
        peers=tuple(f"worker-{r}" for r in range(place.size)),
    )
