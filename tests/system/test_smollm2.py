"""A real chat model through the REST door, against transformers on the same weights in fp32.

Greedy equality is checked by teacher forcing: transformers reads prompt and answer in one pass, and at every position its
best token must be the one that was served. Where its two best logits are closer than 1e-3 any order of summation may pick
either; a prompt's comparison ends there, and the test says how many positions were compared.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep_cli import models
from tests.system.harness import Stack, gather_in_order, stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS, TOKENS, NEAR_TIE = 20, 64, 1e-3
TOPICS = (
    "rivers", "the moon", "bread", "a lighthouse", "prime numbers", "bees", "chess", "volcanoes", "the violin", "glass",
    "sorting a list in Python", "haiku", "photosynthesis", "an old clock", "trains", "the colour blue", "salt", "whales",
)  # fmt: skip
TASKS = (
    "Explain {} to a child.", "Write three sentences about {}.", "Why do people like {}?", "Give me a list of five facts about {}.",
    "Tell a very short story about {}.",
)  # fmt: skip
SYSTEMS = ("", "You answer briefly.", "You are a poet.")


@pytest.fixture(scope="module")
def directory() -> Path:
    """The model from the user's cache, where `lockstep model get` puts it."""
    return models.get(models.DEFAULT_MODEL, lambda label, fraction, note="": None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def s(directory: Path) -> AsyncIterator[Stack]:
    worker = {"dtype": "float32", "threads": 1, "max_model_len": 2048, "kv_cache_memory_gb": 1}
    async with stack(directory, worker=worker, scheduler={"max_num_seqs": 16, "max_window": 8}) as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


def conversations() -> list[list[dict[str, str]]]:
    rng = random.Random(2026)
    found = []
    for _ in range(PROMPTS):
        system, task = rng.choice(SYSTEMS), rng.choice(TASKS).format(rng.choice(TOPICS))
        messages = [{"role": "system", "content": system}] if system else []
        found.append([*messages, {"role": "user", "content": task}])
    return found


async def test_greedy_tokens_equal_transformers(
    s: Stack, directory: Path, tokenizer: Any, record_property: Any
) -> None:
    answers = await gather_in_order(*(answer(s, messages) for messages in conversations()))
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    compared = 0
    ended_early = []
    for i, (messages, (prompt, served, reason)) in enumerate(zip(conversations(), answers, strict=True)):
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert prompt == tokenizer(rendered, add_special_tokens=False).input_ids, f"prompt {i} is tokenised otherwise"
        assert len(served) == TOKENS or (reason == "stop" and served[-1] == tokenizer.eos_token_id)
        equal = compare(oracle, prompt, served, f"prompt {i}")
        compared += equal
        if equal < len(served):
            ended_early.append((i, equal))
    total = sum(len(served) for _, served, _ in answers)
    record_property("positions_compared", f"{compared} of {total}; near ties at (prompt, position) {ended_early}")
    print(f"compared {compared} of {total} positions; comparisons that ended at a near tie: {ended_early}")
    assert compared >= 0.8 * total, f"too many near ties to say anything: {ended_early}"


async def answer(s: Stack, messages: list[dict[str, str]]) -> tuple[list[int], list[int], str]:
    """(prompt ids, generated ids, finish reason)."""
    tokenized = await s.rest.post("/tokenize", {"model": s.model, "messages": messages})
    assert tokenized.status == 200, tokenized.body
    body = {"model": s.model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
    reply = await s.rest.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    [choice] = reply.body["choices"]
    assert reply.body["usage"]["prompt_tokens"] == len(tokenized.body["tokens"])
    return tokenized.body["tokens"], choice["token_ids"], choice["finish_reason"]


@torch.inference_mode()
def compare(oracle: Any, prompt: list[int], served: list[int], where: str) -> int:
    """Positions that are equal before the first near tie (all of them if there is none)."""
    logits = oracle(torch.tensor([prompt + served])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2)
    for position, token in enumerate(served):
        first, second = best.values[position].tolist()
        if first - second < NEAR_TIE:
            return position
        expected = int(best.indices[position, 0])
        assert token == expected, (
            f"{where}, token {position}: {token} was served, transformers says {expected} by {first - second:.4f}"
        )
    return len(served)


HARD = (
    " ", "  ", "   x", "\n", "\n\n\n", "\t\tif x:\n\t\t\treturn 1\n", "a\r\nb", "1234567890", "3.14159", "1e-5", "0x1F", "v2.0.1-rc3",
    "don't can't I'll we've", "DON'T", "'s 's", "naïve café résumé", "ﬁ ligature", "Straße", "İstanbul", "ΑΒΓ αβγ", "Привет, мир!",
    "你好，世界", "日本語のテキスト", "한국어", "العربية", "עברית", "ไทย", "हिन्दी", "👍🏽", "👨‍👩‍👧‍👦 family", "🇩🇪🇫🇷", "e\u0301 vs é",
    "\u200b zero width", "\u00a0nbsp\u00a0", "\ufeffbom", "�", "a" * 300, "ab" * 200, "=" * 80, "-----", "…", "“quotes” ‘single’",
    "https://example.org/a?b=c&d=%20#e", "user@example.org", "C:\\Users\\x", "/usr/local/bin", "<b>bold</b>", "{{ template }}", "$\\frac{a}{b}$",
    "SELECT * FROM t WHERE a='b';", "def f(x): return x**2  # comment", "for(int i=0;i<10;++i){}", "CamelCaseWordsHere", "snake_case_words",
    "ALLCAPS", "MiXeD", "x=1;y=2", "1,234,567.89", "12:34:56", "2026-11-29", "50% off!", "(a)[b]{c}", "¿Qué?", "½ ¼ ²", "ⅷ Ⅷ", "①②③",
)  # fmt: skip


def hard_strings() -> list[str]:
    """The list above, then mixtures: seeded draws from planes of Unicode, digits, white space and pieces of the list."""
    rng = random.Random(7)
    alphabets = [
        range(32, 127),
        range(0xA0, 0x250),
        range(0x370, 0x500),
        range(0x4E00, 0x4F00),
        range(0x1F300, 0x1F600),
        range(48, 58),
        (9, 10, 13, 32),
    ]
    found = list(HARD)
    while len(found) < 400:
        if rng.random() < 0.4:
            found.append("".join(rng.choice(HARD) for _ in range(rng.randint(2, 5))))
        else:
            found.append("".join(chr(rng.choice(rng.choice(alphabets))) for _ in range(rng.randint(1, 40))))
    return found


async def test_tokenizer_equals_transformers(s: Stack, tokenizer: Any) -> None:
    gate = asyncio.Semaphore(16)

    async def ids(text: str) -> list[int]:
        async with gate:
            reply = await s.rest.post("/tokenize", {"model": s.model, "prompt": text})
        assert reply.status == 200, reply.body
        found: list[int] = reply.body["tokens"]
        return found

    texts = hard_strings()
    for text, found in zip(texts, await gather_in_order(*(ids(t) for t in texts)), strict=True):
        assert found == tokenizer(text).input_ids, f"{text!r} is tokenised otherwise"
        reply = await s.rest.post("/detokenize", {"model": s.model, "tokens": found})
        assert reply.body["prompt"] == text, f"{text!r} does not come back"
