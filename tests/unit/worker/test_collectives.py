"""Communicators over real gloo, between threads; the laws of a group."""

from __future__ import annotations

import pytest
import torch

from lockstep_worker.collectives import Alone, Communicator, Group, Place
from tests.ranks import run_ranks

SIZES = [1, 2, 3]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_everybody_gets_what_everybody_has(size: int, dtype: torch.dtype) -> None:
    def work(group: Group) -> None:
        world = group.world
        mine = torch.full((2, 3), world.rank).to(dtype)
        expected = torch.stack([torch.full((2, 3), rank).to(dtype) for rank in range(size)])
        later = world.all_gather_later("later", mine)
        assert torch.equal(world.all_gather("now", mine), expected)
        assert torch.equal(later(), expected)
        assert torch.equal(world.broadcast("from the last", mine.clone(), size - 1), expected[-1])

    run_ranks(size, 1, work)


@pytest.mark.parametrize("size", SIZES)
def test_rows_go_where_they_are_sent_in_order_of_rank(size: int) -> None:
    def work(group: Group) -> None:
        world = group.world
        counts = [[(a + 2 * b) % 3 for b in range(size)] for a in range(size)]  # [from][to]; some are 0
        sent = counts[world.rank]
        rows = [torch.tensor([world.rank, to, i]) for to in range(size) for i in range(sent[to])]
        x = torch.stack(rows) if rows else torch.empty(0, 3, dtype=torch.int64)
        received = [counts[other][world.rank] for other in range(size)]
        result = world.all_to_all("rows", x, sent, received)
        assert result.tolist() == [[other, world.rank, i] for other in range(size) for i in range(received[other])]
        parts = torch.arange(size)[:, None] + 10 * world.rank
        assert world.swap("parts", parts).tolist() == [[10 * other + world.rank] for other in range(size)]

    run_ranks(size, 1, work)


def test_places_and_communicators_of_a_group_of_two_by_two() -> None:
    def work(group: Group) -> tuple[int, ...]:
        place = group.place
        assert group.cp.rank == place.cp_rank and group.world.rank == place.rank
        mates = group.cp.all_gather("mates", torch.tensor([place.rank])).flatten().tolist()
        assert group.meet(place.rank) == 3
        return tuple(mates)

    assert run_ranks(2, 2, work) == [(0, 1), (0, 1), (2, 3), (2, 3)]


@pytest.mark.parametrize("size", [1, 4])
def test_a_plan_reaches_all_followers_as_it_is(size: int) -> None:
    plans = [b"\0plan\xff", b"", b"x" * 100_000]

    def work(group: Group) -> list[bytes]:
        if not group.follows:
            for plan in plans:
                group.forward_plan(plan)
            return plans
        return [group.next_plan() for _ in plans]

    assert run_ranks(1, size, work) == [plans] * size


def test_collectives_are_counted_within_a_step_alike_on_all_ranks() -> None:
    def work(group: Group) -> list[str]:
        for seq, step in ((1, 0), (1, 1), (2, 0)):
            group.begin(seq, step)
            group.world.all_gather("a", torch.zeros(1))
            group.world.maximum("b", torch.zeros(1))
        return [record.id.key for record in group.recorder.history()]

    first, second = run_ranks(2, 1, work)
    assert (
        first
        == second
        == [f"{s}.{t}.world.{i}.{n}" for s, t in ((1, 0), (1, 1), (2, 0)) for i, n in ((0, "a"), (1, "b"))]
    )


def test_nobody_needs_nobody() -> None:
    alone: Communicator = Alone()
    x = torch.arange(6).view(1, 6)
    assert torch.equal(alone.all_gather("x", x), x[None])
    assert torch.equal(alone.all_to_all("x", x, [1], [1]), x)
    assert torch.equal(alone.swap("x", x), x)
    assert not Group().coupled and not Group(Place(1, 2, 0)).follows and Group(Place(1, 2, 1)).follows
