"""Experts move between real workers while they serve: every answer stays the one of a single worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep_bench.client import Answer, SchedulerSession
from lockstep_bench.processes import HOST, free_port, http_get, parse_metrics
from lockstep_common.steps import Sampling
from tests.moe_model import make_tiny_moe
from tests.system.harness import gather_in_order, stack

LAYERS = 2
GREEDY = Sampling(max_tokens=48)
ROUNDS = 12
MOVED = "lockstep_expert_layers_moved_total"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("eplb") / "moe", layers=LAYERS)


async def together(session: SchedulerSession, salt: str) -> list[Answer]:
    return await gather_in_order(
        *(
            session.submit([i, 2 * i, 3], replace(GREEDY, temperature=i % 2, seed=i), salt=f"{salt}{i}").answer()
            for i in range(8)
        )
    )


async def metrics(port: int) -> dict[str, float]:
    status, page = await http_get(HOST, port, "/metrics")
    assert status == 200
    return parse_metrics(page)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answer]:
    async def run() -> list[Answer]:
        async with stack(model, with_router=False) as s, s.session() as session:
            return await together(session, "")

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("dp", "cp", "redundant"), [(2, 1, 4), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((2, 2, 4), (4, 1, 0)))]
)
def test_answers_do_not_change_while_experts_move(
    model: Path, expected: list[Answer], dp: int, cp: int, redundant: int
) -> None:
    """Any imbalance is planned away at once, and forgotten soon, so that experts move again and again."""
    port = free_port()
    scheduler = {
        "enable_eplb": True,
        "eplb_interval_s": 0.1,
        "eplb_threshold": 1.0,
        "eplb_window": 50,
        "expert_load_interval_s": 0.05,
        "max_window": 4,
        "metrics_port": port,
    }
    worker = {"num_redundant_experts": redundant, "debug_collectives": True}

    async def run() -> None:
        async with (
            stack(model, coupled=dp, cp=cp, with_router=False, worker=worker, scheduler=scheduler) as s,
            s.session() as session,
        ):
            for number in range(ROUNDS):
                before = await metrics(port)
                answers = await together(session, f"round{number}")
                for i, (a, b) in enumerate(zip(answers, expected, strict=True)):
                    assert a.tokens == b.tokens and a.ends == b.ends, f"round {number}: request {i} has other tokens"
                if before[MOVED] >= LAYERS:
                    break
            assert before[MOVED] >= LAYERS, f"{before[MOVED]:.0f} layer(s) moved: the test compared nothing"
            assert before["lockstep_expert_slots_moved_total"] >= 2 * LAYERS
            assert before["lockstep_moe_load_balance_ratio"] > 4, "each of two kinds, mean and worst, is above 1"
            await s.idle()

    asyncio.run(run())
