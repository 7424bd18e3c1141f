"""Our models beside transformers', with tiny random weights; and the tests that every family's pair of them must pass.

A test file of families imports these tests and has a fixture `pair`: transformers' model and ours, of the same directory.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import transformers

from lockstep_common.steps import Kind
from lockstep_worker.models import Model, load_model
from tests.kernels.sequences import EVERY, Sequences

VOCAB = 257
LENGTH = 83  # past a tile of keys, and past the positions that YaRN starts from
TOLERANCE = 1e-5


def build(family: str, values: dict[str, Any], directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of these settings with weights of that dtype, saved to the directory as well."""
    config = getattr(transformers, f"{family}Config")(**values)
    config._experts_implementation = "eager"
    with torch.no_grad():
        oracle = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        _randomize(oracle, 1)
    oracle.to(dtype).save_pretrained(directory)
    return oracle


def exact_and_served(family: str, values: dict[str, Any], directory: Path, device: torch.device) -> tuple[Model, Model]:
    """Our model in float32 on CPU, and in bfloat16 on that device, from the same weights."""
    build(family, values, directory, torch.bfloat16)
    return load(directory), load_model(directory, dtype=torch.bfloat16, device=device, deterministic=False)


def load(directory: Path, **options: Any) -> Model:
    return load_model(directory, dtype=torch.float32, device=torch.device("cpu"), deterministic=True, **options)


def prompt() -> list[int]:
    return torch.randint(2, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()


def expected(oracle: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of all positions."""
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


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Every parameter drawn anew: nothing stays at a 0 or 1 that would hide a fault; routers spread their scores, logits by about 1."""
    generator = torch.Generator().manual_seed(seed)
    tied = bool(model.config.tie_word_embeddings)  # type: ignore[union-attr]
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        noise = torch.randn(tensor.shape, generator=generator)
        if "inv_freq" in name:
            continue
        if "norm" in name:
            tensor.copy_(1 + 0.1 * noise)
        elif tensor.dim() == 1:
            tensor.copy_(0.1 * noise)
        elif "embed" in name and not tied:
            tensor.copy_(noise)
        else:
            tensor.copy_(noise * (2.0 if "gate.weight" in name else 1.0) / tensor.shape[-1] ** 0.5)
