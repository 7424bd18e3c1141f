"""Angles of positions, as config.json describes them, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lockstep_common.errors import ConfigError
from lockstep_worker.models.layers import read_rope, yarn_mscale
from lockstep_worker.weights import CONFIG, ConfigFile

HEAD_DIM = 64
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn of a config that names no length": {"rope_type": "yarn", "factor": 4},
    "yarn, betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, equal mscales": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn, one mscale": YARN | {"mscale": 0.707},
    "yarn, attention factor": YARN | {"attention_factor": 1.25, "mscale": 0.5, "mscale_all_dim": 1.0},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, ramp of no width": YARN | {"beta_fast": 1e-6, "beta_slow": 1e-7},
}


def config_file(directory: Path, fields: dict[str, Any]) -> ConfigFile:
    (directory / CONFIG).write_text(json.dumps({"max_position_embeddings": 131072} | fields))
    return ConfigFile(directory)


def oracle(fields: dict[str, Any]) -> tuple[torch.Tensor, float]:
    config = transformers.LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=131072, rope_parameters=dict(fields) | {"rope_theta": 5e5}
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config)
    return frequencies, factor


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_both_forms_are_those_of_transformers(name: str, partial: float, tmp_path: Path) -> None:
    fields = SCALINGS[name] | ({} if partial == 1 else {"partial_rotary_factor": partial})
    frequencies, factor = oracle(fields)
    old = {key: value for key, value in fields.items() if key not in ("rope_type", "partial_rotary_factor")}
    forms = (
        {"rope_parameters": fields | {"rope_theta": 5e5}},
        {
            "rope_theta": 5e5,
            "rope_scaling": old | {"type": fields["rope_type"]},
            "partial_rotary_factor": partial,
        },
    )
    for form in forms:
        rope = read_rope(config_file(tmp_path, form), partial=1.0)
        assert torch.equal(rope.frequencies(HEAD_DIM), frequencies)
        assert rope.attention_factor == factor
        assert rope.rotary_dim(HEAD_DIM) == HEAD_DIM * partial
        cos, sin = rope.cos_sin(9, HEAD_DIM)
        angles = torch.arange(9)[:, None] * frequencies.double()
        torch.testing.assert_close(cos, angles.cos() * factor, rtol=0, atol=1e-6)
        torch.testing.assert_close(sin, angles.sin() * factor, rtol=0, atol=1e-6)


def test_the_length_beside_the_scaling_counts_more_than_the_one_in_it(tmp_path: Path) -> None:
    form = {"rope_scaling": YARN, "original_max_position_embeddings": 2048}
    assert read_rope(config_file(tmp_path, form)).original_max_position == 2048


def test_a_family_has_a_share_of_its_own_unless_told_otherwise(tmp_path: Path) -> None:
    assert read_rope(config_file(tmp_path, {}), partial=0.5).rotary_dim(128) == 64
    assert read_rope(config_file(tmp_path, {"partial_rotary_factor": 0.25}), partial=0.5).rotary_dim(128) == 32


def test_what_sharpens_latent_attention_is_kept(tmp_path: Path) -> None:
    rope = read_rope(config_file(tmp_path, {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}))
    assert rope.attention_factor == 1
    assert yarn_mscale(rope.factor, rope.mscale_all_dim) == pytest.approx(1.3689, abs=1e-4)
    assert yarn_mscale(0.5) == 1


@pytest.mark.parametrize(
    ("fields", "partial", "message"),
    [
        ({"rope_scaling": YARN | {"truncate": 1}}, None, "rope_scaling.truncate is 1, expected true or false"),
        ({"rope_scaling": YARN | {"beta_fast": -1}}, None, "rope_scaling.beta_fast is -1, expected a positive number"),
        ({"partial_rotary_factor": 0.5}, None, "partial_rotary_factor is not 1"),
        ({"partial_rotary_factor": 1.5}, 0.5, "partial_rotary_factor is 1.5, expected at most 1"),
    ],
)
def test_what_makes_no_sense_is_named(
    fields: dict[str, Any], partial: float | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rope(config_file(tmp_path, fields), partial=partial)
