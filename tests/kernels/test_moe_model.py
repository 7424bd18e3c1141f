"""Qwen3-MoE, Mixtral and GLM-4-MoE on the GPU in bfloat16 against themselves on CPU in float32, from the same weights.

The tolerance, and why some tokens may be off, is that of `test_mla_model`: it holds for any model of a few layers whose logits
have a spread of 1, and whose experts a rounding may exchange.
"""

from __future__ import annotations

from typing import Any

import pytest

from lockstep_worker.models import Model
from tests.kernels.device import DEVICE, requires_gpu
from tests.kernels.oracles import exact_and_served
from tests.kernels.test_mla_model import (  # what holds for every family is tested with this file's `pair`
    test_a_captured_step_follows_the_lengths_on_the_device,
    test_chunks_and_decode_steps,
    test_whole_prompts,
)
from tests.kernels.test_oracles_moe import GLM4_MOE, MIXTRAL, QWEN3_MOE

__all__ = [
    "test_a_captured_step_follows_the_lengths_on_the_device",
    "test_chunks_and_decode_steps",
    "test_whole_prompts",
]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE | {"head_dim": 64}),
    "mixtral": ("Mixtral", MIXTRAL | {"head_dim": 64}),
    "glm4-moe": ("Glm4Moe", GLM4_MOE | {"head_dim": 64}),
    "dense qwen3-moe": (
        "Qwen3Moe",
        QWEN3_MOE | {"head_dim": 64, "num_experts": 2},
    ),  # both experts: nothing to exchange
}

pytestmark = requires_gpu


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model, Model]:
    """The model on CPU and on the GPU."""
    return request.param, *exact_and_served(*CASES[request.param], tmp_path_factory.mktemp("model"), DEVICE)
