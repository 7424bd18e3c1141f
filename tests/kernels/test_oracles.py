"""The Llama family against transformers on tiny random weights: logits to 1e-5 however the prompt is cut, and greedy tokens."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lockstep_common.steps import Kind
from lockstep_worker.models import Model, load_model
from tests.kernels.sequences import EVERY, Sequences

VOCAB = 257
LENGTH = 83  # past a tile of keys
TOLERANCE = 1e-5

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


def randomize(model: torch.nn.Module, seed: int, tied: bool) -> None:
    """Every parameter drawn anew: nothing stays at a 0 or 1 that would hide a fault, and logits have a spread of about 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.1 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(0.2 * noise)
        else:
            plain = "embed" in name and not tied
            parameter.copy_(noise if plain else noise / parameter.shape[-1] ** 0.5)


@pytest.fixture(scope="module", params=list(ORACLES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Model]:
    """transformers' model and ours, of the same directory."""
    family, fields = ORACLES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    with torch.no_grad():
        oracle = getattr(transformers, f"{family}ForCausalLM")(
            getattr(transformers, f"{family}Config")(**fields)
        ).eval()
        randomize(oracle, 1, fields["tie_word_embeddings"])
    oracle.save_pretrained(directory)
    return oracle, load(directory)


def load(directory: Path) -> Model:
    return load_model(directory, dtype=torch.float32, device=torch.device("cpu"), deterministic=True)


def prompt() -> list[int]:
    return torch.randint(2, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()


def expected(oracle: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = oracle(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def test_logits_of_a_whole_prompt(pair: tuple[Any, Model]) -> None:
    oracle, model = pair
    want = expected(oracle, prompt())
    got = Sequences(model, [prompt()]).run(Kind.PREFILL, [(0, 0, LENGTH)], wanted=EVERY)
    assert 0.5 < want.std() < 2
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_logits_of_chunks_and_decode_steps(pair: tuple[Any, Model]) -> None:
    oracle, model = pair
    want = expected(oracle, prompt())
    sequences = Sequences(model, [prompt()], block_size=4)
    cuts = [0, 13, 64, 70]
    for start, end in itertools.pairwise(cuts):
        got = sequences.run(Kind.PREFILL, [(0, start, end)], wanted=EVERY)
        torch.testing.assert_close(got, want[start:end], rtol=0, atol=TOLERANCE)
    for position in range(cuts[-1], LENGTH):
        got = sequences.run(Kind.DECODE, [(0, position, position + 1)])
        torch.testing.assert_close(got, want[position : position + 1], rtol=0, atol=TOLERANCE)


def test_greedy_tokens(pair: tuple[Any, Model]) -> None:
    oracle, model = pair
    start = prompt()[:9]
    with torch.no_grad():
        want = oracle.generate(torch.tensor([start]), max_new_tokens=32, do_sample=False, eos_token_id=None)[0].tolist()
    sequences = Sequences(model, [start])
    tokens = sequences.tokens[0]
    logits = sequences.run(Kind.PREFILL, [(0, 0, len(start))])
    while len(tokens) < len(start) + 32:
        tokens.append(int(logits[0].argmax()))
        logits = sequences.run(Kind.DECODE, [(0, len(tokens) - 1, len(tokens))])
    assert tokens == want
