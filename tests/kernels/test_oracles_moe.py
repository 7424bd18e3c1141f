"""Qwen3-MoE, Mixtral and GLM-4-MoE against transformers on tiny random weights, and on the GPU against themselves on CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind
from lockstep_worker.models import Model, load_model
from tests.kernels.oracles import (  # the tests among them take this file's `pair`
    LENGTH,
    VOCAB,
    build,
    load,
    prompt,
    test_greedy_tokens,
    test_logits_of_a_whole_prompt,
    test_logits_of_chunks_and_decode_steps,
)
from tests.kernels.sequences import Sequences
from tests.kernels.test_fp8_oracles import check_equal_in_8_bits
from tests.kernels.test_oracles import BASE

__all__ = ["test_greedy_tokens", "test_logits_of_a_whole_prompt", "test_logits_of_chunks_and_decode_steps"]

QWEN3_MOE = BASE | {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
MIXTRAL = BASE | {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
GLM4_MOE = BASE | {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
ORACLES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3-moe-step": (
        "Qwen3Moe",
        QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_hidden_layers": 4},
    ),
    "qwen3-moe-raw-weights": (
        "Qwen3Moe",
        QWEN3_MOE | {"norm_topk_prob": False, "num_experts": 6, "attention_bias": True},
    ),
    "mixtral": ("Mixtral", MIXTRAL),
    "glm4-moe": ("Glm4Moe", GLM4_MOE),
    "glm4-moe-groups": (
        "Glm4Moe",
        GLM4_MOE
        | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "use_qk_norm": False, "norm_topk_prob": False},
    ),
    "glm4-moe-no-dense": ("Glm4Moe", GLM4_MOE | {"first_k_dense_replace": 0, "attention_bias": False}),
}


@pytest.fixture(scope="module", params=list(ORACLES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Model]:
    """transformers' model and ours, of the same directory."""
    directory = tmp_path_factory.mktemp(request.param)
    return build(*ORACLES[request.param], directory), load(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe"])
def test_bits_do_not_depend_on_the_batch(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    build(*ORACLES[name], tmp_path)
    model = load_model(tmp_path, dtype=dtype, device=torch.device("cpu"), deterministic=True)
    generator = torch.Generator().manual_seed(3)
    lens = [1, 17, 64, 65, 100]
    tokens = [torch.randint(2, VOCAB, (n + 4,), generator=generator).tolist() for n in lens]
    alone = [Sequences(model, [t]) for t in tokens]
    crowd = Sequences(model, tokens, seed=5)
    prompts = [(i, 0, n) for i, n in enumerate(lens)]
    for row, one, n in zip(crowd.run(Kind.PREFILL, prompts), alone, lens, strict=True):
        assert torch.equal(row, one.run(Kind.PREFILL, [(0, 0, n)])[0])
    for step in range(4):
        rows = crowd.run(Kind.DECODE, [(i, n + step, n + step + 1) for i, n in enumerate(lens)])
        for row, one, n in zip(rows, alone, lens, strict=True):
            assert torch.equal(row, one.run(Kind.DECODE, [(0, n + step, n + step + 1)])[0])


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "glm4-moe"])
def test_experts_that_are_stored_as_one_tensor(name: str, tmp_path: Path) -> None:
    """As transformers holds them in memory: `mlp.experts.gate_up_proj` [E, 2i, d] and `mlp.experts.down_proj` [E, d, i]."""
    oracle = build(*ORACLES[name], tmp_path)
    want = Sequences(load(tmp_path), [prompt()]).run(Kind.PREFILL, [(0, 0, LENGTH)])
    file = tmp_path / "model.safetensors"
    save_file({k: v.contiguous() for k, v in oracle.state_dict().items()}, file, metadata={"format": "pt"})
    assert any(k.endswith("mlp.experts.gate_up_proj") for k in load_file(file))
    assert torch.equal(Sequences(load(tmp_path), [prompt()]).run(Kind.PREFILL, [(0, 0, LENGTH)]), want)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe-groups"])
def test_experts_of_8_bits(name: str, blocks: bool, tmp_path: Path) -> None:
    build(*ORACLES[name], tmp_path)
    check_equal_in_8_bits(tmp_path, blocks, ("_proj.weight",))


def test_layers_for_further_tokens_are_passed_over_by_name(tmp_path: Path) -> None:
    build(*ORACLES["glm4-moe"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.3.enorm.weight": torch.ones(64)}, file, metadata={"format": "pt"})
    load(tmp_path)
    save_file(tensors | {"model.layers.4.enorm.weight": torch.ones(64)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.4\.enorm"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3-moe", "num_experts", 0),
        ("qwen3-moe", "num_experts_per_tok", 9),
        ("qwen3-moe", "mlp_only_layers", "none"),
        ("qwen3-moe", "decoder_sparse_step", 0),
        ("qwen3-moe", "norm_topk_prob", "yes"),
        ("qwen3-moe", "moe_intermediate_size", None),
        ("mixtral", "num_local_experts", None),
        ("mixtral", "num_local_experts", 10**4),
        ("mixtral", "sliding_window", 8),
        ("glm4-moe", "n_group", 3),
        ("glm4-moe", "n_group", 8),
        ("glm4-moe", "topk_group", 2),
        ("glm4-moe", "routed_scaling_factor", "high"),
        ("glm4-moe", "n_shared_experts", 1.5),
        ("glm4-moe", "first_k_dense_replace", -1),
        ("glm4-moe", "partial_rotary_factor", 2.0),
    ],
)
def test_errors_name_the_field(name: str, field: str, value: object, tmp_path: Path) -> None:
    family, values = ORACLES[name]
    values = values | {"architectures": [f"{family}ForCausalLM"], "hidden_act": "silu", field: value}
    if field == "partial_rotary_factor":
        values["rope_parameters"] = None
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=field):
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), deterministic=True, dummy_weights=True)
