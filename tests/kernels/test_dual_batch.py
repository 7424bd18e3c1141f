"""Whole models with sharded experts: a pass as two halves gives what it gives as one, on ranks that bring different things."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lockstep_common.steps import Kind
from lockstep_worker.collectives import Group
from lockstep_worker.exchange.placement import Sharding
from lockstep_worker.models import load_model
from tests.kernels.sequences import EVERY, LAST, NONE, Chunk, Sequences
from tests.moe_model import Form, MoeShape, make_tiny_moe
from tests.ranks import run_ranks

FORMS: tuple[Form, ...] = ("qwen3-moe", "deepseek-v3")
CLOSE = 1e-5  # of logits that are spread by about 1


@dataclass(frozen=True)
class Pass:
    kind: Kind
    chunks: Sequence[Chunk]
    wanted: str = LAST
    expert_rows: int = 0


def prompt(*chunks: Chunk, wanted: str = LAST) -> Pass:
    return Pass(Kind.PREFILL, chunks, wanted)


def step(position: int, *sequences: int, rows: int = 0) -> Pass:
    """One more token of each of these sequences."""
    return Pass(Kind.DECODE, [(i, position, position + 1) for i in sequences], expert_rows=rows)


# What a rank is given, pass by pass: prompts with and without a prefix, of which one is cut in the middle, and decode steps with
# counts and with a known number of rows. The ranks are uneven; one has a single row, one nothing at all.
BUSY = [
    prompt((0, 0, 9), (1, 0, 26), (2, 0, 3), wanted=EVERY),
    prompt((0, 9, 40), wanted=NONE),
    prompt((1, 26, 40), (2, 3, 40), (3, 0, 40), (4, 0, 40)),
    Pass(
        Kind.DECODE, [(0, 40, 43), *((i, 40, 41) for i in range(1, 5))], EVERY
    ),  # tokens that were generated before, computed again
    step(43, 0, rows=5),
    step(41, 1, 2, 3, 4),
    step(42, 1, 2, 3, 4, rows=5),
    step(43, 1, 2, 3, rows=3),
]
LONE = [
    prompt((0, 0, 1), wanted=EVERY),
    prompt(),
    prompt((0, 1, 40)),
    Pass(Kind.DECODE, []),
    step(40, 0, rows=5),
    step(41, 0),
    step(42, 0, rows=5),
    step(43, 0, rows=3),
]
IDLE = [replace(p, chunks=()) for p in BUSY]
WORK = (BUSY, LONE, IDLE, BUSY[:4] + IDLE[4:])


@pytest.fixture(scope="module", params=FORMS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("dual") / request.param, form=request.param)


def tokens() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, MoeShape().vocab - 3, (48,), generator=generator).tolist() for _ in range(5)]


def differences(directory: Path, group: Group, work: Sequence[Pass], *, deterministic: bool) -> tuple[float, list[str]]:
    """The largest difference between passes as one and as two, and the names of all collectives of the latter."""
    model = load_model(
        directory,
        dtype=torch.float32,
        device=torch.device("cpu"),
        deterministic=deterministic,
        sharding=Sharding(group.place.size, group.place.rank),
    )
    model.join(group)
    one, two = Sequences(model, tokens()), Sequences(model, tokens())
    largest, names = 0.0, []
    for number, item in enumerate(work):
        inputs, halved = (
            replace(s.inputs(item.kind, item.chunks, wanted=item.wanted), expert_rows=item.expert_rows)
            for s in (one, two)
        )
        want = one.step(inputs)
        group.begin(number, 0)
        got = two.step(replace(halved, dual_batch=True))
        names += group.recorder.of_plan(number)
        group.begin(len(work), 0)
        assert got.shape == want.shape and bool(got.isfinite().all())
        largest = max(largest, float((got - want).abs().max())) if len(got) else largest
        for layer in range(model.kv_specs()[0].layers):
            mine, theirs = (s.kv.layer(0, layer) for s in (two, one))
            assert torch.equal(mine.isnan(), theirs.isnan()), "the same slots are written"
    return largest, names


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_halves_are_one_pass_to_the_bit(directory: Path, ranks: int) -> None:
    """Where a row's bits depend neither on its batch nor on how its prompt was cut; all ranks exchange in one order."""
    found = run_ranks(ranks, 1, lambda group: differences(directory, group, WORK[group.place.rank], deterministic=True))
    assert [difference for difference, _ in found] == [0.0] * ranks
    assert all(names == found[0][1] for _, names in found)
    assert ranks == 1 or len(found[0][1]) > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_halves_are_one_pass_where_bits_are_free(directory: Path, ranks: int) -> None:
    found = run_ranks(
        ranks, 1, lambda group: differences(directory, group, WORK[group.place.rank], deterministic=False)
    )
    assert max(difference for difference, _ in found) < CLOSE


@pytest.mark.parametrize("captured", [False, True], ids=["with counts", "with a capacity"])
def test_one_half_computes_while_rows_of_the_other_travel(directory: Path, captured: bool) -> None:
    """A half begins an exchange, the other one computes up to its own, and only then the first one waits."""

    def work(group: Group) -> list[str]:
        position = 20
        fill, decode = prompt(*((i, 0, position) for i in range(4))), step(position, *range(4), rows=4 * captured)
        _, names = differences(directory, group, [fill, decode], deterministic=True)
        return [key.split(".", 4)[4] for key in names if key.startswith("1.")]

    for names in run_ranks(2, 1, work):
        layers = 1 + max(int(name.split(",")[0].removeprefix("experts ")) for name in names)
        what = ("rows", "results") if captured else ("counts", "rows", "results")
        begun = [f"experts {layer}, {name}" for layer in range(layers) for name in what]
        expected = [begun[0]] * 2  # of both halves
        for name, following in pairwise(begun):
            expected += [f"{name}, arrival", following] * 2
        assert names == [*expected, *[f"{begun[-1]}, arrival"] * 2]
