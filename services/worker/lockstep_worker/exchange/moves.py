"""A layer's experts change places: which worker sends which to whom, and the sending, through a staging area of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from lockstep_common.steps import U32
from lockstep_kernels.moe import ExpertWeights
from lockstep_worker.collectives import Communicator

STAGING_BYTES: Final = 64 << 20  # that are sent or received at a time


@dataclass(frozen=True, slots=True)
class Move:
    """One rank's part. Experts travel in the order of the rank at the other end, those of one rank ascending."""

    sources: tuple[int, ...]  # local slots that are sent
    sent: tuple[int, ...]  # how many of them to each rank
    targets: tuple[tuple[int, ...], ...]  # for each expert that comes, the local slots that it fills
    received: tuple[int, ...]  # how many of them from each rank


def plan_moves(old: U32, new: U32, ranks: int) -> tuple[Move, ...]:
    """What each rank does so that slot p holds expert new[p] where it held old[p]. Pure; the same on all ranks.

    A rank gets an expert that it needs once, whatever number of its slots it is for: from itself if it has it, else from the
    lowest rank that does. ValueError if an expert is nowhere.
    """
    held, wanted = np.split(old, ranks), np.split(new, ranks)
    first = {int(e): rank for rank in reversed(range(ranks)) for e in held[rank]}
    flows: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(ranks)]  # [from][to] experts
    for rank in range(ranks):
        for e in sorted({int(e) for e in wanted[rank][wanted[rank] != held[rank]]}):
            if e not in first:
                raise ValueError(f"expert {e} is in no slot")
            flows[rank if e in held[rank] else first[e]][rank].append(e)
    return tuple(_part(flows, held[rank], wanted[rank], rank) for rank in range(ranks))


def _part(flows: list[list[list[int]]], held: U32, wanted: U32, rank: int) -> Move:
    sent, received = flows[rank], [flow[rank] for flow in flows]
    changed = wanted != held
    return Move(
        tuple(int(np.flatnonzero(held == e)[0]) for flow in sent for e in flow),
        tuple(len(flow) for flow in sent),
        tuple(tuple(np.flatnonzero(changed & (wanted == e)).tolist()) for flow in received for e in flow),
        tuple(len(flow) for flow in received),
    )


def exchange_experts(
    world: Communicator, name: str, weights: ExpertWeights, moves: tuple[Move, ...], *, staging: int = STAGING_BYTES
) -> ExpertWeights:
    """This rank's experts after the moves. All ranks take part, those that neither send nor receive too, if any does.

    Weights that lie in stacks are written over in place: a piece of every expert that moves is on its way before that piece of
    any is written. `staging`: bytes of the pieces at a time, of one byte an expert at least.
    """
    most = max(max(len(move.sources), len(move.targets)) for move in moves)
    if most == 0:
        return weights
    move = moves[world.rank]
    sources = [weights.numbers(slot) for slot in move.sources]
    stacked = weights.gate_up is not None
    fitting = weights.numbers(0)
    targets = [
        weights.numbers(slots[0]) if stacked else tuple(torch.empty_like(part) for part in fitting)
        for slots in move.targets
    ]
    for part, like in enumerate(fitting):
        outgoing, incoming = ([_bytes(numbers[part]) for numbers in side] for side in (sources, targets))
        for piece in _pieces(like.nbytes, max(1, staging // most)):
            x = _bytes(like).new_empty(len(outgoing), piece.stop - piece.start)
            for row, data in zip(x, outgoing, strict=True):
                row.copy_(data[piece])
            arrived = world.all_to_all(f"{name}, moved", x, move.sent, move.received)
            for data, row in zip(incoming, arrived, strict=True):
                data[piece] = row
    if not stacked:
        filled = zip(move.targets, targets, strict=True)
        return weights.replaced({slot: (gate, up, down) for slots, (gate, up, down) in filled for slot in slots})
    for slots, numbers in zip(move.targets, targets, strict=True):
        for slot in slots[1:]:
            for to, part_numbers in zip(weights.numbers(slot), numbers, strict=True):
                to.copy_(part_numbers)
    return weights


def _pieces(size: int, length: int) -> Iterator[slice]:
    return (slice(start, min(start + length, size)) for start in range(0, size, length))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
