"""DeepSeek-V2, V2-Lite and V3 against transformers on tiny random weights: logits to 1e-5 however the prompt is cut, greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind
from lockstep_worker.models import Model, deepseek, load_model
from lockstep_worker.weights import ConfigFile
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
from tests.kernels.sequences import EVERY, Sequences
from tests.kernels.test_fp8_oracles import check_equal_in_8_bits

__all__ = ["test_greedy_tokens", "test_logits_of_a_whole_prompt", "test_logits_of_chunks_and_decode_steps"]

MLA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,  # not that of the norms within attention
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
V2 = MLA | {
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 1.5,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
V2_LITE = V2 | {
    "q_lora_rank": None,
    "topk_method": "greedy",
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "v_head_dim": 24,
    "qk_nope_head_dim": 20,
}
V3 = MLA | {
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
    "rope_parameters": YARN,
    "num_nextn_predict_layers": 1,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ORACLES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", V2),
    "v2-biases": ("DeepseekV2", V2 | {"attention_bias": True}),
    "v2-lite": ("DeepseekV2", V2_LITE),
    "v2-lite-biases": ("DeepseekV2", V2_LITE | {"attention_bias": True}),
    "v2-plain-rope": ("DeepseekV2", V2_LITE | {"rope_parameters": PLAIN_ROPE}),
    "v2-uneven-mscale": ("DeepseekV2", V2_LITE | {"rope_parameters": YARN | {"mscale_all_dim": 0.6}}),
    "v3": ("DeepseekV3", V3),
    "v3-split-rope": ("DeepseekV3", V3 | {"rope_interleave": False, "norm_topk_prob": False}),
    "v3-no-q-rank": ("DeepseekV3", V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
}


@pytest.fixture(scope="module", params=list(ORACLES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Model]:
    """transformers' model and ours, of the same directory."""
    directory = tmp_path_factory.mktemp(request.param)
    return build(*ORACLES[request.param], directory), load(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["v2-lite", "v3"])
def test_bits_do_not_depend_on_the_batch_nor_on_the_cut(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Nor, where one form of the weights serves prompts and decode steps, on which of both a token came in."""
    build(*ORACLES[name], tmp_path)
    model = load_model(tmp_path, dtype=dtype, device=torch.device("cpu"), deterministic=True)
    generator = torch.Generator().manual_seed(3)
    lens = [1, 17, 64, 65, 100]
    tokens = [torch.randint(2, VOCAB, (n + 8,), generator=generator).tolist() for n in lens]
    alone = [Sequences(model, [t]).run(Kind.PREFILL, [(0, 0, len(t))], wanted=EVERY) for t in tokens]
    crowd = Sequences(model, tokens, seed=5)
    cuts = [[0, n // 3, n] if n > 3 else [0, n] for n in lens]
    crowd.run(Kind.PREFILL, [(i, 0, c[1]) for i, c in enumerate(cuts)])
    rest = [(i, c[1], c[2]) for i, c in enumerate(cuts) if len(c) > 2]
    for row, (i, _, end) in zip(crowd.run(Kind.PREFILL, rest), rest, strict=True):
        assert torch.equal(row, alone[i][end - 1])
    lonely = Sequences(model, tokens[4:])
    lonely.run(Kind.PREFILL, [(0, 0, lens[4])])
    for step in range(8):
        chunks = [(i, n + step, n + step + 1) for i, n in enumerate(lens)]
        rows = crowd.run(Kind.DECODE, chunks)
        assert torch.equal(rows[4], lonely.run(Kind.DECODE, [(0, *chunks[4][1:])])[0])
        if model.generated_reusable:
            for row, (i, at, _) in zip(rows, chunks, strict=True):
                assert torch.equal(row, alone[i][at])


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("name", ["v2-lite", "v3"])
def test_weights_of_8_bits(name: str, blocks: bool, tmp_path: Path) -> None:
    build(*ORACLES[name], tmp_path)
    check_equal_in_8_bits(tmp_path, blocks, ("_proj.weight", "_mqa.weight"))


def test_layers_for_further_tokens_are_passed_over_by_name(tmp_path: Path) -> None:
    build(*ORACLES["v3"], tmp_path)
    want = Sequences(load(tmp_path), [prompt()]).run(Kind.PREFILL, [(0, 0, LENGTH)])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.3.enorm.weight": torch.ones(64)}, file, metadata={"format": "pt"})
    assert torch.equal(Sequences(load(tmp_path), [prompt()]).run(Kind.PREFILL, [(0, 0, LENGTH)]), want)
    save_file(tensors | {"model.layers.4.enorm.weight": torch.ones(64)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.4\.enorm"):
        load(tmp_path)


def test_the_older_form_of_rope_settings(tmp_path: Path) -> None:
    build(*ORACLES["v2-lite"], tmp_path)
    want = Sequences(load(tmp_path), [prompt()]).run(Kind.PREFILL, [(0, 0, LENGTH)])
    edit(
        tmp_path,
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling={"type": "yarn"} | {k: v for k, v in V2["rope_parameters"].items() if k != "rope_type"},
    )
    assert torch.equal(Sequences(load(tmp_path), [prompt()]).run(Kind.PREFILL, [(0, 0, LENGTH)]), want)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_lora_rank", None),
        ("qk_rope_head_dim", 7),
        ("qk_nope_head_dim", "wide"),
        ("v_head_dim", 0),
        ("q_lora_rank", -1),
        ("topk_method", "noaux_tc"),
        ("scoring_func", "sigmoid"),
        ("n_group", 3),
        ("topk_group", 5),
        ("num_experts_per_tok", 5),
        ("moe_layer_freq", 2),
        ("first_k_dense_replace", -1),
        ("n_shared_experts", 1.5),
        ("num_key_value_heads", 2),
        ("mlp_bias", True),
        ("routed_scaling_factor", "high"),
    ],
)
def test_errors_name_the_field(field: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(V2 | {"architectures": ["DeepseekV2ForCausalLM"], "hidden_act": "silu", field: value})
    )
    with pytest.raises(ConfigError, match=field):
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), deterministic=True, dummy_weights=True)


@pytest.mark.parametrize(("field", "value"), [("kv_lora_rank", 24), ("qk_rope_head_dim", 8)])
def test_widths_without_cuda_kernels_are_named_when_loading(field: str, value: int, tmp_path: Path) -> None:
    widths = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "hidden_act": "silu", field: value}
    (tmp_path / "config.json").write_text(json.dumps(V2 | {"architectures": ["DeepseekV2ForCausalLM"]} | widths))
    config = ConfigFile(tmp_path)
    with pytest.raises(ConfigError, match=f"{field}.* is {value}"):
        deepseek.check_widths(config, deepseek.read_config(config))


def edit(directory: Path, **values: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
