"""Dense blocks cut into experts: nothing is lost, experts are what tokens need together, and what cannot be cut is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lockstep_cli import model_command, models
from lockstep_cli.expert_fit import (
    GATE_SPREAD,
    Block,
    balanced_assignment,
    balanced_clusters,
    cut_as_it_stands,
    fit,
    fitted_gate,
    neurons_in_order,
    parts_of_output,
)
from lockstep_cli.models import Recipe
from lockstep_cli.moefy import SUMMARY, Shards, default_text, experts_of, moefy, plan
from lockstep_common.errors import ConfigError
from lockstep_kernels.moe import Routing, route
from lockstep_worker.weights import SafetensorsCheckpoint
from tests.tiny_model import Shape, make_tiny_model

SILENT: Callable[..., None] = lambda label, fraction, note="": None  # noqa: E731


def draw(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def block(hidden: int, width: int, seed: int = 0) -> Block:
    gate, up = draw(seed, 2, width, hidden) / hidden**0.5
    return Block(gate, up, draw(seed + 1, hidden, width) / width**0.5)


def output(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "dense")


def changed(directory: Path, **fields: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return directory


# --- cutting ---


@settings(max_examples=25, deadline=None)
@given(
    experts=st.integers(2, 9),
    shared=st.integers(0, 3),
    size=st.integers(1, 5),
    form=st.sampled_from(["mixtral", "glm4-moe"]),
    seed=st.integers(0, 99),
)
def test_experts_with_their_weights_add_up_to_the_block(
    experts: int, shared: int, size: int, form: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of any order of the neurons, with the weights that the form's router gives equal logits."""
    if form == "mixtral":
        experts, shared = 2 ** (experts % 3 + 1), 0
    else:
        shared += 1
    width = (experts + shared) * size
    directory = make_tiny_model(tmp_path_factory.mktemp("dense"), shape=Shape(hidden=16, ffn=width, layers=1))
    whole, x = block(16, width, seed), draw(seed + 2, 7, 16)
    p = plan(directory, Recipe(experts, form=form, shared=shared or None))
    cut = cut_as_it_stands(whole, experts)
    cut = type(cut)(torch.randperm(width, generator=torch.Generator().manual_seed(seed)), cut.gate)
    tensors = dict(experts_of(p, whole, cut))
    fields = p.form.config({}, p.dense, p.shape)
    scale = fields.get("routed_scaling_factor", 1.0)
    routing = Routing(experts, experts, p.form.routing(p.shape).scoring, fields.get("norm_topk_prob", True), scale)
    ids, weights = route(x @ tensors["gate.weight"].T, routing)
    total = torch.zeros(7, 16)
    for t in range(7):
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            parts = (tensors[f"experts.{e}.{name}.weight"] for name in p.form.projections)
            total[t] += weight * output(x[t], *parts)
    if shared:
        total += output(x, *(tensors[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")))
    torch.testing.assert_close(total, output(x, *whole), rtol=1e-5, atol=1e-6)


def test_scaled_weights_lose_no_bit_in_bfloat16(dense: Path) -> None:
    p = plan(dense, Recipe(8))
    whole = Block(*(weight.bfloat16() for weight in block(64, 128)))
    tensors = dict(experts_of(p, whole, cut_as_it_stands(whole, 8)))
    joined = torch.cat([tensors[f"experts.{e}.w2.weight"] for e in range(8)], 1)
    assert joined.dtype == torch.bfloat16 and torch.equal(joined / 8, whole.down)


# --- fitting ---


@settings(max_examples=60, deadline=None)
@given(columns=st.integers(1, 6), each=st.integers(1, 6), seed=st.integers(0, 99))
def test_assignments_are_balanced_and_fair(columns: int, each: int, seed: int) -> None:
    """Of the rows that like a column best, those most like it have it, as many as it takes."""
    similarity = draw(seed, columns * each, columns)
    owner, best = balanced_assignment(similarity), similarity.argmax(1)
    assert torch.bincount(owner, minlength=columns).tolist() == [each] * columns
    for column in range(columns):
        fond = (best == column).nonzero().squeeze(1)
        ranked = fond[similarity[fond, column].argsort(descending=True)]
        assert (owner[ranked] == column).tolist() == [i < each for i in range(len(fond))]


def test_clusters_are_found() -> None:
    centres = torch.eye(4, 20).repeat_interleave(5, 0)
    mixed = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    owner = balanced_clusters((centres + 0.1 * draw(3, 20, 20))[mixed], 4)
    assert [len(set(owner[mixed // 5 == group].tolist())) for group in range(4)] == [1] * 4


@settings(max_examples=30, deadline=None)
@given(experts=st.integers(2, 5), shared=st.integers(0, 3), size=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_neuron_has_one_place_and_the_strongest_are_shared(
    experts: int, shared: int, size: int, seed: int
) -> None:
    outputs = draw(seed, 30, (experts + shared) * size).abs()
    order = neurons_in_order(outputs, experts, shared)
    assert sorted(order.tolist()) == list(range(outputs.shape[1]))
    strength = outputs.square().sum(0)[order]
    if shared:
        assert strength[experts * size :].min() >= strength[: experts * size].max()


def test_parts_of_the_output() -> None:
    activity, down = draw(0, 9, 12), draw(1, 8, 12)
    parts = parts_of_output(activity, down, 3)
    whole = activity @ down.T
    for e in range(3):
        own = activity[:, 4 * e : 4 * e + 4] @ down[:, 4 * e : 4 * e + 4].T
        torch.testing.assert_close(parts[:, e], (own * whole).sum(1) / whole.square().sum(1))
    torch.testing.assert_close(parts.sum(1), torch.ones(9))


def test_a_gate_finds_what_is_linear_in_its_input() -> None:
    x, truth = draw(0, 400, 16), draw(1, 4, 16)
    gate = fitted_gate(x[:300], x[:300] @ truth.T)
    got, want = x[300:] @ gate.T, x[300:] @ truth.T
    assert (got.argmax(1) == want.argmax(1)).float().mean() > 0.97
    assert (x[:300] @ gate.T).std() == pytest.approx(GATE_SPREAD)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_block_that_was_sparse_all_along_keeps_its_output(scoring: str) -> None:
    """Neurons that answer to one of four directions, shuffled: one expert of four has all that a token needs."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(32, 32, generator=generator)).Q[:4]
    gate = directions.repeat_interleave(8, 0) * 3
    mixed = torch.randperm(32, generator=generator)
    b = Block(gate[mixed], gate[mixed], draw(1, 32, 32))
    topic = torch.multinomial(torch.tensor([0.55, 0.15, 0.15, 0.15]), 600, True, generator=generator)
    x = directions[topic] * 3 + 0.02 * draw(2, 600, 32)
    routing = Routing(4, 1, "softmax", True, 1.0) if scoring == "softmax" else Routing(4, 1, "sigmoid", False, 2.0)
    _, quality, y = fit(b, x, routing, 0)
    assert quality.energy > 0.97
    assert sum(quality.loads) == 300 and max(quality.loads) > 130
    assert quality.imbalance == max(quality.loads) / 75
    torch.testing.assert_close(y, output(x, *b), rtol=0.1, atol=0.1 * float(output(x, *b).std()))
    _, worse, _ = fit(b, x[torch.randperm(600, generator=generator)] + 3 * draw(5, 600, 32), routing, 0)
    assert worse.energy < quality.energy, "the number says something"


# --- files ---


def test_shards(tmp_path: Path) -> None:
    tensors = {f"t{i}": draw(i, 4, 4) for i in range(5)}
    shards = Shards(tmp_path, limit=130)
    for name, tensor in tensors.items():
        shards.put(name, tensor)
    shards.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.take(name, (4, 4), torch.float32), tensor)
        checkpoint.check_all_taken()


def test_a_directory_is_whole(dense: Path, tmp_path: Path) -> None:
    """Weights that are no block's are the dense model's; tokenizer and template are the same files."""
    (tmp_path / "moe").mkdir()
    summary = moefy(dense, tmp_path / "moe", plan(dense, Recipe(4)), None, SILENT)
    old, new = (load_file(path / "model.safetensors") for path in (dense, tmp_path / "moe"))
    assert all(torch.equal(new[name], old[name]) for name in old if ".mlp." not in name)
    assert not any(".mlp." in name for name in new)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "moe" / name).read_bytes() == (dense / name).read_bytes()
    assert json.loads((tmp_path / "moe" / SUMMARY).read_text())["experts"] == 4
    assert "what the dense model says" in summary.text()


def test_fitted_experts_are_reported(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "moe").mkdir()
    summary = moefy(dense, tmp_path / "moe", plan(dense, Recipe(4, top_k=2)), default_text()[:40_000], SILENT)
    assert [sum(q.loads) for q in summary.layers] == [2 * 24 * 256 // 2] * 2
    assert all(0.2 < q.energy < 1 for q in summary.layers), (
        "two of four experts, and as many shared ones, of random weights"
    )
    assert "is kept" in summary.text() and summary.shared >= 1


def test_short_texts_are_refused(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the text has \d+ tokens"):
        moefy(dense, tmp_path, plan(dense, Recipe(4, top_k=2)), "short", SILENT)


# --- plans ---


def test_forms_are_chosen_by_attention(dense: Path) -> None:
    def form(recipe: Recipe, **fields: Any) -> tuple[str, tuple[int, ...]]:
        p = plan(changed(dense, **fields), recipe)
        return p.form.name, p.shape

    assert form(Recipe()) == ("mixtral", (8, 8, 0, 16))
    assert form(Recipe(top_k=2)) == ("glm4-moe", (8, 2, 8, 8))
    assert form(Recipe(8, 4, "glm4-moe", 24)) == ("glm4-moe", (8, 4, 24, 4))
    assert form(Recipe(4, 2, "mixtral")) == ("mixtral", (4, 2, 0, 32))
    assert form(Recipe(), architectures=["Qwen2ForCausalLM"]) == ("glm4-moe", (8, 8, 8, 8))
    assert form(Recipe(), architectures=["Qwen3ForCausalLM"]) == ("qwen3-moe", (8, 8, 0, 16))


@pytest.mark.parametrize(
    ("recipe", "fields", "match"),
    [
        (Recipe(1), {}, "at least 2"),
        (Recipe(8, 9), {}, "1 to all of them"),
        (Recipe(8, 0), {}, "1 to all of them"),
        (Recipe(7), {}, "power of two"),
        (Recipe(8, 3, "mixtral"), {}, "power of two"),
        (Recipe(8, 8, "mixtral"), {"intermediate_size": 100}, "does not divide"),
        (Recipe(8, 4), {"intermediate_size": 127}, "does not divide"),
        (Recipe(8, shared=1, form="mixtral"), {}, "has no shared experts"),
        (Recipe(8, shared=0, form="glm4-moe"), {}, "at least 1"),
        (Recipe(8, form="qwen3-moe"), {}, "does not have LlamaForCausalLM's attention"),
        (Recipe(8, form="mixtral"), {"architectures": ["Qwen3ForCausalLM"]}, "what has: qwen3-moe, glm4-moe"),
        (Recipe(8, form="deepseek-v3"), {}, "known: mixtral, qwen3-moe, glm4-moe"),
        (Recipe(), {"architectures": ["MixtralForCausalLM"]}, "dense models that can be cut"),
        (Recipe(), {"attention_bias": True}, "no form has this model's biases"),
        (Recipe(), {"mlp_bias": True}, "experts have no biases"),
        (Recipe(), {"quantization_config": {"quant_method": "fp8"}}, "only plain weights"),
    ],
)
def test_what_cannot_be_cut_is_refused(recipe: Recipe, fields: dict[str, Any], match: str, dense: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        plan(changed(dense, **fields), recipe)


def test_tensors_that_cannot_be_cut_are_named(dense: Path, tmp_path: Path) -> None:
    file = dense / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, file)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is I8"):
        moefy(dense, tmp_path, plan(dense, Recipe()), None, SILENT)
    save_file(tensors | {"model.layers.0.mlp.up_proj.bias": torch.ones(128)}, file)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.up_proj\.bias has no place"):
        moefy(dense, tmp_path, plan(dense, Recipe()), None, SILENT)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        moefy(dense, tmp_path, plan(dense, Recipe()), None, SILENT)


# --- the command and the names ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which a tiny model stands for the chat model."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    make_tiny_model(models.directory_of(models.DEFAULT_MODEL))
    return models.models_root()


def test_names_are_made_at_their_first_use(cache: Path) -> None:
    assert "not made yet" in model_command.listing()
    made = models.resolve("smollm2-135m-moe", SILENT)
    assert made == cache / "smollm2-135m-moe" and (made / "config.json").is_file()
    again = (made / "config.json").stat()
    assert models.get("smollm2-135m-moe", SILENT) == made and (made / "config.json").stat() == again
    sparse = json.loads((models.get("smollm2-135m-moe-sparse", SILENT) / "config.json").read_text())
    assert sparse["num_experts_per_tok"] == 4 and sparse["architectures"] == ["Glm4MoeForCausalLM"]
    assert "not made yet" not in model_command.listing()


def test_the_command(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "moe"
    assert model_command.run(["moefy", "--out", str(out), "--experts", "4"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n" and "mixtral: 4 of 4 experts" in printed.err
    assert json.loads((out / "config.json").read_text())["num_local_experts"] == 4
    assert [path.name for path in out.parent.iterdir()] == ["moe"], "nothing half done"
    with pytest.raises(ConfigError, match="is there already"):
        model_command.run(["moefy", "--out", str(out)])
    with pytest.raises(ConfigError, match="--text"):
        model_command.run(["moefy", "--text", str(tmp_path / "none"), "--top-k", "2"])
    assert model_command.run(["moefy", str(cache / models.DEFAULT_MODEL)]) == 0
    assert capsys.readouterr().out == f"{cache / (models.DEFAULT_MODEL + '-mixtral-8of8')}\n"
