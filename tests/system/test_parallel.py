"""Groups of several workers, real processes over gloo: whatever the shape of the group, a request's tokens are those of one worker.

A tiny mixture of experts in float32: DP ranks have requests of their own, CP ranks share them, experts lie on all workers.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep_bench.client import Answer, SchedulerSession
from lockstep_bench.processes import HOST, free_port, http_get, parse_metrics
from lockstep_common.steps import Sampling
from tests.moe_model import Form, MoeShape, config, make_tiny_moe
from tests.system.harness import gather_in_order, stack

GREEDY = Sampling(max_tokens=24, logprobs=0)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.9, seed=7)
LENGTHS = (1, 3, 15, 16, 17, 33, 50, 100)
LOGPROB_TOLERANCE = 1e-3  # float32 sums in another order, over the depth of the tiny model
BLOCK = 16
SHAPES = [
    (2, 2),
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((2, 1), (1, 2), (4, 1), (1, 4))),
]
Job = tuple[list[int], Sampling]


def jobs() -> list[Job]:
    rng = random.Random(3)
    ordinary = MoeShape().vocab - 3
    return [
        ([rng.randrange(ordinary) for _ in range(length)], replace(SEEDED, seed=i) if i % 3 == 2 else GREEDY)
        for i, length in enumerate(LENGTHS)
    ]


async def together(session: SchedulerSession, salt: str) -> list[Answer]:
    return await gather_in_order(
        *(session.submit(prompt, s, salt=f"{salt}{i}").answer() for i, (prompt, s) in enumerate(jobs()))
    )


def assert_same(found: list[Answer], expected: list[Answer], where: str) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.tokens == b.tokens and a.ends == b.ends, f"{where}: request {i} has other tokens"
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert max(abs(p - q) for p, q in zip(x, y, strict=True)) < LOGPROB_TOLERANCE, f"{where}: request {i}"


@pytest.fixture(scope="module", params=["qwen3-moe", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def form(request: pytest.FixtureRequest) -> Form:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model(form: Form, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("parallel") / form, form=form, layers=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answer]:
    async def run() -> list[Answer]:
        async with stack(model, with_router=False) as s, s.session() as session:
            return await together(session, "")

    return asyncio.run(run())


def small_stack(model: Path, dp: int, cp: int, **options: Any) -> Any:
    """Small windows and chunks, so that plans of every kind come about."""
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_window": 4, **options.pop("scheduler", {})}
    worker = {"max_num_seqs": 8, "debug_collectives": True, **options.pop("worker", {})}
    return stack(model, coupled=dp, cp=cp, with_router=False, worker=worker, scheduler=scheduler, **options)


async def lone_requests(session: SchedulerSession) -> list[Answer]:
    """One after the other: all other DP ranks run placeholders."""
    return [await session.submit(prompt, s, salt=f"alone{i}").answer() for i, (prompt, s) in enumerate(jobs()[:3])]


async def with_interruptions(session: SchedulerSession) -> list[Answer]:
    """Beside requests that are cancelled in the middle of a window, and arrivals that are uneven."""
    noise = [session.submit([5, 6, 7, i], replace(GREEDY, max_tokens=200), salt=f"noise{i}") for i in range(6)]
    answering = [asyncio.create_task(request.answer()) for request in noise]
    found = []
    for i, (prompt, s) in enumerate(jobs()):
        found.append(asyncio.create_task(session.submit(prompt, s, salt=f"busy{i}").answer()))
        await asyncio.sleep(0.02)
        if i < len(noise):
            noise[i].cancel()
    for task in answering:
        await task
    return [await task for task in found]


@pytest.mark.parametrize(("dp", "cp"), SHAPES)
def test_a_group_of_any_shape_gives_the_tokens_of_one_worker(
    model: Path, expected: list[Answer], dp: int, cp: int
) -> None:
    async def run() -> None:
        async with small_stack(model, dp, cp) as s, s.session() as session:
            assert_same(await lone_requests(session), expected[:3], f"{dp} x {cp}, alone")
            assert_same(await together(session, "a"), expected, f"{dp} x {cp}, together")
            assert_same(await together(session, "a"), expected, f"{dp} x {cp}, prefix known")
            assert_same(await with_interruptions(session), expected, f"{dp} x {cp}, interrupted")
            await s.idle()

    asyncio.run(run())


def test_steps_in_two_halves_give_the_tokens_of_one_worker(model: Path, expected: list[Answer]) -> None:
    """Every plan is halved, down to a single row."""
    port = free_port()
    scheduler = {"enable_dbo": True, "dbo_decode_token_threshold": 1, "dbo_prefill_token_threshold": 1}

    async def run() -> None:
        async with small_stack(model, 2, 1, scheduler=scheduler | {"metrics_port": port}) as s, s.session() as session:
            assert_same(await lone_requests(session), expected[:3], "halved, alone")
            assert_same(await together(session, "h"), expected, "halved, together")
            _, page = await http_get(HOST, port, "/metrics")
            counted = parse_metrics(page)
            assert counted["lockstep_dual_batch_plans_total"] == counted["lockstep_plans_total"] > 0
            await s.idle()

    asyncio.run(run())


def test_preemption_in_a_group(model: Path, form: Form, expected: list[Answer]) -> None:
    async def run() -> None:
        pool = 1 + 6  # blocks of a worker, of 32 tokens of a DP rank: its sequences grow to twice as many
        sizes = {"max_model_len": 192}
        worker = {"kv_cache_memory_gb": f"{(pool + 0.5) * block_bytes(form) / 2**30:.9f}", **sizes}
        async with small_stack(model, 2, 2, worker=worker, scheduler=sizes) as s, s.session() as session:
            assert_same(await together(session, "p"), expected, "2 x 2, preempted")
            load = await session.until(lambda load: load.running == 0)
            assert load.preemptions > 0, "the pool was not small enough to preempt: the test compared nothing"

    asyncio.run(run())


def block_bytes(form: Form) -> int:
    """Of a block in all layers: keys and values, or latents."""
    shape = MoeShape()
    floats = 2 * shape.kv_heads * shape.head if form == "qwen3-moe" else latent_width(form)
    return 4 * shape.layers * floats * BLOCK


def latent_width(form: Form) -> int:
    fields = config(form, MoeShape())
    return int(fields["kv_lora_rank"]) + int(fields["qk_rope_head_dim"])
