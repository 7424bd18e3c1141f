"""Checkpoints of 8-bit weights against transformers' model of the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind
from lockstep_kernels.fp8 import BLOCK, E4M3, Fp8Weight, dequantise
from lockstep_worker.quantisation import Scales, read_quantisation
from lockstep_worker.weights import CONFIG, SINGLE, ConfigFile
from tests.kernels.oracles import LENGTH, load, prompt
from tests.kernels.sequences import EVERY, Sequences

BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
}
ROWS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
}
TOKENS = 21


def quantised(weight: torch.Tensor, blocks: bool) -> Fp8Weight:
    """The largest number of each block or row becomes the largest of e4m3."""
    n, k = weight.shape
    if not blocks:
        scale = weight.abs().amax(1) / 448
        return Fp8Weight((weight / scale[:, None]).to(E4M3), scale)
    padded = torch.nn.functional.pad(weight, (0, -k % BLOCK, 0, -n % BLOCK))
    tiles = padded.view(-(-n // BLOCK), BLOCK, -(-k // BLOCK), BLOCK)
    scale = tiles.abs().amax((1, 3)) / 448
    values = (tiles / scale[:, None, :, None]).view(padded.shape)[:n, :k]
    return Fp8Weight(values.contiguous().to(E4M3), scale)


def in_8_bits(
    tensors: dict[str, torch.Tensor], blocks: bool, endings: tuple[str, ...]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint whose weights of these names are in 8 bits, and the one in float32 that it stands for."""
    stored, wide = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(endings):
            weight = quantised(tensor, blocks)
            stored[name], wide[name] = weight.values, dequantise(weight, torch.float32)
            scale = weight.scale if blocks else weight.scale[:, None].contiguous()
            stored[name.removesuffix("weight") + ("weight_scale_inv" if blocks else "weight_scale")] = scale
    return stored, wide


def check_equal_in_8_bits(directory: Path, blocks: bool, endings: tuple[str, ...]) -> None:
    """The model whose weights of these names are stored in 8 bits is the one of the weights that they stand for."""
    stored, wide = in_8_bits(load_file(directory / SINGLE), blocks, endings)
    save_file(wide, directory / SINGLE, metadata={"format": "pt"})
    want = Sequences(load(directory), [prompt()]).run(Kind.PREFILL, [(0, 0, LENGTH)])
    save_file(stored, directory / SINGLE, metadata={"format": "pt"})
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | {"quantization_config": BLOCKS if blocks else ROWS}))
    assert torch.equal(Sequences(load(directory), [prompt()]).run(Kind.PREFILL, [(0, 0, LENGTH)]), want)


@pytest.fixture(params=["blocks", "rows"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """transformers' model of the dequantised weights, and the directory of the quantised ones."""
    blocks = request.param == "blocks"
    config = transformers.Qwen3Config(
        vocab_size=257, hidden_size=192, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=48, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.Qwen3ForCausalLM(config)
    model.eval()
    tensors = {
        name: parameter * 4 if name.endswith("_proj.weight") else parameter
        for name, parameter in model.state_dict().items()
    }
    stored, wide = in_8_bits(tensors, blocks, ("_proj.weight",))
    model.load_state_dict(wide)
    save_file(stored, str(tmp_path / SINGLE))
    fields = config.to_dict() | {"quantization_config": BLOCKS if blocks else ROWS}
    (tmp_path / CONFIG).write_text(json.dumps(fields | {"architectures": ["Qwen3ForCausalLM"]}))
    return model, tmp_path


def test_logits(pair: tuple[Any, Path]) -> None:
    oracle, path = pair
    tokens = torch.randint(2, 257, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        want = oracle(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    got = Sequences(load(path), [tokens]).run(Kind.PREFILL, [(0, 0, TOKENS)], wanted=EVERY)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_random_weights_of_8_bits(pair: tuple[Any, Path]) -> None:
    (pair[1] / SINGLE).unlink()
    model = load(pair[1], dummy_weights=True)
    logits = Sequences(model, [[1, 2, 3]]).run(Kind.PREFILL, [(0, 0, 3)], wanted=EVERY)
    assert bool(logits.isfinite().all()) and logits.std() > 0


def test_weights_of_8_bits_without_a_word_in_the_config_are_refused(pair: tuple[Any, Path]) -> None:
    file = pair[1] / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": None}))
    with pytest.raises(ConfigError, match=r"q_proj\.weight is of 8 bits, but config\.json has no quantization_config"):
        load(pair[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("int8", "quantization_config is 'int8', expected an object"),
        (
            {"quant_method": "gptq"},
            "quantization_config.quant_method is 'gptq', which is not one of fp8, compressed-te",
        ),
        ({"quant_method": "fp8"}, "quantization_config.weight_block_size is None, only .128, 128. is supported"),
        (BLOCKS | {"activation_scheme": "static"}, "quantization_config.activation_scheme is 'static', only"),
        (ROWS | {"format": "pack-quantized"}, "quantization_config.format is 'pack-quantized', only 'float-quantized'"),
        (ROWS | {"config_groups": {}}, "quantization_config.config_groups is {}, expected groups of layers"),
        (
            ROWS | {"config_groups": {"a": GROUP | {"input_activations": None}}},
            "quantization_config.config_groups.a.input_activations is None, expected an object",
        ),
        (
            ROWS | {"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | {"strategy": "tensor"}}}},
            "quantization_config.config_groups.a.weights.strategy is 'tensor', only 'channel' is supported",
        ),
        (
            ROWS | {"config_groups": {"a": GROUP | {"weights": GROUP["weights"] | {"actorder": "group"}}}},
            "quantization_config.config_groups.a.weights.actorder is 'group', which is not supported",
        ),
        (
            ROWS | {"config_groups": {"a": GROUP | {"output_activations": GROUP["input_activations"]}}},
            "quantization_config.config_groups.a.output_activations is {.*}, which is not supported",
        ),
        (
            ROWS | {"config_groups": {"a": GROUP | {"format": "nvfp4-pack-quantized"}}},
            "quantization_config.config_groups.a.format is 'nvfp4-pack-quantized', only None or 'float-quantized'",
        ),
        (ROWS | {"config_groups": {"a": None}}, "quantization_config.config_groups.a is None, expected an object"),
        (ROWS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "quantization_config.sparsity_config is {'form"),
        (ROWS | {"transform_config": {"config_groups": {"R1": {}}}}, "quantization_config.transform_config is {'conf"),
        (ROWS | {"quantization_status": "initialized"}, "quantization_config.quantization_status is 'initialized', on"),
        (BLOCKS | {"scale_fmt": "e5m2"}, "quantization_config.scale_fmt is 'e5m2', only None or 'ue8m0' is supported"),
        (BLOCKS | {"store_dtype": "int4"}, "quantization_config.store_dtype is 'int4', which is not supported"),
    ],
)
def test_other_quantised_checkpoints_are_refused_by_name(fields: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"quantization_config": fields}))
    with pytest.raises(ConfigError, match=message):
        read_quantisation(ConfigFile(tmp_path))


def test_checkpoints_of_an_older_form_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"compression_config": ROWS}))
    with pytest.raises(ConfigError, match=r"compression_config is the name of an older form; quantization_config is"):
        read_quantisation(ConfigFile(tmp_path))


NOTHING_MORE: dict[str, Any] = {"actorder": None, "block_structure": None, "group_size": None, "observer_kwargs": {}}


@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        (None, None),
        (BLOCKS | {"scale_fmt": "ue8m0"}, Scales.BLOCKS),
        (BLOCKS | {"modules_to_not_convert": ["lm_head"]}, Scales.BLOCKS),
        (
            ROWS
            | {
                "quantization_status": "compressed",
                "version": "0.12.2",
                "global_compression_ratio": None,
                "kv_cache_scheme": None,
                "sparsity_config": {"format": "dense", "targets": [], "global_sparsity": 0.1},
                "transform_config": {},
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "format": "float-quantized",
                        "output_activations": None,
                        "weights": GROUP["weights"] | NOTHING_MORE | {"observer": "minmax", "scale_dtype": None},
                        "input_activations": GROUP["input_activations"] | NOTHING_MORE | {"observer": None},
                    }
                },
            },
            Scales.ROWS,
        ),
    ],
)
def test_fields_that_ask_for_nothing_may_be_there(fields: Any, scales: Scales | None, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"quantization_config": fields, "compression_config": {}}))
    assert read_quantisation(ConfigFile(tmp_path)) is scales
