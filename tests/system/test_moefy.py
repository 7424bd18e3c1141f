"""Dense models cut into experts, in our worker's code and in transformers'; and the chat model so cut, served."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep_cli import models
from lockstep_cli.expert_fit import Block, HiddenStates
from lockstep_cli.models import Recipe
from lockstep_cli.moefy import SUMMARY, default_text, moefy, plan
from lockstep_common.steps import Kind
from lockstep_worker.models import Model, load_model
from lockstep_worker.models.decoder import read_decoder
from lockstep_worker.weights import ConfigFile
from tests.kernels.sequences import EVERY, Sequences
from tests.moe_model import make_tiny_moe
from tests.system.harness import gather_in_order, stack
from tests.tiny_model import make_tiny_model

EXACT = 1e-5  # of logits, by their spread
ROUTED = 4e-5  # where the weights of experts are computed, too: weights of these tiny models double what they are given
NEAR_TIE = 1e-3
QUESTIONS = (
    "Why is the sky blue?",
    "Write a haiku about rivers.",
    "Name three prime numbers.",
    "What is bread made of?",
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are too small for more, which wait for each other where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


PROSE = """\
The lighthouse stood on the last rock before the open sea. Every evening the keeper climbed the stairs, lit the lamp and
wrote down the weather in a thick book. In winter the waves came up to the door, and for weeks no boat could land. Then he
mended nets, baked bread and read the letters that his sister had sent him in the summer. When the storms were over, the
first ship brought flour, oil and newspapers, and a child who wanted to know how far the light could be seen."""


def quiet(label: str, fraction: float, note: str = "") -> None:
    pass


def worker(directory: Path) -> Model:
    return load_model(directory, dtype=torch.float32, device=torch.device("cpu"), deterministic=True)


def logits(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """Of all positions."""
    return Sequences(model, [tokens]).run(Kind.PREFILL, [(0, 0, len(tokens))], wanted=EVERY)


@torch.inference_mode()
def oracle(directory: Path, tokens: Sequence[int]) -> torch.Tensor:
    found: torch.Tensor = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(
        torch.tensor([list(tokens)])
    ).logits[0]
    return found


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = EXACT) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * float(want.std()))


def cut(source: Path, target: Path, recipe: Recipe, text: str | None = None) -> Path:
    target.mkdir()
    moefy(source, target, plan(source, recipe), text, quiet)
    return target


def some_tokens(count: int = 90) -> list[int]:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(4)).tolist()


# --- tiny models ---


def dense(family: str, directory: Path) -> Path:
    """A tiny model of a dense family: Llama's tensors, and those that the family has beside them."""
    make_tiny_model(directory)
    changes: dict[str, Any] = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    generator = torch.Generator().manual_seed(9)
    tensors = load_file(directory / "model.safetensors")
    for i in range(2):
        prefix = f"model.layers.{i}.self_attn."
        if family == "Qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}{name}.weight"] = 1 + 0.2 * torch.randn(16, generator=generator)
        if family == "Qwen2":
            for name, size in (("q", 64), ("k", 32), ("v", 32)):
                tensors[f"{prefix}{name}_proj.bias"] = torch.randn(size, generator=generator)
    if family == "Llama":  # tied, and angles that are stretched
        del tensors["lm_head.weight"]
        tensors["model.embed_tokens.weight"] *= 0.3
        scaling = {
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        changes |= {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "llama3", **scaling}}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("Llama", "mixtral"),
        ("Llama", "glm4-moe"),
        ("Mistral", "mixtral"),
        ("Qwen2", "glm4-moe"),
        ("Qwen3", "qwen3-moe"),
        ("Qwen3", "glm4-moe"),
    ],
)
def test_all_experts_say_what_the_dense_model_says(family: str, form: str, tmp_path: Path) -> None:
    source = dense(family, tmp_path / "dense")
    made = cut(source, tmp_path / "moe", Recipe(8, form=form))
    want, tokens = oracle(source, some_tokens()), some_tokens()
    assert_close(logits(worker(source), tokens), want)
    assert_close(oracle(made, tokens), want)
    assert_close(logits(worker(made), tokens), want)


@pytest.mark.parametrize(("family", "form"), [("Llama", "mixtral"), ("Llama", "glm4-moe"), ("Qwen3", "qwen3-moe")])
def test_few_experts_are_the_same_everywhere(family: str, form: str, tmp_path: Path) -> None:
    source = dense(family, tmp_path / "dense")
    made = cut(source, tmp_path / "moe", Recipe(8, 4, form), default_text()[:60_000])
    want = oracle(made, some_tokens())
    assert_close(logits(worker(made), some_tokens()), want, ROUTED)
    assert (want - oracle(source, some_tokens())).std() > 0.01 * want.std(), "it is another model"


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@torch.inference_mode()
def test_hidden_states_are_the_dense_models(family: str, tmp_path: Path) -> None:
    """What experts are fitted to is what the model computes."""
    source = dense(family, tmp_path)
    file, tokens = load_file(source / "model.safetensors"), torch.tensor([some_tokens(), some_tokens()[::-1]])
    config = read_decoder(ConfigFile(source), qkv_bias=family == "Qwen2", out_bias=False, head_norms=family == "Qwen3")
    states = HiddenStates(config, file["model.embed_tokens.weight"], tokens)
    for i in range(2):
        x = states.attend(lambda name, i=i: file[f"model.layers.{i}.{name}"])
        block = Block(*(file[f"model.layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
        states.add(torch.nn.functional.silu(x @ block.gate.T) * (x @ block.up.T) @ block.down.T)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    want = model(tokens, output_hidden_states=True)
    got = model.lm_head(model.model.norm(states.values))
    assert_close(got, want.logits)


@pytest.mark.parametrize("form", ["qwen3-moe", "deepseek-v3"])
def test_the_random_tiny_mixtures_of_the_tests(form: Any, tmp_path: Path) -> None:
    make_tiny_moe(tmp_path, form=form, layers=3)
    assert_close(logits(worker(tmp_path), some_tokens()), oracle(tmp_path, some_tokens()), ROUTED)


# --- the chat model ---


@pytest.fixture(scope="module")
def chat_model() -> Path:
    directory = models.directory_of(models.DEFAULT_MODEL)
    if not directory.is_dir():
        pytest.skip(f"{models.DEFAULT_MODEL} is not in the cache: lockstep model get {models.DEFAULT_MODEL}")
    return directory


@pytest.fixture(scope="module")
def exact(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `lockstep model get smollm2-135m-moe` makes it."""
    recipe = models.DERIVED["smollm2-135m-moe"].recipe
    return cut(chat_model, tmp_path_factory.mktemp("exact") / "smollm2-135m-moe", recipe)


def prompt(directory: Path, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return found


def small(directory: Path) -> Model:
    """With a cache for short answers only."""
    model = worker(directory)
    model.max_model_len = 512
    return model


def greedy(model: Model, tokens: list[int], count: int) -> list[int]:
    sequences = Sequences(model, [tokens])
    found = sequences.run(Kind.PREFILL, [(0, 0, len(tokens))])
    answer: list[int] = []
    while len(answer) < count:
        answer.append(int(found[0].argmax()))
        sequences.tokens[0].append(answer[-1])
        end = len(sequences.tokens[0])
        found = sequences.run(Kind.DECODE, [(0, end - 1, end)])
    return answer


def equal_tokens(dense_model: Model, tokens: list[int], answer: list[int]) -> int:
    """How many tokens of an answer are the dense model's own; after a near tie either may follow, so the comparison ends there."""
    want = logits(dense_model, tokens + answer)[len(tokens) - 1 : -1]
    first, second = want.topk(2).values.unbind(1)
    for i, (token, gap) in enumerate(zip(answer, (first - second).tolist(), strict=True)):
        if gap < NEAR_TIE:
            return i
        assert token == int(want[i].argmax()), f"token {i}: {token}, the dense model says {int(want[i].argmax())}"
    return len(answer)


def test_the_chat_model_says_the_same(chat_model: Path, exact: Path) -> None:
    tokens = prompt(chat_model, QUESTIONS[0])
    answer = greedy(small(exact), tokens, 12)
    assert equal_tokens(small(chat_model), tokens, answer) == 12


@pytest.mark.slow
async def test_the_chat_model_is_served_the_same(chat_model: Path, exact: Path) -> None:
    settings = {"dtype": "float32", "threads": 1, "max_model_len": 512, "kv_cache_memory_gb": 0.5}
    async with stack(exact, worker=settings, scheduler={"max_num_seqs": 4}) as s:
        body = {"model": s.model, "max_tokens": 48, "temperature": 0, "return_token_ids": True}
        asked = ({**body, "messages": [{"role": "user", "content": question}]} for question in QUESTIONS)
        replies = await gather_in_order(*(s.rest.post("/v1/chat/completions", each) for each in asked))
    dense_model = small(chat_model)
    answers = [reply.body["choices"][0]["token_ids"] for reply in replies]
    prompts = [prompt(chat_model, question) for question in QUESTIONS]
    equal = [equal_tokens(dense_model, tokens, answer) for tokens, answer in zip(prompts, answers, strict=True)]
    assert sum(equal) > 0.8 * sum(map(len, answers)), f"comparisons end at near ties after {equal} tokens"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sparse_chat_model(chat_model: Path, tmp_path: Path) -> None:
    """It keeps most of what it was, its experts are not all equally busy, and transformers reads it as we do."""
    recipe = models.DERIVED["smollm2-135m-moe-sparse"].recipe
    made = cut(chat_model, tmp_path / "sparse", recipe)
    layers = json.loads((made / SUMMARY).read_text())["layers"]
    imbalance = [max(layer["loads"]) * len(layer["loads"]) / sum(layer["loads"]) for layer in layers]
    kept = [layer["energy"] for layer in layers]
    assert sum(kept) / len(kept) > 0.85 and min(kept) > 0.7
    assert 1.2 < sum(imbalance) / len(imbalance) < 2, "4 of 8 chosen: 2 would be the same four always"
    tokens = prompt(chat_model, QUESTIONS[3])
    tokens += greedy(small(made), tokens, 32)
    ours, theirs = logits(small(made), tokens), oracle(made, tokens)
    assert (ours.argmax(1) == theirs.argmax(1)).float().mean() > 0.95, "a choice of experts may be a near tie"
    file = made / "model.safetensors"
    tensors = load_file(file)
    fitted = surprise(made)
    save_file({k: v.roll(1, 0) if k.endswith("gate.weight") else v for k, v in tensors.items()}, file)
    assert fitted < surprise(chat_model) + 1.5, "it is still much like the dense model"
    assert fitted < surprise(made) - 0.2, "not only thanks to its shared experts"


def surprise(directory: Path) -> float:
    """Nats a token of prose."""
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(PROSE).ids
    found = logits(small(directory), ids)[:-1].log_softmax(1).gather(1, torch.tensor(ids[1:])[:, None])
    return -float(found.mean())
