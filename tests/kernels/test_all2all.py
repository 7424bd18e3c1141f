"""The exchange between windows: kernels and their reference against what experts that change nothing must give back, step by step.

All ranks' windows lie in one address space, and each part of an exchange runs on all ranks before the next one begins: the
interpreter runs one program after the other, so nobody may wait for what comes later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels import all2all
from lockstep_kernels.all2all import Peers, State, cut, reference, window_bytes
from tests.kernels.device import DEVICE, ON_GPU

from lockstep_kernels.all2all import kernel  # isort: skip  (after tests.kernels.device)

LOCAL = 2
LIMIT = 10**10 if ON_GPU else 20  # ns, or polls
CLOCK: dict[str, Any] = {"pdl": False, "clock": ON_GPU}
PATTERNS = ("random", "one expert", "none", "some ranks are empty", "full")
ROUTINGS = st.lists(st.tuples(st.sampled_from(PATTERNS), st.integers(0, 10**6)), min_size=1, max_size=3)


@dataclass(frozen=True)
class Shape:
    ranks: int
    capacity: int
    hidden: int
    chosen: int
    dtype: torch.dtype
    apart: bool


@dataclass(frozen=True)
class Brought:
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def world(shape: Shape, first: int = 0) -> list[Peers]:
    """Windows full of NaN and of slots that there are not; `first`: the number of the exchange before."""
    sizes = (shape.ranks, shape.capacity, shape.hidden, shape.chosen, shape.dtype)
    windows = []
    for _ in range(shape.ranks):
        memory = torch.full((window_bytes(*sizes, apart=shape.apart),), 0xFF, dtype=torch.uint8, device=DEVICE)
        windows.append(cut(memory, *sizes, apart=shape.apart))
        windows[-1].flags.fill_(first)
    found = []
    for rank in range(shape.ranks):
        counters, failed = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (3, 1))
        counters[0] = first
        fault = torch.zeros(1, dtype=torch.int32, pin_memory=ON_GPU)
        found.append(Peers(tuple(windows), rank, LOCAL, shape.apart, State(counters, failed, fault), LIMIT))
    return found


def brought(shape: Shape, rank: int, pattern: str, seed: int) -> Brought:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tokens, slots = int(torch.randint(0, shape.capacity + 1, (), generator=generator)), shape.ranks * LOCAL
    if pattern == "some ranks are empty" and rank % 2 == seed % 2:
        tokens = 0
    if pattern == "full":
        tokens = shape.capacity
    ids = torch.randint(-1, slots, (tokens, shape.chosen), generator=generator, dtype=torch.int32)
    if pattern in ("one expert", "none"):
        ids[:, 0], ids[:, 1:] = slots - 1 if pattern == "one expert" else -1, -1
    x = torch.randn(tokens, shape.hidden, generator=generator).to(shape.dtype)
    weights = torch.rand(tokens, shape.chosen, generator=generator)
    return Brought(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))


def results(peers: Peers, capacity: int) -> torch.Tensor:
    """Of experts that change nothing: rows times weights, added where they come back added; NaN where nothing is to be sent."""
    rows = len(peers.windows) * capacity
    x, ids, weights = (part[:rows] for part in (peers.mine.x, peers.mine.ids, peers.mine.weights))
    weighted = (x.float()[:, None] * weights[..., None]).masked_fill(
        (ids < 0)[..., None], 0 if not peers.apart else torch.nan
    )
    if peers.apart:
        return weighted.to(x.dtype)
    return weighted.sum(1).masked_fill((ids < 0).all(1)[:, None], torch.nan).to(x.dtype)


def expected(shape: Shape, mine: Brought, then: torch.Tensor | None) -> torch.Tensor:
    """3 x, what comes back in its order, and what is last, in float32; bit by bit what ranks give each other."""
    total = (3 * mine.x).float()
    weighted = mine.x.float()[:, None] * mine.weights[..., None]
    if shape.apart:
        parts = [
            torch.where(mine.ids[:, j, None] >= 0, weighted[:, j].to(shape.dtype).float(), 0)
            for j in range(shape.chosen)
        ]
    else:
        ranks = torch.where(mine.ids < 0, -1, mine.ids // LOCAL)
        parts = [
            weighted.masked_fill((ranks != rank)[..., None], 0).sum(1).to(shape.dtype).float()
            for rank in range(shape.ranks)
        ]
    for part in parts:
        total = total + part
    return (total if then is None else total + then.float()).to(shape.dtype)


def exchange(shape: Shape, peers: list[Peers], given: list[Brought], capacity: int, then: bool, op: Any) -> None:
    """One after the other on all ranks; what arrives and what comes back is as it must be, and nothing else is written."""
    for one, mine in zip(peers, given, strict=True):
        op.send_tokens(mine.x, mine.ids, mine.weights, one, capacity)
    made = []
    for rank, one in enumerate(peers):
        op.wait(one)
        assert not one.state.failed.any()
        for source, theirs in enumerate(given):
            rows = slice(source * capacity, source * capacity + len(theirs.ids))
            here = torch.where(theirs.ids.div(LOCAL, rounding_mode="floor") == rank, theirs.ids - rank * LOCAL, -1)
            assert torch.equal(one.mine.ids[rows], here)
            assert (one.mine.ids[rows.stop : (source + 1) * capacity] == -1).all()
            wanted = (here >= 0).any(1)
            assert torch.equal(one.mine.x[rows][wanted], theirs.x[wanted])
            assert torch.equal(one.mine.weights[rows], theirs.weights)
        made.append(results(one, capacity))
    for one, rows in zip(peers, made, strict=True):
        op.send_results(rows, one, capacity)
    for one, mine in zip(peers, given, strict=True):
        last = -mine.x if then else None
        got = op.add_results(mine.ids, 3 * mine.x, last, one, capacity)
        assert torch.equal(got, expected(shape, mine, last)) and not one.state.failed.any()


class Kernels:
    """The Triton versions, as the device runs them."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        options = CLOCK if name in ("wait", "add_results") else {"pdl": False}

        def call(*operands: Any) -> Any:
            return getattr(kernel, name)(*operands, **options)

        return call


@pytest.mark.parametrize("op", [reference, Kernels()], ids=["reference", "kernel"])
@settings(max_examples=60 if ON_GPU else 8, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 3, 4]),
    capacity=st.integers(1, 5),
    hidden=st.sampled_from([8, 48, 1032]),
    chosen=st.integers(1, 4),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    apart=st.booleans(),
    then=st.booleans(),
    routings=ROUTINGS,
)
def test_experts_that_change_nothing_give_back_what_was_weighed(
    op: Any, ranks: int, capacity: int, hidden: int, chosen: int, dtype: torch.dtype, apart: bool, then: bool,
    routings: list[tuple[str, int]],
) -> None:  # fmt: skip
    """Any routing, one exchange after the other in the same windows, where numbers overflow too."""
    shape = Shape(ranks, capacity, hidden, chosen, dtype, apart)
    peers = world(shape, np.iinfo(np.int32).max)
    with np.errstate(over="ignore"):  # numbers of exchanges wrap
        for pattern, seed in routings:
            given = [brought(shape, rank, pattern, seed) for rank in range(ranks)]
            least = max(1, *(len(mine.ids) for mine in given))
            exchange(shape, peers, given, least if seed % 2 else capacity, then, op)


@pytest.mark.parametrize("op", [reference, Kernels()], ids=["reference", "kernel"])
def test_a_wait_without_a_rank_ends_and_says_whom_it_missed(op: Any) -> None:
    shape = Shape(3, 2, 8, 2, torch.float32, apart=False)
    peers = [
        Peers(one.windows, one.rank, one.local, one.apart, one.state, 10**7 if op is reference else LIMIT)
        for one in world(shape)
    ]
    if ON_GPU and op is not reference:
        peers = [Peers(p.windows, p.rank, p.local, p.apart, p.state, 10**7) for p in peers]
    mine = brought(shape, 0, "full", 1)
    op.send_tokens(mine.x, mine.ids, mine.weights, peers[0], 2)
    op.wait(peers[0])
    assert peers[0].state.failed.tolist() == [0b110]
    if ON_GPU:
        torch.cuda.synchronize()
    assert peers[0].state.fault.tolist() == [0b110]
    op.add_results(mine.ids, mine.x, None, peers[0], 2)  # does not wait any more
    assert peers[0].state.failed.tolist() == [0b111]


def test_operands_that_do_not_fit_are_refused() -> None:
    shape = Shape(2, 2, 8, 2, torch.float32, apart=True)
    one, mine = world(shape)[0], brought(shape, 0, "full", 1)
    with pytest.raises(ValueError, match=r"2 tokens with a capacity of 1 do not fit"):
        all2all.send_tokens(mine.x, mine.ids, mine.weights, one, 1)
    with pytest.raises(ValueError, match=r"2 tokens with a capacity of 3 do not fit"):
        all2all.send_tokens(mine.x, mine.ids, mine.weights, one, 3)
    with pytest.raises(ValueError, match="are not what windows hold"):
        all2all.send_tokens(mine.x.bfloat16(), mine.ids, mine.weights, one, 2)
    with pytest.raises(ValueError, match=r"results has shape \(4, 8\), expected \(4, 2, 8\)"):
        all2all.send_results(torch.zeros(4, 8, device=DEVICE), one, 2)
    with pytest.raises(ValueError, match="plus must be contiguous"):
        all2all.add_results(mine.ids, mine.x.bfloat16(), None, one, 2)
