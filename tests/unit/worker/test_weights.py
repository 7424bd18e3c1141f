"""Directories in Hugging Face's format: one file and shards load alike, and every refusal names the file and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache, KvSpec
from lockstep_worker.models import Model, load_model
from lockstep_worker.models.layers import Rope, read_rope
from lockstep_worker.weights import CONFIG, INDEX, SINGLE, ConfigFile
from tests.tiny_model import Shape, make_tiny_model

CPU = torch.device("cpu")
SHAPE = Shape(vocab=320, hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, max_model_len=64)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path, shape=SHAPE)


def load(path: Path, dtype: torch.dtype = torch.float32, progress: Any = lambda share, read: None) -> Model:
    return load_model(path, dtype=dtype, device=CPU, deterministic=True, progress=progress)


def change(path: Path, **fields: Any) -> None:
    """Sets fields of config.json; None removes one."""
    config = json.loads((path / CONFIG).read_text()) | fields
    (path / CONFIG).write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def shard(path: Path) -> None:
    """Replaces the single file by two shards and an index."""
    tensors = load_file(path / SINGLE)
    names = sorted(tensors)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (path / SINGLE).unlink()


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors (`__` stands for a dot) of the single file; None removes one."""
    tensors = load_file(path / SINGLE) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / SINGLE)


def test_shards_are_the_same_model_as_one_file(tiny: Path) -> None:
    hidden = torch.randn(3, SHAPE.hidden)
    single = load(tiny)
    shard(tiny)
    sharded = load(tiny)
    assert torch.equal(single.logits(hidden), sharded.logits(hidden))
    assert single.config_hash == sharded.config_hash


def test_the_hash_follows_config_dtype_and_shapes(tiny: Path) -> None:
    hashes = {load(tiny).config_hash, load(tiny, torch.bfloat16).config_hash}
    change(tiny, rms_norm_eps=1e-6)
    hashes.add(load(tiny).config_hash)
    assert len(hashes) == 3


def test_facts_and_progress(tiny: Path) -> None:
    seen: list[tuple[float, int]] = []
    model = load(tiny, progress=lambda share, read: seen.append((share, read)))
    assert (model.name, model.vocab_size, model.max_model_len, model.routed_experts) == (
        "LlamaForCausalLM",
        320,
        64,
        False,
    )
    assert model.kv_specs() == (KvSpec("full", 2, 1, 8, torch.float32),)
    assert model.kv_specs()[0].bytes_per_block(16) == 2 * 2 * 1 * 8 * 16 * 4
    assert seen == sorted(seen) and len(seen) >= SHAPE.layers
    assert seen[-1] == (1.0, sum(tensor.nbytes for tensor in load_file(tiny / SINGLE).values()))


def test_dummy_weights_need_a_config_only(tiny: Path) -> None:
    (tiny / SINGLE).unlink()

    def dummy() -> Model:
        return load_model(tiny, dtype=torch.float32, device=CPU, deterministic=True, dummy_weights=True)

    hidden = torch.randn(3, SHAPE.hidden)
    logits = dummy().logits(hidden)
    assert torch.equal(logits, dummy().logits(hidden)), "a tensor's name is its seed"
    assert logits.std() > 0.01


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures names 'GPT2LMHeadModel', which is not one of"),
        ({"architectures": None}, "architectures is None, expected a list of one name"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config.quant_method is 'awq', which is not one",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "16"}, "hidden_size is '16', expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 2 query heads"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, expected a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_parameters.rope_type is 'longrope', which is not one of",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None, expected a positive number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters is .* one object"),
        ({"rope_theta": 0}, "rope_theta is 0, expected a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"sliding_window": 32}, "sliding_window is 32, less than the 64 positions"),
        ({"sliding_window": "none"}, "sliding_window is 'none', expected a positive integer"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types has \['sliding_attention'\]"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a list"),
    ],
)
def test_fields_that_are_refused_are_named(tiny: Path, fields: dict[str, Any], message: str) -> None:
    change(tiny, **fields)
    with pytest.raises(ConfigError, match=rf"{CONFIG}: {message}"):
        load(tiny)


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 64},
        {"sliding_window": 32, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 2},
        {"hidden_act": "swish"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    ],
)
def test_fields_without_effect_are_accepted(tiny: Path, fields: dict[str, Any]) -> None:
    change(tiny, **fields)
    assert load(tiny).max_model_len == 64


def test_both_forms_of_rope_mean_the_same(tiny: Path) -> None:
    llama3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32}
    change(tiny, rope_theta=5e5, rope_scaling=llama3 | {"type": "llama3"})
    old = read_rope(ConfigFile(tiny))
    change(
        tiny, rope_theta=None, rope_scaling=None, rope_parameters=llama3 | {"rope_type": "llama3", "rope_theta": 5e5}
    )
    assert old == read_rope(ConfigFile(tiny)) == Rope(5e5, 8.0, 1.0, 4.0, 32)


def test_missing_and_broken_files_are_named(tiny: Path) -> None:
    (tiny / SINGLE).rename(tiny / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=f"neither {SINGLE} nor {INDEX} is there; only safetensors are read"):
        load(tiny)
    (tiny / SINGLE).write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=f"{SINGLE}: cannot be read as safetensors"):
        load(tiny)
    (tiny / CONFIG).write_text("[]")
    with pytest.raises(ConfigError, match=f"{CONFIG}: holds no JSON object"):
        load(tiny)
    (tiny / CONFIG).write_text("{")
    with pytest.raises(ConfigError, match=f"{CONFIG}: cannot be read as JSON"):
        load(tiny)
    (tiny / CONFIG).unlink()
    with pytest.raises(ConfigError, match=f"{CONFIG}: no such file"):
        load(tiny)


def test_tensors_that_do_not_fit_are_named(tiny: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    good = load_file(tiny / SINGLE)[name]
    cases: list[tuple[torch.Tensor | None, str]] = [
        (None, f"tensor {name} is missing"),
        (good[:5], rf"{SINGLE}: tensor {name} has shape \[5, 16\], {CONFIG} implies \[24, 16\]"),
        (good.to(torch.int8), f"{SINGLE}: tensor {name} has dtype I8, which is not supported"),
    ]
    for tensor, message in cases:
        rewrite(tiny, **{name: tensor})
        with pytest.raises(ConfigError, match=message):
            load(tiny)
    rewrite(tiny, **{name: good, "model.layers.0.self_attn.q_proj.bias": torch.zeros(16)})
    with pytest.raises(ConfigError, match=f"{SINGLE}: tensor model.layers.0.self_attn.q_proj.bias is not part of"):
        load(tiny)


def test_shards_that_do_not_fit_the_index_are_named(tiny: Path) -> None:
    shard(tiny)
    index = json.loads((tiny / INDEX).read_text())
    name = min(index["weight_map"])
    index["weight_map"][name] = "model-00002-of-00002.safetensors"
    (tiny / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"{INDEX}: weight_map puts tensor {name} into model-00002"):
        load(tiny)
    (tiny / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors: cannot be read"):
        load(tiny)
    (tiny / INDEX).write_text("{}")
    with pytest.raises(ConfigError, match=f"{INDEX}: weight_map is missing"):
        load(tiny)


def test_old_checkpoints_may_store_what_follows_from_the_config(tiny: Path) -> None:
    rewrite(tiny, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(tiny)


@pytest.mark.parametrize("kind", [Kind.DECODE, Kind.PREFILL])
def test_a_placeholder_step_gives_no_hidden_states(tiny: Path, kind: Kind) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    inputs = StepInputs(
        kind=kind,
        token_ids=none,
        positions=none,
        rows=none,
        query_starts=torch.zeros(1, dtype=torch.int64),
        seq_lens=none,
        block_tables=(none.view(0, 0),),
        slots=(none,),
        logits_index=none,
        query_lens=(),
        host_seq_lens=(),
        max_seq_len=0,
    )
    model = load(tiny)
    kv = KvCache(model.kv_specs(), num_blocks=2, block_size=16)
    assert model.logits(model.forward(inputs, kv)).shape == (0, 320)
