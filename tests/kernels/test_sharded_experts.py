"""A layer whose experts are shared out among ranks: equal to the whole one, wherever its experts are, and while they move."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.errors import ConfigError, Conflict, InvalidRequest
from lockstep_common.steps import U32, ExpertLoads, Header, Kind
from lockstep_kernels import moe
from lockstep_kernels.fp8 import E4M3, Fp8Weight
from lockstep_kernels.linear import pack, unpack
from lockstep_kernels.moe import ExpertWeights, Routing, Weight
from lockstep_kernels.moe.weights import Stack
from lockstep_kernels.rms_norm import Norm
from lockstep_kernels.swiglu import pack_gate_up
from lockstep_worker import memory
from lockstep_worker.collectives import Alone, Communicator, Group, Place
from lockstep_worker.exchange.all_to_all import bytes_held
from lockstep_worker.exchange.layer import ShardedExperts, ShardedLayers, SharedExperts
from lockstep_worker.exchange.moves import exchange_experts, plan_moves
from lockstep_worker.exchange.placement import Placement, Sharding, spread_of
from lockstep_worker.experts import Experts
from lockstep_worker.graphs import CAPTURED
from lockstep_worker.graphs import bucket_sizes as decode_sizes
from lockstep_worker.models.decoder import Tokens
from lockstep_worker.prefill_graphs import EXCHANGED_BYTES, bucket_sizes
from lockstep_worker.protocol import GroupLost
from lockstep_worker.weights import Checkpoint
from tests.ranks import run_ranks

CPU = torch.device("cpu")
HIDDEN, WIDTH = 48, 32
SIZES = [1, 2, 4, 8]
ROUTINGS = {
    "softmax": Routing(8, 2, "softmax", True),
    "in groups, scaled": Routing(16, 3, "sigmoid", True, 2.5, 4, 2, "top2"),
}
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """Plain weights of a layer: its experts' gates, ups and downs, the routed ones first; one shared."""

    routing: Routing
    gate: torch.Tensor
    correction: torch.Tensor | None
    experts: tuple[Parts, ...]
    norm: Norm

    @classmethod
    def drawn(cls, routing: Routing, dtype: torch.dtype = torch.float32, seed: int = 0) -> Layer:
        generator = torch.Generator().manual_seed(seed)

        def draw(*size: int) -> torch.Tensor:
            return (torch.randn(size, generator=generator) / size[-1] ** 0.5).to(dtype)

        count = routing.experts + 1
        experts = tuple((draw(WIDTH, HIDDEN), draw(WIDTH, HIDDEN), draw(HIDDEN, WIDTH)) for _ in range(count))
        correction = torch.randn(routing.experts, generator=generator) / 10 if routing.scoring == "sigmoid" else None
        gate = 3 * draw(routing.experts, HIDDEN)
        return cls(routing, gate, correction, experts, Norm(torch.rand(HIDDEN, generator=generator) + 0.5, 1e-6))

    def whole(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Of hidden states and live."""
        gate_up = torch.stack([torch.cat((gate, up)) for gate, up, _ in self.experts])
        packed = moe.pack_experts(gate_up, torch.stack([down for *_, down in self.experts]))
        experts = Experts.pack(self.routing, self.gate, packed, correction=self.correction)
        return lambda hidden, live: experts(hidden, hidden, live, norm=self.norm)

    def sharded(self, sharding: Sharding) -> ShardedLayers:
        """The layer as one of this rank's, among two equal ones."""
        slots = sharding.placement(self.routing.experts)
        layers = []
        for number in range(2):
            stack = moe.ExpertStack(len(slots) // sharding.ranks, HIDDEN, WIDTH, self.gate.dtype, CPU)
            for slot, e in enumerate(sharding.here(slots).tolist()):
                stack.put(slot, *self.experts[e])
            gate, up, down = self.experts[-1]
            shared = SharedExperts(pack_gate_up(gate, up), pack(down))
            packed = moe.pack_gate(self.gate, self.routing, self.correction)
            placement = Placement(self.routing.experts, slots, CPU)
            layers.append(ShardedExperts(number, self.norm, packed, stack.finish(), shared, placement, self.read))
        return ShardedLayers(layers, sharding, no_checkpoint)

    def read(self, checkpoint: Checkpoint, e: int) -> tuple[Weight, Weight, Weight]:
        return self.experts[e]


@contextmanager
def no_checkpoint() -> Iterator[Checkpoint]:
    yield None  # type: ignore[misc]  # `Layer.read` has its own weights


def hidden_states(
    rank: int, seed: int, pattern: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank brings, and which rows of it are live."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    tokens = int(torch.randint(1, 12, (), generator=generator))
    if pattern == "a rank has one" and rank == 0:
        tokens = 1
    if pattern == "ranks are empty" and rank % 2 == 0:
        tokens = 0
    x = torch.randn(tokens, HIDDEN, generator=generator)
    if pattern == "one expert":
        x = torch.ones(tokens, HIDDEN) + 1e-3 * x
    live = torch.rand(tokens, generator=generator) < 0.8
    if pattern == "nobody lives":
        live[:] = False
    return x.to(dtype), live


PATTERNS = ("random", "one expert", "a rank has one", "ranks are empty", "nobody lives")


def tokens_of(
    x: torch.Tensor, live: torch.Tensor, layers: ShardedLayers, kind: Kind = Kind.DECODE, capacity: int = 0
) -> Tokens:
    spread = spread_of(torch.arange(len(x)), torch.arange(len(x)) * 7) if layers.replicated else None
    return Tokens(kind, live, spread, capacity)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_sharded_equals_whole(name: str, size: int) -> None:
    """Any routing, empty ranks, one expert for all, nobody alive, with counts or a capacity, with and without replicas."""
    layer = Layer.drawn(ROUTINGS[name])
    whole = layer.whole()

    def work(group: Group) -> list[str]:
        rank = group.place.rank
        for redundant in {0, 4 if size < 8 else 8} if layer.routing.experts > 8 or size < 8 else {0}:
            layers = layer.sharded(Sharding(size, rank, redundant))
            layers.join(group)
            for pattern in PATTERNS:
                for seed in range(2):
                    for capacity in (0, 12):
                        x, live = hidden_states(rank, seed, pattern)
                        got = layers.layers[0](x.clone(), tokens_of(x, live, layers, capacity=capacity))
                        want = whole(x, live)
                        torch.testing.assert_close(got[live], want[live], rtol=1e-5, atol=1e-5)
        return [record.id.key for record in group.recorder.history()]

    names = run_ranks(size, 1, work)
    assert all(other == names[0] for other in names)


def test_bfloat16_travels_in_what_the_experts_compute_in() -> None:
    """On a CPU bfloat16 weights have two forms; ranks whose passes use different ones still understand each other."""
    layer = Layer.drawn(ROUTINGS["softmax"], torch.bfloat16)
    whole = layer.whole()

    def work(group: Group) -> None:
        layers = layer.sharded(Sharding(2, group.place.rank))
        layers.join(group)
        for seed in range(3):
            dtype = torch.bfloat16 if group.place.rank == seed % 2 else torch.float32
            x, live = hidden_states(group.place.rank, seed, "random", dtype)
            got = layers.layers[0](x.clone(), tokens_of(x, live, layers))
            torch.testing.assert_close(got[live], whole(x, live)[live], rtol=2**-6, atol=2**-5)
            assert got.dtype == dtype

    run_ranks(2, 1, work)


def test_rows_that_are_not_live_go_nowhere_and_loads_count_the_others() -> None:
    """What each layer counts, by kind, is what the gate chose for live rows: nothing else; and a report starts anew."""
    layer = Layer.drawn(ROUTINGS["softmax"])

    def work(group: Group) -> tuple[ExpertLoads, ExpertLoads]:
        rank = group.place.rank
        layers = layer.sharded(Sharding(4, rank, 4))
        layers.join(group)
        first, second = layers.layers
        layers.begin(Header(1, 1, Kind.DECODE, 0, 1))
        want = np.zeros((2, 2, 8), np.int64)  # layer, kind, expert
        for seed, kind in enumerate((Kind.PREFILL, Kind.DECODE, Kind.DECODE)):
            x, live = hidden_states(rank, seed, "random")
            for i, one in enumerate((first, second)):
                one(x.clone(), tokens_of(x, live, layers, kind))
                ids, _ = moe.choose(x, first.gate, norm=layer.norm)
                want[i, int(kind is Kind.DECODE)] += np.bincount(ids[live].flatten().numpy(), minlength=8)
        assert layers.report(0, group.cp) is None, "the header did not ask"
        layers.begin(Header(1, 2, Kind.DECODE, 0, 2, report_loads=True))
        assert layers.report(0, group.cp) is None, "not the last step"
        sent = layers.report(1, group.cp)
        layers.begin(Header(1, 3, Kind.DECODE, 0, 1, report_loads=True))
        again = layers.report(0, group.cp)
        assert sent is not None and again is not None
        loads = sent.arrived()
        mates = group.cp.all_gather("want", torch.from_numpy(want)).sum(0).numpy()
        assert (loads.prefill == mates[:, 0]).all() and (loads.decode == mates[:, 1]).all()
        return loads, again.arrived()

    for loads, again in run_ranks(2, 2, work):
        assert loads.steps == 3 and again.steps == 1 and loads.prefill.dtype == np.uint32
        assert loads.prefill.sum() > 0 and not again.prefill.any() and not again.decode.any()


def test_memory_is_set_aside_for_tokens_on_their_way(caplog: pytest.LogCaptureFixture) -> None:
    """For captured steps and passes what they take, for other prefill passes what equally busy experts take; the log says all."""
    layers = Layer.drawn(ROUTINGS["softmax"]).sharded(Sharding(4, 0))
    sizes = memory.Sizes(block_size=16, max_rows=1 << 14, max_model_len=64, max_batched_tokens=1 << 20)
    shape = (HIDDEN, 2, torch.float32)
    captured = bytes_held(4, sizes.max_rows, *shape, captured=True, apart=False)
    prefill = bytes_held(4, sizes.max_batched_tokens, *shape, captured=False, apart=False)
    model: Any = SimpleNamespace(experts=layers, captures_prefill=True)
    buckets = bucket_sizes(model, sizes.max_batched_tokens, cp=1)
    passes = [bytes_held(4, tokens, *shape, captured=True, apart=False) for tokens in buckets]
    assert max(passes) <= EXCHANGED_BYTES < bytes_held(4, 1 << 20, *shape, captured=True, apart=False)
    with caplog.at_level("INFO"):
        assert memory._exchange_bytes(model, sizes, captured=True) == captured + sum(passes) + prefill
    assert f"{captured / 2**30:.2f} GiB in captured decode steps, {sum(passes) / 2**30:.2f} in captured" in caplog.text
    assert f"{prefill / 2**30:.2f} in other prefill passes" in caplog.text
    assert "up to 2.0 times as much" in caplog.text, "all four ranks' tokens, and not two of four"
    assert memory._exchange_bytes(model, sizes, captured=False) == prefill
    assert memory._exchange_bytes(model, replace(sizes, cp=2), captured=True) == captured + prefill
    assert memory._exchange_bytes(SimpleNamespace(experts=None), sizes, captured=True) == 0  # type: ignore[arg-type]


def test_memory_is_set_aside_for_halved_steps_and_captured_passes() -> None:
    sizes = memory.Sizes(block_size=16, max_rows=64, max_model_len=64, max_batched_tokens=300)
    layers = Layer.drawn(ROUTINGS["softmax"]).sharded(Sharding(4, 0))
    whole: Any = SimpleNamespace(experts=None, captures_prefill=True, vocab_size=100)
    shared: Any = SimpleNamespace(experts=layers, captures_prefill=True, vocab_size=100)
    logits, decode, peak = 2 * 64 * 100 * 4, len(decode_sizes(64)) * len(CAPTURED), 1000
    a_step = memory._GRAPH_BYTES
    assert memory._captured_bytes(whole, sizes, peak) == (decode + 7) * a_step + logits + peak
    assert memory._captured_bytes(shared, sizes, peak) == (2 * decode + 7) * a_step + logits + peak
    assert memory._captured_bytes(shared, replace(sizes, cp=2), peak) == 2 * decode * a_step + logits


def random_placement(rng: np.random.Generator, experts: int, slots: int) -> U32:
    return rng.permutation(np.append(np.arange(experts), rng.integers(0, experts, slots - experts))).astype(np.uint32)


@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (2, 2)])
def test_experts_move_and_results_stay(dp: int, cp: int) -> None:
    """From any place to any other, replicas too; then back to where they were loaded, as for a new group."""
    layer, size = Layer.drawn(ROUTINGS["softmax"]), dp * cp
    whole = layer.whole()

    def work(group: Group) -> list[str]:
        rank, rng = group.place.rank, np.random.default_rng(3)
        layers = layer.sharded(Sharding(size, rank, 4))
        layers.join(group)
        for version in range(1, 6):
            slots = random_placement(rng, 8, 12)
            header = Header(1, version, Kind.DECODE, 0, 1, 0, (), version, version % 2, 0, False, tuple(slots.tolist()))
            layers.begin(header)
            for number in range(2):
                x, live = hidden_states(rank, version, "random")
                got = layers.layers[number](x.clone(), tokens_of(x, live, layers))
                torch.testing.assert_close(got[live], whole(x, live)[live], rtol=1e-5, atol=1e-5)
        assert layers.versions == [2, 3]
        names = [record.id.name for record in group.recorder.history()]
        layers.join(group)
        assert layers.versions == [0, 0]
        initial = layers.sharding.placement(8)
        for one in layers.layers:
            assert (one.placement.slots == initial).all()
            for slot, e in enumerate(layers.sharding.here(initial).tolist()):
                assert all(torch.equal(a, b) for a, b in zip(one.weights.numbers(slot), layer.experts[e], strict=True))
        return names

    names = run_ranks(dp, cp, work)
    assert all(other == names[0] for other in names)
    assert "experts 1, version 3, moved" in names[0]


def test_a_layer_whose_move_broke_off_is_read_again() -> None:
    """Its slots may hold anything, though its table says that nothing has moved."""
    layer = Layer.drawn(ROUTINGS["softmax"])
    layers = layer.sharded(Sharding(2, 1))
    place = Place(2, 1, 1)
    layers.join(Group(place, world=Breaking()))
    spoiled = tuple(torch.zeros_like(part) for part in layer.experts[0])
    layers.layers[0].weights = layers.layers[0].weights.replaced({0: spoiled})  # type: ignore[dict-item]
    kept = layers.layers[1].weights
    with pytest.raises(GroupLost, match="experts 0, version 1, moved"):
        layers.move(0, [7, 6, 5, 4, 3, 2, 1, 0])
    layers.join(Group(place, world=Breaking()))
    assert layers.layers[1].weights is kept
    for slot in range(4):
        numbers = layers.layers[0].weights.numbers(slot)
        assert all(torch.equal(a, b) for a, b in zip(numbers, layer.experts[4 + slot], strict=True))


class Breaking(Alone):
    """One of two ranks, of which the other one is gone."""

    rank, size = 1, 2

    def all_to_all(self, name: str, x: torch.Tensor, sent: object, received: object) -> torch.Tensor:
        raise GroupLost(f"the group broke in {name}")


def test_places_that_do_not_fit_are_refused() -> None:
    layer = Layer.drawn(ROUTINGS["softmax"])
    layers = layer.sharded(Sharding(2, 1, 2))
    with pytest.raises(
        Conflict, match=r"rank 1 of 2, the group wants it as rank 0 of 3: start it with --dp 3 --cp 1 --rank 0"
    ):
        layers.join(Group(Place(3, 1, 0)))
    with pytest.raises(InvalidRequest, match=r"experts \[0\] would have no slot"):
        layers.move(0, [1, 1, 1, 1, 2, 3, 4, 5, 6, 7])
    with pytest.raises(InvalidRequest, match="9 slots for 8 experts do not replace 10"):
        layers.move(0, [*range(8), 0])
    with pytest.raises(InvalidRequest, match="10 slots for 8 experts"):
        layers.move(0, [*range(8), 8, 9])
    with pytest.raises(ConfigError, match="8 redundant experts of 8"):
        layer.sharded(Sharding(2, 0, 8))


@settings(max_examples=60, deadline=None)
@given(experts=st.integers(1, 12), per_rank=st.integers(1, 6), ranks=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_moves_bring_each_slot_its_expert(experts: int, per_rank: int, ranks: int, seed: int) -> None:
    """Played with numbers: each rank sends what it holds, and fills its slots with what comes. Each expert travels to a rank at
    most once, from that rank itself if it has it, and nothing travels that is in its place."""
    slots = per_rank * ranks
    if slots < experts:
        return
    rng = np.random.default_rng(seed)
    old, new = random_placement(rng, experts, slots), random_placement(rng, experts, slots)
    moves = plan_moves(old, new, ranks)
    held = np.split(old, ranks)
    parcels: list[list[list[int]]] = []
    for move, mine in zip(moves, held, strict=True):
        sent = [int(mine[slot]) for slot in move.sources]
        ends = np.cumsum((0, *move.sent)).tolist()
        parcels.append([sent[a:b] for a, b in itertools.pairwise(ends)])
    for rank, (move, mine) in enumerate(zip(moves, held, strict=True)):
        arrived = [e for source in range(ranks) for e in parcels[source][rank]]
        assert [len(parcels[source][rank]) for source in range(ranks)] == list(move.received)
        assert len(set(arrived)) == len(arrived)
        assert all(e in parcels[rank][rank] for e in arrived if e in mine)
        result = mine.copy()
        for e, targets in zip(arrived, move.targets, strict=True):
            assert targets and all(mine[slot] != e for slot in targets)
            result[list(targets)] = e
        assert (result == np.split(new, ranks)[rank]).all()


@pytest.mark.parametrize("fp8", [False, True])
def test_stacked_weights_move_in_pieces_of_bounded_size(fp8: bool) -> None:
    """As on a GPU: in place, a slot that is sent being overwritten meanwhile; of 8 bits with their scales."""

    def stacks(experts: list[int]) -> ExpertWeights:
        generator = torch.Generator()

        def drawn(e: int, *shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator.manual_seed(e))

        dtype = E4M3 if fp8 else torch.bfloat16
        gate_up = torch.stack([drawn(e, 2 * WIDTH, HIDDEN) for e in experts]).to(dtype)
        down = torch.stack([drawn(e + 50, HIDDEN, WIDTH) for e in experts]).to(dtype)
        scales = [torch.stack([drawn(e, n) for e in experts]) if fp8 else None for n in (2 * WIDTH, HIDDEN)]
        return ExpertWeights(
            len(experts), HIDDEN, WIDTH, torch.bfloat16, Stack(gate_up, scales[0]), Stack(down, scales[1])
        )

    old, new = (np.array(slots, np.uint32) for slots in ([0, 1, 2, 3, 4, 0], [3, 3, 0, 4, 1, 2]))
    moves = plan_moves(old, new, 3)

    def work(group: Group) -> int:
        weights = stacks(np.split(old, 3)[group.place.rank].tolist())
        counting = Counting(group.world)
        moved = exchange_experts(counting, "e", weights, moves, staging=1000)
        assert moved is weights
        want = stacks(np.split(new, 3)[group.place.rank].tolist())
        for slot in range(2):
            got, expected = moved.numbers(slot), want.numbers(slot)
            assert len(got) == (4 if fp8 else 2)
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, expected, strict=True)
            )
        assert exchange_experts(counting, "e", weights, plan_moves(new, new, 3)) is weights
        return counting.largest

    assert 0 < max(run_ranks(3, 1, work)) <= 1000


class Counting(Alone):
    """Another communicator, and the most bytes that it sent or received at a time."""

    def __init__(self, inner: Communicator) -> None:
        self.inner, self.rank, self.size, self.largest = inner, inner.rank, inner.size, 0

    def all_to_all(self, name: str, x: torch.Tensor, sent: object, received: object) -> torch.Tensor:
        result = self.inner.all_to_all(name, x, sent, received)  # type: ignore[arg-type]
        self.largest = max(self.largest, x.nbytes, result.nbytes)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_are_unpacked_as_they_were(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 72).to(dtype)
    weight[0, :3] = torch.tensor([1e-7, -3e-6, 0.0])  # smaller than half precision's normal numbers
    assert torch.equal(unpack(pack(weight)), weight)


def test_experts_of_8_bits_replace_others_in_a_stack() -> None:
    parts = [
        Fp8Weight(torch.ones(shape).to(E4M3), torch.ones(shape[0])) for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
    ]
    gate_up = Stack(torch.zeros(2, 2 * WIDTH, HIDDEN).to(E4M3), torch.zeros(2, 2 * WIDTH))
    down = Stack(torch.zeros(2, HIDDEN, WIDTH).to(E4M3), torch.zeros(2, HIDDEN))
    packed = ExpertWeights(2, HIDDEN, WIDTH, torch.bfloat16, gate_up, down)
    assert packed.replaced({1: (parts[0], parts[0], parts[1])}) is packed
    assert all((numbers.float() == 1).all() for numbers in packed.numbers(1))
    assert all((numbers.float() == 0).all() for numbers in packed.numbers(0))


@settings(max_examples=40, deadline=None)
@given(experts=st.integers(1, 9), extra=st.integers(0, 8), seed=st.integers(0, 2**31))
def test_a_token_goes_to_a_slot_that_holds_its_expert(experts: int, extra: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = random_placement(rng, experts, experts + extra)
    placement = Placement(experts, slots, CPU)
    ids = torch.from_numpy(rng.integers(-1, experts, (300, 2)))
    spread = spread_of(torch.arange(300), torch.from_numpy(rng.integers(0, 1000, 300)))
    assert (spread >= 0).all()
    chosen = placement.choose(ids, spread)
    assert chosen.dtype == torch.int32
    assert (np.where(ids >= 0, slots.astype(np.int64)[chosen], -1) == ids.numpy()).all()
    assert (chosen[ids < 0] == -1).all()
    assert torch.equal(placement.choose(ids, spread), chosen)
    first = placement.choose(ids, None)
    assert all(
        first[ids == e].unique().tolist() == [int(np.flatnonzero(slots == e)[0])]
        for e in ids.unique().tolist()
        if e >= 0
    )
    placement.set(slots[::-1].copy())
    assert (np.where(ids >= 0, slots[::-1].astype(np.int64)[placement.choose(ids, spread)], -1) == ids.numpy()).all()


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_replicas_share_tokens_equally(replicas: int) -> None:
    """Of neighbouring positions, and of one position of many sequences; deviations as of coins."""
    tokens = torch.randint(0, 150_000, (20_000,), generator=torch.Generator().manual_seed(0))
    for positions, ids in (
        (torch.arange(20_000), tokens),
        (torch.full((20_000,), 77), torch.arange(20_000)),
        (torch.arange(20_000), torch.full((20_000,), 5)),
    ):
        counts = torch.bincount(spread_of(positions, ids) % replicas, minlength=replicas)
        assert (counts - 20_000 / replicas).abs().max() < 5 * (20_000 / replicas) ** 0.5
