"""The ranks of one group as processes of this machine, for measurements of what they do together."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from lockstep_common.errors import DeadlineExceeded, Unavailable
from lockstep_common.steps import GroupConfig
from lockstep_worker.collectives import Group, Membership, Place, form

_TIMEOUT_S = 60.0

Settings = TypeVar("Settings")
Rows = list[dict[str, Any]]
Measure = Callable[[Group, torch.device, Settings], Rows]


def run(dp: int, cp: int, measure: Measure[Settings], settings: Settings, *, device: str = "cpu") -> Rows:
    """What `measure`, a function of a module, gives on each rank, by rank; with "cuda" rank i has GPU i. One CPU thread a rank.

    DeadlineExceeded if the ranks do not answer, Unavailable if one of them failed.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(dp * cp):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (Place(dp, cp, rank), port, device, measure, settings, theirs)
        process = context.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [row for rank, pipe in enumerate(pipes) for row in _answer(pipe, rank)]
    finally:
        for process in processes:
            process.join(1)
            process.kill()


def _answer(pipe: Connection, rank: int) -> Rows:
    if not pipe.poll(4 * _TIMEOUT_S):
        raise DeadlineExceeded(f"rank {rank} has not answered within {4 * _TIMEOUT_S:.0f} s")
    try:
        rows: Rows = pipe.recv()
    except EOFError:
        raise Unavailable(f"rank {rank} ended without an answer; what it said stands above") from None
    return rows


def _rank(place: Place, port: int, name: str, measure: Measure[Any], settings: Any, pipe: Connection) -> None:
    torch.set_num_threads(1)
    device = torch.device(name, place.rank) if name == "cuda" else torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    peers = tuple(f"127.0.0.1:{rank}" for rank in range(place.size))
    store = ("127.0.0.1", port)
    config = GroupConfig(
        1, 1, place.rank, place.dp_rank, place.cp_rank, place.dp, place.cp, *store, 1, 1, 1, 1, 1, peers
    )
    group = form(config, Membership("", 1), device, deadline_s=_TIMEOUT_S / 2, timeout_s=_TIMEOUT_S, report=print)
    with torch.inference_mode():
        pipe.send(measure(group, device, settings))
    group.meet(0)
    group.close()
