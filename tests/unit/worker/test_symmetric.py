"""The exchange through shared windows: what `AllToAll` gives, bit by bit, also two at a time; and ranks that do not come."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from lockstep_common.errors import Unsupported
from lockstep_worker.collectives import Group, OverHost, SharedMemory, share_memory, shared_memory
from lockstep_worker.collectives.shared_memory import Renumbered
from lockstep_worker.exchange import DEDUPLICATED, EXPANDED
from lockstep_worker.exchange.all_to_all import AllToAll
from lockstep_worker.exchange.symmetric import Room, Symmetric
from lockstep_worker.overlap import last_of
from lockstep_worker.protocol import GroupLost
from tests.ranks import run_ranks
from tests.unit.worker.test_exchange import CHOSEN, HIDDEN, LOCAL, MOST, PATTERNS, apart_of, brought, identity

SIZES = [1, 2, 4]


def opened(group: Group, memory: list[torch.Tensor], room: Room, limit_s: float = 20.0) -> Symmetric:
    exchange = Symmetric(group, room, SharedMemory(memory), limit_s=limit_s)
    group.attach(exchange)
    return exchange


def made(size: int, *, apart: bool) -> tuple[Room, list[torch.Tensor]]:
    room = Room(size, LOCAL, MOST, HIDDEN, CHOSEN, torch.float32, apart)
    return room, [torch.zeros(sum(room.sizes), dtype=torch.uint8) for _ in range(size)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_results_are_those_of_all_to_all_bit_by_bit(size: int, apart: bool) -> None:
    room, memory = made(size, apart=apart)

    def work(group: Group) -> None:
        exchange, other = opened(group, memory, room), AllToAll(group.world, size * LOCAL)
        results = apart_of if apart else identity
        for number, pattern in enumerate(PATTERNS):
            mine = brought(pattern, group.world.rank, size, number)
            for capacity in (MOST, 0):
                for layout in (DEDUPLICATED, EXPANDED):
                    found = []
                    for way in (exchange, other):
                        arrived = last_of(
                            way.dispatch("e", mine.x, mine.ids, mine.weights, capacity=capacity, layout=layout)
                        )
                        finish = way.combine("e", results(arrived), arrived.handle, apart=apart)
                        found.append(finish(3 * mine.x, -mine.x))
                    assert torch.equal(*found)

    run_ranks(size, 1, work)


def test_two_halves_are_under_way_at_a_time() -> None:
    size, half = 2, (MOST + 1) // 2
    room, memory = made(size, apart=False)

    def work(group: Group) -> None:
        exchange = opened(group, memory, room)
        for number in range(6):
            mine = brought("random", group.world.rank, size, number)
            halves = [(mine.x[part], mine.ids[part], mine.weights[part]) for part in (slice(half), slice(half, None))]
            ways = [exchange.dispatch(f"e {i}", *operands, capacity=half) for i, operands in enumerate(halves)]
            for way in ways:
                next(way)  # both are under way before any of them is waited for
            finishes = []
            for way in ways:
                arrived = last_of(way)
                finishes.append(exchange.combine("e", identity(arrived), arrived.handle))
            with pytest.raises(ValueError, match="no free windows for 1 tokens"):
                last_of(exchange.dispatch("e 3", mine.x[:0], mine.ids[:0], mine.weights[:0], capacity=1))
            for (x, ids, weights), finish in zip(halves, finishes, strict=True):
                want = x + x * (weights * (ids >= 0)).sum(1, keepdim=True)
                torch.testing.assert_close(finish(x), want, rtol=0, atol=1e-5)

    run_ranks(size, 1, work)


def test_a_rank_that_does_not_come_is_named_and_nobody_waits_again() -> None:
    room, memory = made(2, apart=False)

    def work(group: Group) -> str:
        exchange = opened(group, memory, room, limit_s=0.2)
        if group.world.rank == 0:
            mine = brought("one rank", 0, 2, 1)
            arrived = last_of(exchange.dispatch("e", mine.x, mine.ids, mine.weights, capacity=MOST))
            exchange.combine("e", identity(arrived), arrived.handle)(mine.x)
            with pytest.raises(GroupLost, match=r"waited 0.2 s on the device for tokens or results of .*worker-1"):
                group.check()
        group.meet(0)
        group.close()
        assert exchange._memory.parts == ()
        return "done"

    assert run_ranks(2, 1, work) == ["done", "done"]


def test_a_group_that_is_given_up_waits_no_longer() -> None:
    room, memory = made(2, apart=False)

    def work(group: Group) -> None:
        exchange = opened(group, memory, room)
        if group.world.rank == 0:
            threading.Timer(0.1, group.abort).start()
            mine = brought("random", 0, 2, 1)
            last_of(exchange.dispatch("e", mine.x, mine.ids, mine.weights, capacity=MOST))
            with pytest.raises(GroupLost, match="given up"):
                group.check()

    run_ranks(2, 1, work)


def test_what_does_not_fit_is_an_error() -> None:
    room, memory = made(1, apart=True)
    exchange = Symmetric(Group(), room, SharedMemory(memory), limit_s=1.0)
    mine = brought("random", 0, 1, 3)
    with pytest.raises(ValueError, match=r"e: \d tokens, but all ranks agreed on at most 1"):
        last_of(
            exchange.dispatch("e", mine.x.repeat(2, 1), mine.ids.repeat(2, 1), mine.weights.repeat(2, 1), capacity=1)
        )
    arrived = last_of(exchange.dispatch("e", mine.x, mine.ids, mine.weights, capacity=MOST))
    with pytest.raises(ValueError, match="come back apart"):
        exchange.combine("e", identity(arrived), arrived.handle)


def test_ranks_without_nccl_share_no_memory() -> None:
    def work(group: Group) -> None:
        with pytest.raises(Unsupported, match="through their hosts"):
            share_memory(group, 16, torch.device("cpu"))

    run_ranks(2, 1, work)


@pytest.mark.parametrize("failing", [0, 1, None])
def test_memory_is_shared_by_all_ranks_or_by_none(monkeypatch: pytest.MonkeyPatch, failing: int | None) -> None:
    def mapped(world: Any, nbytes: int, device: torch.device) -> SharedMemory:
        if world.rank == failing:
            raise KeyError("no such mapping")
        return SharedMemory([torch.zeros(nbytes, dtype=torch.uint8)] * 2)

    monkeypatch.setattr(shared_memory, "OverNccl", OverHost)  # as if NCCL joined them
    monkeypatch.setattr(shared_memory, "_map", mapped)

    def work(group: Group) -> str:
        try:
            return str(len(share_memory(group, 16, torch.device("cpu")).parts))
        except Unsupported as error:
            return error.message

    found = run_ranks(2, 1, work)
    if failing is None:
        assert found == ["2", "2"]
    else:
        assert "no such mapping" in found[failing] and "another worker could not map it" in found[1 - failing]


def test_workers_of_several_machines_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "OverNccl", OverHost)
    names = iter(range(2))
    monkeypatch.setattr(shared_memory, "_machine", lambda: torch.tensor([next(names)]))

    def work(group: Group) -> None:
        with pytest.raises(Unsupported, match="within one machine"):
            share_memory(group, 16, torch.device("cpu"))

    run_ranks(2, 1, work)


def test_what_takes_too_long_is_given_up() -> None:
    over = threading.Event()
    assert shared_memory._within(0.05, over.wait) == "not mapped within 0.05 s"
    over.set()


def test_keys_of_ranks_that_have_counted_differently_meet() -> None:
    """A process that was in other groups before has a higher number; torch's own code calls the store, as here a prefix does."""
    inner, patience = HashStore(), timedelta(seconds=1)
    stores = [Renumbered(inner, patience) for _ in range(2)]
    young, old = (PrefixStore("p", store) for store in stores)
    for exchange in range(2):
        young.set(f"memory/{exchange}/0", f"young {exchange}")
        old.set(f"memory/{exchange + 7}/1", f"old {exchange}")
        young.wait([f"memory/{exchange}/1"])
        assert young.get(f"memory/{exchange}/1") == f"old {exchange}".encode()
        assert old.get(f"memory/{exchange + 7}/0") == f"young {exchange}".encode()
    with pytest.raises(RuntimeError):
        young.wait(["memory/2/1"])
