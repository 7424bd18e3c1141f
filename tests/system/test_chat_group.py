"""The chat model as a mixture of experts, served over REST by groups of several workers: the dense model's tokens (float32), whatever
the shape of the group, and the sparse variant's own while its experts move.

Slow: each token passes through 30 layers of collectives between processes that share a few cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep_bench.processes import HOST, free_port, http_get, parse_metrics
from lockstep_cli import models
from tests.system.harness import Reply, gather_in_order, stack
from tests.system.test_moefy import QUESTIONS, chat_model, cut, equal_tokens, exact, prompt, small

__all__ = ["chat_model", "exact"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 24
SETTINGS = {"dtype": "float32", "threads": 1, "max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_gb": 0.2}


async def answers(
    directory: Path, dp: int, cp: int, *, port: int = 0, rounds: int = 1, **options: Any
) -> tuple[list[list[int]], dict[str, float]]:
    """Greedy answers to all questions at once, in several rounds without a known prefix, and the scheduler's metrics afterwards."""
    worker = {**SETTINGS, **options.pop("worker", {})}
    scheduler = {"max_num_seqs": 4, "max_window": 4, "metrics_port": port, **options.pop("scheduler", {})}
    found: list[list[int]] = []
    async with stack(directory, worker=worker, scheduler=scheduler, coupled=dp, cp=cp, **options) as s:
        body = {"model": s.model, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        for number in range(rounds):
            asked = (
                {**body, "cache_salt": str(number), "messages": [{"role": "user", "content": question}]}
                for question in QUESTIONS
            )
            replies: list[Reply] = await gather_in_order(*(s.rest.post("/v1/chat/completions", each) for each in asked))
            assert all(reply.status == 200 for reply in replies), [reply.body for reply in replies]
            found += [reply.body["choices"][0]["token_ids"] for reply in replies]
        page = (await http_get(HOST, port, "/metrics"))[1] if port else ""
    return found, parse_metrics(page)


def compare(directory: Path, reference: Path, found: list[list[int]]) -> None:
    model = small(reference)
    prompts = [prompt(directory, question) for question in QUESTIONS] * (len(found) // len(QUESTIONS))
    equal = [equal_tokens(model, tokens, answer) for tokens, answer in zip(prompts, found, strict=True)]
    assert sum(equal) > 0.8 * sum(map(len, found)), f"comparisons end at near ties after {equal} tokens"


@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (1, 2), (2, 2)])
async def test_a_group_says_what_the_dense_model_says(chat_model: Path, exact: Path, dp: int, cp: int) -> None:
    found, _ = await answers(exact, dp, cp)
    compare(exact, chat_model, found)


async def test_the_sparse_model_says_the_same_while_its_experts_move(chat_model: Path, tmp_path: Path) -> None:
    sparse = cut(chat_model, tmp_path / "sparse", models.DERIVED["smollm2-135m-moe-sparse"].recipe)
    eplb = {"enable_eplb": True, "eplb_interval_s": 0.5, "eplb_threshold": 1.0, "expert_load_interval_s": 0.2}
    scheduler = {**eplb, "eplb_window": 50}
    worker = {"num_redundant_experts": 4}
    found, metrics = await answers(sparse, 2, 2, port=free_port(), rounds=5, worker=worker, scheduler=scheduler)
    compare(sparse, sparse, found)
    assert metrics["lockstep_expert_layers_moved_total"] > 2, "hardly anything moved: the test compared little"
