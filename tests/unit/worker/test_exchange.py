"""Tokens that go to experts on other ranks: what arrives, what handles say of it, what comes back; over real gloo, between threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from lockstep_common.errors import ConfigError, Unsupported
from lockstep_worker.collectives import Alone, Communicator, Group
from lockstep_worker.exchange import DEDUPLICATED, Arrived, Exchange, Handle, Layout
from lockstep_worker.exchange.all_to_all import AllToAll, bytes_held
from lockstep_worker.exchange.backends import choose_backend, open_exchange
from lockstep_worker.exchange.handle import Dispatched, aligned
from lockstep_worker.exchange.local import Local
from lockstep_worker.exchange.symmetric import Room
from lockstep_worker.overlap import last_of
from tests.ranks import run_ranks

SIZES = [1, 2, 4, 8]
CHOSEN, HIDDEN, LOCAL, MOST = 3, 6, 2, 7
PATTERNS = ("random", "one expert", "one rank", "none", "some ranks are empty")
LAYOUTS = (DEDUPLICATED, Layout(expand=True, alignment=4, zero_padding=True), Layout(expand=True))


@dataclass(frozen=True)
class Brought:
    """What a rank brings: its tokens' rows say whose they are, [rank, token, ...]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def brought(pattern: str, rank: int, size: int, seed: int) -> Brought:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tokens, slots = int(torch.randint(0, MOST + 1, (), generator=generator)), size * LOCAL
    if pattern == "some ranks are empty" and rank % 2 == seed % 2:
        tokens = 0
    ids = torch.stack(
        [torch.randperm(slots + CHOSEN, generator=generator)[:CHOSEN] for _ in range(tokens)] or [torch.zeros(0)]
    )
    ids = ids.view(tokens, CHOSEN)
    if pattern == "one expert":
        ids = torch.tensor([slots - 1, -1, -1]).expand(tokens, -1)
    elif pattern == "one rank":
        ids = torch.tensor([0, 1, -1]).expand(tokens, -1)
    elif pattern == "none":
        ids = torch.full((tokens, CHOSEN), -1)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    x[:, 0], x[:, 1] = rank, torch.arange(tokens)
    ids = torch.where(ids >= slots, -1, ids)  # some of a token's choices are none
    return Brought(x, ids.int(), torch.rand(tokens, CHOSEN, generator=generator))


def cases(size: int) -> Iterator[tuple[str, int, int]]:
    for pattern in PATTERNS:
        for seed in range(2):
            for capacity in (0, MOST):
                yield pattern, seed, capacity


def identity(arrived: Arrived) -> torch.Tensor:
    """What experts that change nothing make of the rows."""
    if arrived.ids is None:
        return arrived.x * arrived.weights[:, None]
    return arrived.x * (arrived.weights * (arrived.ids >= 0)).sum(1, keepdim=True)


def apart_of(arrived: Arrived) -> torch.Tensor:
    """The same, slot by slot; where there is none, whatever."""
    if arrived.ids is None:
        return identity(arrived)
    return (arrived.x[:, None] * arrived.weights[..., None]).masked_fill(arrived.ids[..., None] < 0, torch.nan)


def in_order(mine: Brought) -> torch.Tensor:
    """3 x, then what each choice adds in the order of choices, less x: bit by bit."""
    total = 3 * mine.x
    for column, weights in zip(mine.ids.unbind(1), mine.weights.unbind(1), strict=True):
        total += torch.where(column[:, None] >= 0, mine.x * weights[:, None], 0)
    return total - mine.x


@pytest.mark.parametrize("size", SIZES)
def test_experts_that_change_nothing_give_back_what_was_weighed(size: int) -> None:
    def work(group: Group) -> list[str]:
        exchange = AllToAll(group.world, size * LOCAL)
        for pattern, seed, capacity in cases(size):
            mine = brought(pattern, group.world.rank, size, seed)
            want = 3 * mine.x + mine.x * (mine.weights * (mine.ids >= 0)).sum(1, keepdim=True)
            for layout in LAYOUTS:
                arrived = last_of(
                    exchange.dispatch("e", mine.x, mine.ids, mine.weights, capacity=capacity, layout=layout)
                )
                got = exchange.combine("e", identity(arrived), arrived.handle)(3 * mine.x)
                torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
                apart = exchange.combine("e", apart_of(arrived), arrived.handle, apart=True)
                assert torch.equal(apart(3 * mine.x, then=-mine.x), in_order(mine))
        return [record.id.key for record in group.recorder.history()]

    names = run_ranks(size, 1, work)
    assert all(name == names[0] for name in names)
    if size > 1:
        assert {key.split(".")[-1] for key in names[0]} == {
            "e, counts",
            "e, counts, arrival",
            "e, rows",
            "e, rows, arrival",
            "e, results",
            "e, results, arrival",
        }


@pytest.mark.parametrize("size", SIZES)
def test_each_row_arrives_once_at_each_rank_that_has_experts_for_it(size: int) -> None:
    """Rows, ids and weights, in order; and (token, expert) pairs are conserved: none is lost, doubled or made up."""

    def work(group: Group) -> None:
        rank = group.world.rank
        exchange = AllToAll(group.world, size * LOCAL)
        for pattern, seed, capacity in cases(size):
            mine = brought(pattern, rank, size, seed)
            arrived = last_of(exchange.dispatch("e", mine.x, mine.ids, mine.weights, capacity=capacity))
            assert arrived.ids is not None
            want = []
            for source in range(size):
                theirs = brought(pattern, source, size, seed)
                for x, ids, weights in zip(theirs.x, theirs.ids, theirs.weights, strict=True):
                    here = torch.where(ids.div(LOCAL, rounding_mode="floor") == rank, ids - rank * LOCAL, -1)
                    if (here >= 0).any():
                        want.append((x.tolist(), here.tolist(), weights[here >= 0].tolist()))
            got = [
                (x.tolist(), ids.tolist(), weights[ids >= 0].tolist())
                for x, ids, weights in zip(arrived.x, arrived.ids, arrived.weights, strict=True)
                if (ids >= 0).any()
            ]
            assert got == want
            assert capacity or len(arrived.x) == len(want)
            received = group.world.all_gather("pairs", (arrived.ids >= 0).sum()).sum()
            valid = sum(int((brought(pattern, r, size, seed).ids >= 0).sum()) for r in range(size))
            assert int(received) == valid

    run_ranks(size, 1, work)


@pytest.mark.parametrize("size", SIZES)
def test_what_a_handle_says_holds(size: int) -> None:
    def work(group: Group) -> None:
        exchange = AllToAll(group.world, size * LOCAL)
        for pattern, seed, capacity in cases(size):
            mine = brought(pattern, group.world.rank, size, seed)
            for layout in LAYOUTS:
                check_handle(
                    last_of(exchange.dispatch("e", mine.x, mine.ids, mine.weights, capacity=capacity, layout=layout)),
                    layout,
                    [brought(pattern, r, size, seed) for r in range(size)],
                    group.world.rank,
                    mine,
                )

    run_ranks(size, 1, work)


def check_handle(arrived: Arrived, layout: Layout, theirs: list[Brought], rank: int, mine: Brought) -> None:
    handle, size = arrived.handle, len(theirs)
    assert isinstance(handle, Dispatched)
    assert (handle.do_expand, handle.expert_alignment) == (layout.expand, layout.alignment)
    assert handle.num_experts == size * LOCAL and torch.equal(handle.topk_idx, mine.ids)
    counts = [sum(int((b.ids == rank * LOCAL + slot).sum()) for b in theirs) for slot in range(LOCAL)]
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    padded = [int(aligned(torch.tensor(n), layout.alignment)) for n in counts]
    assert handle.num_recv_tokens_per_expert_list == padded
    assert handle.num_expanded_tokens == sum(padded)
    ends, end = [], 0
    for n, whole in zip(counts, padded, strict=True):
        ends.append(end + (n if layout.expand else whole))
        end += whole
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    sums = handle.psum_num_recv_tokens_per_scaleup_rank.tolist()
    assert len(sums) == size and sums == sorted(sums) and sums[-1] == handle.num_recv_tokens
    metadata, used = handle.recv_src_metadata, set[int]()
    assert metadata.shape == (handle.num_recv_tokens, 2 + CHOSEN)
    for row, (token, place, *slots) in enumerate(metadata.tolist()):
        source, number = divmod(token, handle.num_max_tokens_per_rank)
        before = sums[source - 1] if source else 0
        assert before <= row < sums[source] and place == row - before
        for column, slot in enumerate(slots):
            if slot < 0:
                continue
            assert arrived.x[slot][:2].tolist() == [source, number]
            if layout.expand:
                assert arrived.weights[slot] == theirs[source].weights[number, column]
                group = int(theirs[source].ids[number, column]) - rank * LOCAL
                start = sum(padded[:group])
                assert start % layout.alignment == 0 and start <= slot < start + counts[group]
                assert slot not in used
                used.add(slot)
    if layout.expand:
        assert len(used) == sum(counts) and len(arrived.x) == sum(padded)
        if layout.zero_padding:
            gaps = [row for row in range(len(arrived.x)) if row not in used]
            assert not arrived.x[gaps].any() and not arrived.weights[gaps].any()


def test_the_sums_of_a_published_example() -> None:
    """Counts 3, 0, 130, 128, 1 with groups of 128."""
    counts = (3, 0, 130, 128, 1)
    ids = torch.cat([torch.full((n, 1), slot) for slot, n in enumerate(counts)]).int()

    def sums(expand: bool) -> list[int]:
        layout = Layout(expand=expand, alignment=128)
        return Dispatched(5, 1, 262, layout, ids, ids).psum_num_recv_tokens_per_expert.tolist()

    assert sums(expand=True) == [3, 128, 258, 512, 513]
    assert sums(expand=False) == [128, 128, 384, 512, 640]


def test_other_rows_go_the_same_way_again() -> None:
    def work(group: Group) -> None:
        exchange = AllToAll(group.world, 4 * LOCAL)
        mine = brought("random", group.world.rank, 4, 1)
        first = last_of(exchange.dispatch("e", mine.x, mine.ids, mine.weights))
        again = exchange.again("e", -mine.x, first)
        assert torch.equal(again.x, -first.x) and again.ids is first.ids
        want = mine.x - mine.x * (mine.weights * (mine.ids >= 0)).sum(1, keepdim=True)
        got = exchange.combine("e", identity(again), again.handle)(mine.x)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match="only a deduplicated dispatch with counts"):
            exchange.again("e", mine.x, last_of(exchange.dispatch("e", mine.x, mine.ids, mine.weights, capacity=MOST)))

    run_ranks(4, 1, work)


def test_results_that_travel_in_bfloat16_are_added_in_float32_by_rank() -> None:
    def work(group: Group) -> torch.Tensor:
        exchange = AllToAll(group.world, 4)
        x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
        arrived = last_of(exchange.dispatch("e", x, torch.tensor([[3, 0, 1]]).int(), torch.ones(1, 3)))
        part = torch.full_like(arrived.x, [256.0, 0.5, 0.0, 0.5][group.world.rank])
        return exchange.combine("e", part, arrived.handle)(x)

    for got in run_ranks(4, 1, work):
        assert got.dtype == torch.bfloat16 and (got == 258).all(), "1 + 256 + 0.5 + 0.5, rounded once"


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("captured", [True, False])
def test_the_bytes_of_an_exchange_are_those_of_its_tensors(captured: bool, apart: bool) -> None:
    """Every expert equally busy: what is packed, sent, unpacked, worked on and sent back, counted as it goes."""
    tokens, hidden, chosen = 8, 64, 2

    def work(group: Group) -> int:
        first = torch.arange(tokens) % 4
        ids = torch.stack((first, (first + 1) % 4), 1).int()  # two ranks a token, four rows for each rank
        x, weights = torch.ones(tokens, hidden, dtype=torch.bfloat16), torch.ones(tokens, chosen)
        world = Watched(group.world)
        exchange = AllToAll(world, 4)
        arrived = last_of(exchange.dispatch("e", x, ids, weights, capacity=tokens if captured else 0))
        assert arrived.ids is not None
        results = (apart_of(arrived) if apart else identity(arrived)).bfloat16()
        exchange.combine("e", results, arrived.handle, apart=apart)(x)
        unpacked = arrived.x.nbytes + arrived.ids.nbytes + arrived.weights.nbytes
        made = (
            results.nbytes if captured else world.results
        )  # where experts would do the same for this rank's own tokens
        picked = 0 if captured else tokens * chosen * hidden * 2  # rows in the order in which they are sent
        return world.bytes + picked + unpacked + made

    for counted in run_ranks(4, 1, work):
        assert counted == bytes_held(4, tokens, hidden, chosen, torch.bfloat16, captured=captured, apart=apart)


class Watched(Alone):
    """A communicator, and the bytes of rows that go into it and come out, and of results that come out."""

    def __init__(self, inner: Communicator) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.bytes, self.results = 0, 0  # `results` that go in

    def all_gather_later(self, name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.bytes += x.nbytes * (1 + self.size)
        return self.inner.all_gather_later(name, x)

    def all_to_all_later(
        self, name: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        self.bytes += sum(received) * x.shape[1] * x.itemsize
        if name.endswith("rows"):
            self.bytes += x.nbytes
        else:
            self.results += x.nbytes
        return self.inner.all_to_all_later(name, x, sent, received)

    def swap_later(self, name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.bytes += 0 if name.endswith("counts") else x.nbytes
        return self.inner.swap_later(name, x)


class _FakeWorld(Alone):
    def __init__(self, size: int) -> None:
        self.size = size


def test_more_tokens_than_agreed_are_an_error_and_slots_must_divide() -> None:
    exchange = AllToAll(Alone(), 2)
    mine = Brought(torch.ones(3, HIDDEN), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
    with pytest.raises(ValueError, match="e: 3 tokens, but all ranks agreed on at most 2"):
        last_of(exchange.dispatch("e", mine.x, mine.ids, mine.weights, capacity=2))
    world: Communicator = _FakeWorld(4)
    with pytest.raises(ValueError, match="6 expert slots cannot be shared out among 4 ranks"):
        AllToAll(world, 6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_without_a_group_takes_its_slots_for_all(layout: Layout) -> None:
    """As much arrives as if experts were balanced, so that a pass before the group is formed shows what passes will take."""
    exchange: Exchange = Local(slots=8, ranks=4)
    mine = brought("random", 0, 4, 2)
    arrived = last_of(exchange.dispatch("e", mine.x, mine.ids, mine.weights, layout=layout))
    assert int(arrived.handle.num_unaligned_recv_tokens_per_expert.sum()) == int((mine.ids >= 0).sum())
    got = exchange.combine("e", identity(arrived), arrived.handle)(mine.x)
    want = mine.x + mine.x * (mine.weights * (mine.ids >= 0)).sum(1, keepdim=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_backend_is_what_was_asked_for_or_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda, bf16 = torch.device("cpu"), torch.device("cuda", 0), torch.bfloat16

    def chosen(
        name: str,
        device: torch.device = cuda,
        dtype: torch.dtype = bf16,
        *,
        nccl: bool = True,
        deterministic: bool = False,
        captures: bool = True,
    ) -> str:
        return choose_backend(name, device, dtype, nccl=nccl, deterministic=deterministic, captures=captures)

    assert chosen("auto", cpu) == chosen("auto", captures=False) == chosen("auto", nccl=False) == "all_to_all"
    assert chosen("all_to_all") == "all_to_all" and chosen("symmetric", deterministic=True) == "symmetric"
    assert chosen("auto") == "auto", "the group finds out whether its workers can share memory"
    with pytest.raises(ConfigError, match=r"symmetric: it needs CUDA.*; it is for captured steps"):
        chosen("symmetric", cpu, captures=False)
    with pytest.raises(ConfigError, match=r"deepep: it needs CUDA.*float32.*deep_ep is not installed"):
        chosen("deepep", cpu, torch.float32)
    with pytest.raises(ConfigError, match=r"deepep: it needs a GPU a worker, and NCCL between them"):
        chosen("deepep", nccl=False)
    with pytest.raises(ConfigError, match="expected one of auto, all_to_all, symmetric, deepep"):
        chosen("nccl")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "deep_ep" else None)
    assert chosen("auto") == chosen("deepep") == "deepep"
    assert chosen("auto", dtype=torch.float16) == chosen("auto", deterministic=True) == "auto"
    with pytest.raises(ConfigError, match="an order that depends on where experts are"):
        chosen("deepep", deterministic=True)

    room = Room(1, 4, 1, 1, 1, bf16, apart=False)

    def opened(backend: str) -> Exchange:
        return open_exchange(backend, Group(), room, cpu, tokens=1, limit_s=1.0)

    assert isinstance(opened("all_to_all"), AllToAll) and isinstance(opened("auto"), AllToAll)
    with pytest.raises(Unsupported, match="no process group"):
        opened("deepep")
    with pytest.raises(Unsupported, match=r"symmetric: memory is shared between GPUs that NCCL joins.*use all_to_all"):
        opened("symmetric")


def test_handles_have_the_fields_that_backends_share() -> None:
    names = {name for name in vars(Handle) if not name.startswith("_")}
    assert {"psum_num_recv_tokens_per_expert", "recv_src_metadata"} <= names
    assert names <= set(dir(Dispatched)) | set(Dispatched.__dataclass_fields__)
