"""The real worker on a CUDA device, through its scheduler: the same tokens as on the CPU. Needs a GPU; fp32, a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep_bench.client import Answer
from lockstep_common.steps import GroupConfig, Sampling
from lockstep_worker.__main__ import load
from lockstep_worker.config import WorkerConfig
from lockstep_worker.runner import Runner
from tests.moe_model import Form, MoeShape, make_tiny_moe
from tests.system.harness import gather_in_order, stack
from tests.system.test_bits import GREEDY, SEEDED, jobs
from tests.tiny_model import make_tiny_model, special_ids
from tests.unit.worker.test_runner import MIXED, fresh
from tests.unit.worker.toy import MAX_LEN, ROWS, PlanDriver

pytestmark = pytest.mark.gpu
LOGPROB_TOLERANCE = 1e-3  # fp32 sums in another order, over the depth of the tiny model
SMALL = {"kv_cache_memory_gb": 0.25}  # so that workers of tests that run at once all fit the device


def run(model: Path, device: str, **options: Any) -> tuple[list[Answer], list[Answer]]:
    """All jobs alone, then all together."""

    async def compute() -> tuple[list[Answer], list[Answer]]:
        worker = {"device": device, "dtype": options.pop("dtype", "float32"), **SMALL}
        async with stack(model, worker=worker, with_router=False, **options) as s, s.session() as session:
            alone = [await session.submit(prompt, sampling).answer() for prompt, sampling in jobs()]
            together = await gather_in_order(
                *(session.submit(prompt, sampling).answer() for prompt, sampling in jobs())
            )
            await s.idle()
            return alone, together

    return asyncio.run(compute())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("cuda") / "tiny")


def same(found: list[Answer], expected: list[Answer]) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.tokens == b.tokens and a.ends == b.ends, f"request {i}"
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert max(abs(p - q) for p, q in zip(x, y, strict=True)) < LOGPROB_TOLERANCE, f"request {i}"


@pytest.mark.parametrize("window", [1, 8])
def test_the_gpu_generates_what_the_cpu_does(model: Path, window: int) -> None:
    scheduler = {"max_window": window, "max_num_seqs": 8}
    expected, _ = run(model, "cpu", scheduler=scheduler)
    alone, together = run(model, "cuda", scheduler=scheduler)
    same(alone, expected)
    same(together, expected)


def test_bf16_runs_and_keeps_the_limits(model: Path) -> None:
    alone, together = run(model, "cuda", dtype="bfloat16", scheduler={"max_num_seqs": 8})
    for answers in (alone, together):
        for (_, sampling), answer in zip(jobs(), answers, strict=True):
            assert 1 <= len(answer.tokens[0]) <= sampling.max_tokens


def test_stop_ids_and_min_tokens_hold(model: Path) -> None:
    async def compute() -> list[Answer]:
        async with stack(model, worker={"device": "cuda", **SMALL}, with_router=False) as s, s.session() as session:
            stops = tuple(special_ids().values())
            samplings: list[Sampling] = [
                replace(GREEDY, stop_ids=stops, bias=((stops[0], 100.0),), min_tokens=5),
                replace(SEEDED, stop_ids=stops, bias=((stops[-1], 100.0),)),
            ]
            return [await session.submit([1, 2, 3], sampling).answer() for sampling in samplings]

    held, stopped = asyncio.run(compute())
    assert held.ends == ("stop",) and len(held.tokens[0]) == 6
    assert stopped.ends == ("stop",) and len(stopped.tokens[0]) == 1


def scores(model: Path, **worker: Any) -> list[dict[str, Any]]:
    """What a prompt that takes several passes is scored as, by position."""

    async def compute() -> list[dict[str, Any]]:
        sizes = {"max_num_batched_tokens": 32}
        async with stack(model, worker={"dtype": "float32", **SMALL, **sizes, **worker}, scheduler=sizes) as s:
            prompt = [(7 * i) % 300 + 3 for i in range(100)]
            body = {"model": s.model, "prompt": prompt, "max_tokens": 4, "prompt_logprobs": 3}
            reply = await s.rest.post("/v1/completions", body)
            assert reply.status == 200, reply.body
            found: list[dict[str, Any]] = reply.body["choices"][0]["prompt_logprobs"][1:]
            return [entry | {"own": entry[str(token)]} for entry, token in zip(found, prompt[1:], strict=True)]

    return asyncio.run(compute())


def test_prompts_score_as_on_the_cpu(model: Path) -> None:
    for found, expected in zip(scores(model, device="cuda"), scores(model, device="cpu"), strict=True):
        assert abs(found["own"]["logprob"] - expected["own"]["logprob"]) < LOGPROB_TOLERANCE
        for token in found.keys() & expected.keys():
            assert abs(found[token]["logprob"] - expected[token]["logprob"]) < LOGPROB_TOLERANCE


def test_a_kv_cache_of_8_bits_scores_nearly_the_same(model: Path) -> None:
    """e4m3 keeps 4 bits of what attention reads. By the definitions of the ops that is 0.17 of the spread of this model's log
    probabilities in the mean square."""
    narrow, wide = {"device": "cuda", "kv_cache_dtype": "fp8"}, {"device": "cpu"}
    found, expected = (
        torch.tensor([entry["own"]["logprob"] for entry in scores(model, **worker)]) for worker in (narrow, wide)
    )
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert 0 < error < 0.25


@contextmanager
def no_waiting() -> Iterator[None]:
    """Operations of torch that wait for the device are errors: also an index that takes a scalar, or a copy of pageable memory."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("form", [None, "qwen3-moe", "deepseek-v3"])
def test_no_plan_waits_for_the_device(model: Path, tmp_path: Path, form: Form | None, enforce_eager: bool) -> None:
    if form is not None:
        model = make_tiny_moe(tmp_path, form=form, shape=MoeShape(hidden=128, heads=4, expert_width=64))
    config = WorkerConfig(
        model=str(model),
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=ROWS,
        max_model_len=MAX_LEN,
        block_size=16,
        enforce_eager=enforce_eager,
        kv_cache_memory_gb=0.25,
    )
    runner = Runner(partial(load, config))
    runner.load(lambda share, message: None)
    runner.configure(GroupConfig(1, 1, 0, 0, 0, 1, 1, "", 0, ROWS, MAX_LEN, 256, 8, 0))
    driver = PlanDriver(runner, block=16)
    driver.add(fresh(MIXED))  # what is made at its first use is made
    driver.finish()
    for row in list(driver.rows):
        driver.remove(row)
    with no_waiting():
        driver.add(fresh(MIXED), chunk=4)
        driver.finish()
    assert all(choice.output for choice in driver.rows.values())
    runner.close()
