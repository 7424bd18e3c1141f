"""Groups of two workers on CUDA: the tokens of one worker on the CPU. Needs a GPU; with two, NCCL joins them and decode steps are
captured with their collectives; with one, both workers share it and talk through their host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep_bench.client import Answer
from tests.moe_model import Form, MoeShape, make_tiny_moe
from tests.system.harness import stack
from tests.system.test_parallel import assert_same, together

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
SHAPE = MoeShape(hidden=128, heads=4, expert_width=64)  # heads of 32: what the kernels take
GROUPS = [(2, 1), (1, 2)]


@pytest.fixture(scope="module", params=["qwen3-moe", "deepseek-v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    form: Form = request.param
    return make_tiny_moe(tmp_path_factory.mktemp("cuda-group") / form, form=form, shape=SHAPE)


def answers(model: Path, dp: int, cp: int, device: str, **worker: Any) -> list[Answer]:
    async def run() -> list[Answer]:
        scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_window": 4}
        flags = {"device": device, "dtype": "float32", "max_num_seqs": 8, "block_size": 16, **worker}
        group = {"coupled": dp, "cp": cp, "gpus": GPUS if device == "cuda" else 0}
        async with (
            stack(model, worker=flags, scheduler=scheduler, with_router=False, **group) as s,
            s.session() as session,
        ):
            await together(session, "warm")
            found = await together(session, "a")
            await s.idle()
            return found

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answer]:
    return answers(model, 1, 1, "cpu")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("dp", "cp"), GROUPS)
def test_two_gpus_over_nccl(model: Path, expected: list[Answer], dp: int, cp: int, eager: bool) -> None:
    assert_same(answers(model, dp, cp, "cuda", enforce_eager=eager), expected, f"{dp} x {cp}")


@pytest.mark.parametrize(("dp", "cp"), GROUPS)
def test_two_workers_that_share_a_gpu(model: Path, expected: list[Answer], dp: int, cp: int) -> None:
    assert_same(answers(model, dp, cp, "cuda", collectives="gloo"), expected, f"{dp} x {cp}")
