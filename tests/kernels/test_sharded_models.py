"""Whole models whose experts are shared out among ranks: each rank's logits are those of one worker with everything.

Deterministic ones to the bit, wherever experts are. (Several shared experts are one block on workers that share out the others,
which adds in another order.)
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep_common.errors import ConfigError, Conflict
from lockstep_common.steps import Header, Kind
from lockstep_worker.collectives import Group, Place
from lockstep_worker.exchange.placement import WHOLE, Sharding
from lockstep_worker.models import Model, load_model
from lockstep_worker.weights import CONFIG, SINGLE
from tests.kernels.oracles import VOCAB, build
from tests.kernels.sequences import EVERY, Sequences
from tests.kernels.test_fp8_oracles import BLOCKS, ROWS, in_8_bits
from tests.kernels.test_oracles_deepseek import V2, V3
from tests.kernels.test_oracles_moe import GLM4_MOE, MIXTRAL, QWEN3_MOE
from tests.ranks import run_ranks

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE),
    "mixtral": ("Mixtral", MIXTRAL),
    "glm4-moe": ("Glm4Moe", GLM4_MOE | {"n_shared_experts": 2}),
    "deepseek-v2": ("DeepseekV2", V2),
    "deepseek-v3": ("DeepseekV3", V3),
}
TOLERANCE = 1e-5  # of logits that are spread by about 1
LENGTHS = (9, 1, 26, 14)
STEPS = 3  # decode steps at the end of each sequence


@pytest.fixture(scope="module", params=list(CASES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, values = CASES[request.param]
    path = tmp_path_factory.mktemp("model")
    build(family, values, path)
    return path


def load(directory: Path, sharding: Sharding = WHOLE, *, deterministic: bool = True) -> Model:
    cpu = torch.device("cpu")
    return load_model(directory, dtype=torch.float32, device=cpu, deterministic=deterministic, sharding=sharding)


def exact(directory: Path) -> bool:
    """Whether one worker adds in the order in which several do."""
    config = json.loads((directory / CONFIG).read_text())
    return config.get("n_shared_experts", 0) < 2


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCAB, (n + STEPS,), generator=generator).tolist() for n in LENGTHS]


def expected(model: Model) -> list[torch.Tensor]:
    """Logits of all positions of each sequence."""
    return [
        torch.cat(
            [
                (alone := Sequences(model, [tokens])).run(Kind.PREFILL, [(0, 0, n)], wanted=EVERY),
                *[alone.run(Kind.DECODE, [(0, p, p + 1)]) for p in range(n, n + STEPS)],
            ]
        )
        for n, tokens in zip(LENGTHS, sequences(), strict=True)
    ]


class Rank:
    """One rank's model and its share of the sequences; those with the number r mod ranks."""

    def __init__(self, group: Group, model: Model) -> None:
        model.join(group)
        self.model = model
        self.mine = [i for i in range(len(LENGTHS)) if i % group.place.size == group.place.rank]
        self.sequences = Sequences(model, [sequences()[i] for i in self.mine] or [[2]])
        self.error = 0.0

    def prefill(self, start: int, end: int, want: list[torch.Tensor]) -> None:
        """The part of [start, end) of each prompt."""
        self._run(Kind.PREFILL, {i: (min(start, LENGTHS[i]), min(end, LENGTHS[i])) for i in self.mine}, want)

    def decode(self, step: int, want: list[torch.Tensor], expert_rows: int = 0) -> None:
        places = {i: (LENGTHS[i] + step, LENGTHS[i] + step + 1) for i in self.mine}
        self._run(Kind.DECODE, places, want, expert_rows)

    def _run(
        self, kind: Kind, places: dict[int, tuple[int, int]], want: list[torch.Tensor], expert_rows: int = 0
    ) -> None:
        chunks = [(k, *places[i]) for k, i in enumerate(self.mine) if places[i][0] < places[i][1]]
        inputs = self.sequences.inputs(kind, chunks, wanted=EVERY)
        got = self.sequences.step(replace(inputs, expert_rows=expert_rows))
        wanted = [want[self.mine[k]][start:end] for k, start, end in chunks]
        if wanted:
            self.error = max(self.error, float((got - torch.cat(wanted)).abs().max()))
        assert len(got) == sum(end - start for _, start, end in chunks)


@pytest.mark.parametrize(("ranks", "deterministic"), [(2, True), (4, True), (8, True), (4, False)])
def test_each_rank_has_the_logits_of_one_worker(directory: Path, ranks: int, deterministic: bool) -> None:
    """Prompts in chunks, then decode steps with counts and with a capacity; with 8 ranks, some never have a token."""
    want = expected(load(directory, deterministic=deterministic))

    def work(group: Group) -> tuple[float, list[str]]:
        sharding = Sharding(ranks, group.place.rank, 0 if ranks == 8 else 4)
        rank = Rank(group, load(directory, sharding, deterministic=deterministic))
        for start, end in ((0, 5), (5, 20), (20, 30)):
            rank.prefill(start, end, want)
        for step in range(STEPS):
            rank.decode(step, want, expert_rows=4 if step == 1 else 0)
        return rank.error, [record.id.key for record in group.recorder.history()]

    found = run_ranks(ranks, 1, work)
    error = max(error for error, _ in found)
    assert error == 0 if deterministic and exact(directory) else error < TOLERANCE
    assert all(names == found[0][1] for _, names in found)
    assert len(found[0][1]) > 0


@pytest.mark.parametrize("deterministic", [True, False])
def test_logits_do_not_change_while_experts_move(directory: Path, deterministic: bool) -> None:
    """A layer moves before every pass, prefill and decode, with redundant slots; all ranks read the new place in the same pass."""
    want = expected(load(directory, deterministic=deterministic))

    def work(group: Group) -> float:
        model = load(directory, Sharding(4, group.place.rank, 4), deterministic=deterministic)
        rank, rng, seq = Rank(group, model), np.random.default_rng(1), 0

        def move() -> None:
            nonlocal seq
            seq += 1
            experts = rank.model.experts
            assert experts is not None
            extra = rng.integers(0, experts.experts, experts.slots - experts.experts)
            slots = rng.permutation(np.append(np.arange(experts.experts), extra)).tolist()
            layer = seq % len(experts.layers)
            experts.begin(
                Header(1, seq, Kind.DECODE, 0, 1, placement_version=seq, moved_layer=layer, moved_experts=tuple(slots))
            )

        for start, end in ((0, 5), (5, 30)):
            move()
            rank.prefill(start, end, want)
        for step in range(STEPS):
            move()
            rank.decode(step, want, expert_rows=4 if step == 1 else 0)
        return rank.error

    error = max(run_ranks(4, 1, work))
    assert error == 0 if deterministic and exact(directory) else error < TOLERANCE


def test_a_worker_reads_its_own_experts_only(directory: Path) -> None:
    """The shares of all workers together are the whole, but for what every worker has; all name the same model."""
    read = [0, 0, 0]
    models = []
    for i, sharding in enumerate((WHOLE, Sharding(2, 0), Sharding(2, 1))):

        def progress(share: float, bytes_read: int, i: int = i) -> None:
            read[i] = bytes_read

        models.append(
            load_model(
                directory,
                dtype=torch.float32,
                device=torch.device("cpu"),
                deterministic=True,
                progress=progress,
                sharding=sharding,
            )
        )
    whole, first, second = models
    assert whole.experts is None and first.experts is not None
    layer = first.experts.layers[0].weights
    assert layer.experts == first.experts.slots // 2
    routed = len(first.experts.layers) * first.experts.experts * 3 * layer.hidden * layer.width * 4
    assert read[0] - read[1] == read[0] - read[2] == routed // 2
    assert first.config_hash == second.config_hash != whole.config_hash


def test_slots_that_cannot_be_shared_out_name_the_setting(directory: Path) -> None:
    with pytest.raises(ConfigError, match="not a multiple of 3 ranks: choose the number of redundant experts"):
        load(directory, Sharding(3, 0))


@pytest.mark.parametrize("form", ["one tensor for all experts", "e4m3, scales by blocks", "e4m3, scales by rows"])
def test_experts_in_any_stored_form_are_shared_out_moved_and_read_again(form: str, tmp_path: Path) -> None:
    oracle = build(*CASES["qwen3-moe"], tmp_path)
    file = tmp_path / SINGLE
    if form.startswith("one tensor"):
        save_file({k: v.contiguous() for k, v in oracle.state_dict().items()}, file, metadata={"format": "pt"})
    else:
        blocks = form.endswith("blocks")
        stored, _ = in_8_bits(load_file(file), blocks, ("_proj.weight",))
        save_file(stored, file, metadata={"format": "pt"})
        config = json.loads((tmp_path / CONFIG).read_text())
        (tmp_path / CONFIG).write_text(json.dumps(config | {"quantization_config": BLOCKS if blocks else ROWS}))
    want = expected(load(tmp_path))

    def work(group: Group) -> float:
        rank = Rank(group, load(tmp_path, Sharding(2, group.place.rank, 2)))
        experts = rank.model.experts
        assert experts is not None
        rank.prefill(0, 10, want)
        experts.move(0, [1, 7, 6, 5, 4, 3, 2, 1, 0, 2])
        rank.prefill(10, 30, want)
        rank.model.join(group)  # a new epoch: places as they were loaded
        for step in range(STEPS):
            rank.decode(step, want)
        return rank.error

    assert max(run_ranks(2, 1, work)) < TOLERANCE


def test_a_worker_with_all_experts_does_not_join_a_group_that_shares_them_out(directory: Path) -> None:
    with pytest.raises(Conflict, match=r"holds all routed experts.*start it with --dp 2 --cp 1 --rank 1"):
        load(directory).join(Group(Place(2, 1, 1)))
