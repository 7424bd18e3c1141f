"""Ranks that share sequences compute what one rank computes: threads as ranks over real gloo, tiny models in float32."""

from __future__ import annotations

import dataclasses
import functools
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep_bench.worker_alone import step_inputs
from lockstep_common.steps import Kind
from lockstep_kernels import prepare
from lockstep_kernels.prepare import Share
from lockstep_worker import context
from lockstep_worker.collectives import Communicator, Group
from lockstep_worker.exchange.placement import WHOLE, Sharding
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model, load_model
from lockstep_worker.models.decoder import Decoder
from tests.moe_model import make_tiny_moe
from tests.ranks import run_ranks
from tests.tiny_model import make_tiny_model
from tests.unit.worker.toy import CPU

torch.set_num_threads(1)  # tiny operations

OWN = 4  # tokens of a block on one rank
LONGEST = 160
TOLERANCE = 1e-5
FORMS = ["dense", "qwen3-moe", "deepseek-v3"]
RANKS = [2, 4]

Chunk = tuple[int, int, int]  # sequence, first position, end


@dataclass(frozen=True)
class Pass:
    kind: Kind
    chunks: tuple[Chunk, ...]
    every: bool = False  # logits of all tokens are wanted, not only of the last of each chunk
    expert_rows: int = 0  # see StepInputs

    @property
    def tokens(self) -> list[tuple[int, int]]:
        return [(i, p) for i, start, end in self.chunks for p in range(start, end)]


def prefill(*chunks: Chunk, every: bool = False) -> Pass:
    return Pass(Kind.PREFILL, chunks, every)


def decode(*chunks: Chunk, expert_rows: int = 0) -> Pass:
    return Pass(Kind.DECODE, chunks, expert_rows=expert_rows)


@dataclass
class Outcome:
    """What a rank saw."""

    logits: list[torch.Tensor]
    caches: list[torch.Tensor]  # of each layer
    names: list[str]
    share: Share
    tables: list[list[int]]

    def kept(self, layer: int, sequence: int, position: int) -> torch.Tensor:
        """Keys and values of a token that this rank keeps: [planes, heads, d]."""
        block, offset = divmod(position, OWN * self.share.ranks)
        return self.caches[layer][self.tables[sequence][block], :, :, offset % OWN]

    def holds(self, position: int) -> bool:
        return position // OWN % self.share.ranks == self.share.rank


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def directory(form: str) -> Path:
        path = tmp_path_factory.mktemp(form)
        return make_tiny_model(path) if form == "dense" else make_tiny_moe(path, form=form)  # type: ignore[arg-type]

    return directory


@dataclass
class Setting:
    """A model, and token sequences that begin alike on all ranks."""

    directory: Path
    tokens: list[list[int]] = field(default_factory=list)
    hits: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # sequence: another one, whose first tokens it reuses

    def model(self, sharding: Sharding = WHOLE) -> Model:
        return load_model(self.directory, dtype=torch.float32, device=CPU, deterministic=True, sharding=sharding)

    def run(self, ranks: int, passes: Sequence[Pass], *, over: Callable[[Group], Group] = lambda g: g) -> list[Outcome]:
        """By rank."""

        def work(group: Group) -> Outcome:
            return self._run(self.model(), over(group), passes)

        return run_ranks(1, ranks, work)

    def _run(self, model: Model, group: Group, passes: Sequence[Pass]) -> Outcome:
        model.join(group)
        share = Share(group.cp.size, group.cp.rank)
        size = OWN * share.ranks
        width = -(-LONGEST // size)
        blocks = list(range(1, 1 + width * len(self.tokens)))
        random.Random(1).shuffle(blocks)
        tables = [blocks[i * width : (i + 1) * width] for i in range(len(self.tokens))]
        for i, (other, count) in self.hits.items():
            assert count % size == 0
            tables[i][: count // size] = tables[other][: count // size]
        kv = KvCache(model.kv_specs(), num_blocks=1 + len(blocks), block_size=OWN)
        layers = range(model.kv_specs()[0].layers)
        for layer in layers:
            kv.layer(0, layer).fill_(torch.nan)
        logits = [model.logits(model.forward(self._inputs(p, tables, share), kv)) for p in passes]
        names = [record.id.name for record in group.recorder.history()]
        return Outcome(logits, [kv.layer(0, layer) for layer in layers], names, share, tables)

    def _inputs(self, p: Pass, tables: list[list[int]], share: Share) -> StepInputs:
        if not p.chunks:
            return dataclasses.replace(nothing(p.kind), expert_rows=p.expert_rows)
        chunks = [(self.tokens[i][start:end], start) for i, start, end in p.chunks]
        size = OWN * share.ranks
        inputs = step_inputs(p.kind, chunks, [tables[i] for i, _, _ in p.chunks], size)
        owner = torch.repeat_interleave(torch.arange(len(chunks)), inputs.query_starts.diff())
        slots = prepare.slots(inputs.block_tables[0], owner, inputs.positions, size, share)
        wanted = torch.arange(len(inputs.token_ids)) if p.every else inputs.logits_index
        return dataclasses.replace(inputs, slots=(slots,), logits_index=wanted, expert_rows=p.expert_rows)


def nothing(kind: Kind) -> StepInputs:
    """A placeholder."""
    none, table = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int64)
    starts = torch.zeros(1, dtype=torch.int64)
    return StepInputs(kind, none, none, none, starts, none, (table,), (none,), none, (), (), 0)


def setting(directory: Path, lens: Sequence[int]) -> Setting:
    draw = random.Random(7)
    return Setting(directory, [[draw.randrange(2, 300) for _ in range(n)] for n in lens])


def check_same(one: Outcome, many: list[Outcome], passes: Sequence[Pass]) -> None:
    """All ranks have the logits of one rank, keep what is theirs of its keys and values, and nothing else."""
    close = TOLERANCE * float(torch.cat(one.logits).std())
    for outcome in many:
        for got, want in zip(outcome.logits, one.logits, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=close)
            assert torch.equal(got.argmax(1), want.argmax(1))
        assert outcome.names == many[0].names
        stored = {token for p in passes for token in p.tokens if outcome.holds(token[1])}
        for layer, cache in enumerate(outcome.caches):
            for sequence, position in stored:
                got, want = outcome.kept(layer, sequence, position), one.kept(layer, sequence, position)
                if layer == 0:
                    assert torch.equal(got, want)
                torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
            written = (~cache[1:].isnan()).any(4).any(2).any(1).sum()
            assert written == len(stored)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("form", FORMS)
def test_prompts_of_every_awkward_length_in_one_pass(directories: Callable[[str], Path], form: str, ranks: int) -> None:
    lens = [1, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 37, 100]
    model = setting(directories(form), [n + 2 for n in lens])
    chunks = tuple((i, 0, n) for i, n in enumerate(lens))
    passes = [prefill(*chunks), *(decode(*((i, n + j, n + j + 1) for i, n in enumerate(lens))) for j in range(2))]
    check_same(model.run(1, passes)[0], model.run(ranks, passes), passes)


CUTS = [
    prefill((0, 0, 5), (1, 0, 70)),
    prefill((0, 5, 23), (1, 70, 71), every=True),
    prefill((1, 71, 100), (0, 23, 24), (2, 0, 9)),
    prefill((2, 9, 100), (3, 0, 11)),
    prefill((3, 11, 12), (4, 0, 3), (2, 100, 101), every=True),
    decode((2, 101, 102), (1, 100, 101)),
]


@pytest.mark.parametrize("blocks", [1, 3, 1000])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("form", ["qwen3-moe", "deepseek-v3"])
def test_chunks_behind_a_cached_prefix_gathered_in_pieces(
    directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, form: str, ranks: int, blocks: int
) -> None:
    monkeypatch.setattr(context, "PIECE_BYTES", blocks * ranks * _block_bytes(directories(form)))
    model = setting(directories(form), [102] * 5)
    check_same(model.run(1, CUTS)[0], model.run(ranks, CUTS), CUTS)


@pytest.mark.parametrize("form", FORMS)
def test_a_prefix_hit_and_three_ranks(directories: Callable[[str], Path], form: str) -> None:
    model = setting(directories(form), [50, 80])
    model.tokens[1][:48] = model.tokens[0][:48]
    model.hits[1] = (0, 48)
    passes = [prefill((0, 0, 50)), prefill((1, 48, 77)), decode((1, 77, 78)), decode((1, 78, 79), (0, 49, 50))]
    check_same(model.run(1, passes)[0], model.run(3, passes), passes)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("form", FORMS)
def test_generated_tokens_that_are_computed_again(directories: Callable[[str], Path], form: str, ranks: int) -> None:
    """Several tokens a sequence in a pass of generated ones, more and fewer rows than ranks, some without logits."""
    model = setting(directories(form), [40, 40, 40])
    passes = [
        prefill((0, 0, 9), (1, 0, 30)),
        decode((0, 9, 20), (1, 30, 31)),
        decode((1, 31, 35)),
        dataclasses.replace(decode((0, 20, 26), (1, 35, 36)), every=True),
        decode((0, 26, 27)),
    ]
    check_same(model.run(1, passes)[0], model.run(ranks, passes), passes)


@pytest.mark.parametrize("form", FORMS)
def test_a_middle_chunk_needs_no_logits(directories: Callable[[str], Path], form: str) -> None:
    model = setting(directories(form), [40])

    def work(group: Group) -> torch.Size:
        loaded = model.model()
        loaded.join(group)
        kv = KvCache(loaded.kv_specs(), num_blocks=30, block_size=OWN)
        inputs = model._inputs(prefill((0, 0, 21)), [list(range(1, 30))], Share(2, group.cp.rank))
        inputs = dataclasses.replace(inputs, logits_index=inputs.logits_index[:0])
        return loaded.logits(loaded.forward(inputs, kv)).shape

    assert run_ranks(1, 2, work) == [(0, model.model().vocab_size)] * 2


class AtOnce:
    """A communicator that gathers while nothing else is computed."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather_later(self, name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        gathered = self._inner.all_gather(name, x)
        return lambda: gathered


@pytest.mark.parametrize("form", FORMS)
def test_overlapping_changes_no_bit(directories: Callable[[str], Path], form: str) -> None:
    def at_once(group: Group) -> Group:
        group.cp = AtOnce(group.cp)  # type: ignore[assignment]
        return group

    model = setting(directories(form), [90, 90])
    passes = [prefill((0, 0, 41), (1, 0, 7)), prefill((0, 41, 88)), decode((0, 88, 89), (1, 7, 8))]
    for later, now in zip(model.run(2, passes), model.run(2, passes, over=at_once), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(later.logits, now.logits, strict=True))
        for a, b in zip(later.caches, now.caches, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("form", ["qwen3-moe", "deepseek-v3"])
def test_two_by_two_ranks_share_experts_and_each_pair_its_sequences(
    directories: Callable[[str], Path], form: str
) -> None:
    """Pairs have other tokens, or none; each token goes to its experts once."""
    mine = [
        [
            prefill((0, 0, 21), (1, 0, 1)),
            prefill((0, 21, 60)),
            decode((0, 60, 61), (1, 1, 2)),
            decode(),
            decode((0, 61, 62), expert_rows=3),
            decode(expert_rows=1),
            prefill(),
        ],
        [
            prefill(),
            prefill((0, 0, 3)),
            decode((0, 3, 4)),
            decode((0, 4, 5)),
            decode(expert_rows=3),
            decode((0, 5, 6), expert_rows=1),
            prefill((1, 0, 50)),
        ],
    ]
    model = setting(directories(form), [70, 70])

    def work(group: Group) -> tuple[Outcome, torch.Tensor, list[str]]:
        loaded = model.model(Sharding(4, group.place.rank))
        outcome = model._run(loaded, group, mine[group.place.dp_rank])
        names = [name for name in outcome.names if name.startswith("experts")]
        assert isinstance(loaded, Decoder) and loaded.experts is not None
        return outcome, loaded.experts.layers[0].loads[:, 1:].sum(1), names

    results = run_ranks(2, 2, work)
    for dp_rank in range(2):
        (one,) = model.run(1, mine[dp_rank])
        pair = [outcome for outcome, _, _ in results[2 * dp_rank :][:2]]
        check_same(one, pair, mine[dp_rank])
    assert all(names == results[0][2] for _, _, names in results)
    passes, top_k = [p for own in mine for p in own], 2
    alone = form == "deepseek-v3"  # its only layer with experts is the last one, which has the rows with logits only
    prompts = sum(len(p.chunks) if alone else len(p.tokens) for p in passes if p.kind is Kind.PREFILL)
    generated = sum(len(p.tokens) for p in passes if p.kind is Kind.DECODE)
    loads = torch.stack([found for _, found, _ in results]).sum(0)
    assert loads.tolist() == [top_k * prompts, top_k * generated]


def test_leaving_the_group_restores_the_bits_of_one_rank(directories: Callable[[str], Path]) -> None:
    model = setting(directories("qwen3-moe"), [30])
    passes = [prefill((0, 0, 20)), decode((0, 20, 21))]

    def work(group: Group) -> list[torch.Tensor]:
        loaded = model.model()
        assert loaded.deterministic
        loaded.join(group)
        assert not loaded.deterministic
        outcome = model._run(loaded, Group(), passes)
        assert loaded.deterministic
        return outcome.logits

    (expected,) = model.run(1, passes)
    for logits in run_ranks(1, 2, work):
        assert all(torch.equal(a, b) for a, b in zip(logits, expected.logits, strict=True))


def _block_bytes(directory: Path) -> int:
    """Of one layer, on one rank."""
    (spec,) = load_model(directory, dtype=torch.float32, device=CPU, deterministic=True).kv_specs()
    return spec.bytes_per_block(OWN) // spec.layers


class Peak(TorchDispatchMode):
    """The most bytes that tensors seen within it held at once, in this thread; without the storage of one of them."""

    def __init__(self, but: torch.Tensor) -> None:
        super().__init__()
        self._but = but.untyped_storage()
        self._sizes = {id(self._but): 0}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and id(storage := x.untyped_storage()) not in self._sizes:
                self._sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, id(storage))
        self.bytes = max(self.bytes, sum(self._sizes.values()))
        return result


@pytest.mark.parametrize("form", FORMS)
def test_memory_does_not_grow_with_the_prefix(
    directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Pieces that are gathered are bounded, and of these two exist at a time; beside them there are a few integers a block."""
    size = 2 * OWN
    most = 2 * 4 * _block_bytes(directories(form))
    monkeypatch.setattr(context, "PIECE_BYTES", most)

    def peak(prefix: int) -> int:
        model = setting(directories(form), [prefix + 24])

        def work(group: Group) -> int:
            loaded = model.model()
            loaded.join(group)
            width = -(-(prefix + 24) // size)
            kv = KvCache(loaded.kv_specs(), num_blocks=1 + width, block_size=OWN)
            chunk = prefill((0, prefix, prefix + 24))
            inputs = model._inputs(chunk, [list(range(1, 1 + width))], Share(2, group.cp.rank))
            with Peak(but=kv.layer(0, 0)) as found:
                loaded.forward(inputs, kv)
            return found.bytes

        return max(run_ranks(1, 2, work))

    short, long = peak(16 * size), peak(120 * size)
    assert short > most  # something was gathered
    assert long - short < 2 * most  # of 26 more pieces
