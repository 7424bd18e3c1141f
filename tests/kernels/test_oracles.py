"""The Llama family against transformers on tiny random weights: logits to 1e-5 however the prompt is cut, and greedy tokens."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep_worker.models import Model
from tests.kernels.oracles import (  # the tests among them take this file's `pair`
    VOCAB,
    build,
    load,
    test_greedy_tokens,
    test_logits_of_a_whole_prompt,
    test_logits_of_chunks_and_decode_steps,
)

__all__ = ["test_greedy_tokens", "test_logits_of_a_whole_prompt", "test_logits_of_chunks_and_decode_steps"]

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}
ORACLES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", BASE | {"head_dim": 16}),
    "llama-head-dim": ("Llama", BASE | {"head_dim": 24, "num_key_value_heads": 4}),
    "llama-biases-tied": ("Llama", BASE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3-rope": ("Llama", BASE | {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (
        "Llama",
        BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "yarn-rope": ("Llama", BASE | {"rope_parameters": YARN_ROPE}),
    "mistral": ("Mistral", BASE | {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", BASE),
    "qwen3": ("Qwen3", BASE | {"head_dim": 16}),
}


@pytest.fixture(scope="module", params=list(ORACLES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Model]:
    """transformers' model and ours, of the same directory."""
    directory = tmp_path_factory.mktemp(request.param)
    return build(*ORACLES[request.param], directory), load(directory)
