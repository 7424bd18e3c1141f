"""Ranks that share sequences compute what one rank computes: threads as ranks over real gloo, tiny models in float32."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep_common.steps import Kind
from lockstep_kernels.prepare import Share
from lockstep_worker import context
from lockstep_worker.collectives import Communicator, Group
from lockstep_worker.exchange.placement import Sharding
from lockstep_worker.kv import KvCache
from lockstep_worker.models import load_model
from lockstep_worker.models.decoder import Decoder
from tests.moe_model import make_tiny_moe
from tests.ranks import run_ranks
from tests.sharing import OWN, Outcome, check_same, decode, prefill, setting
from tests.tiny_model import make_tiny_model
from tests.unit.worker.toy import CPU

torch.set_num_threads(1)  # tiny operations

FORMS = ["dense", "qwen3-moe", "deepseek-v3"]
RANKS = [2, 4]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def directory(form: str) -> Path:
        path = tmp_path_factory.mktemp(form)
        return make_tiny_model(path) if form == "dense" else make_tiny_moe(path, form=form)  # type: ignore[arg-type]

    return directory


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
        inputs = model.inputs(prefill((0, 0, 21)), [list(range(1, 30))], Share(2, group.cp.rank))
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
        outcome = model.steps(loaded, group, mine[group.place.dp_rank])
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
        outcome = model.steps(loaded, Group(), passes)
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
            inputs = model.inputs(chunk, [list(range(1, 1 + width))], Share(2, group.cp.rank))
            with Peak(but=kv.layer(0, 0)) as found:
                loaded.forward(inputs, kv)
            return found.bytes

        return max(run_ranks(1, 2, work))

    short, long = peak(16 * size), peak(120 * size)
    assert short > most  # something was gathered
    assert long - short < 2 * most  # of 26 more pieces
