"""Groups of two workers on CUDA give the tokens of one worker. Needs a GPU; with two, NCCL joins them and decode steps are captured
with their collectives; with one, both workers share it and talk through their host.

In bfloat16, as the experts' products take it. Parts of sums are rounded before they are added, so a choice that is nearly a tie may
fall otherwise; the model's logits lie apart, so few do.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep_bench.client import Answer, wait_serving
from lockstep_common.errors import LockstepError
from lockstep_common.steps import Sampling
from tests.moe_model import Form, MoeShape, make_tiny_moe
from tests.system.harness import stack
from tests.system.test_parallel import together

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
SHAPE = MoeShape(hidden=128, heads=4, expert_width=64)  # heads of 32: what the kernels take
GROUPS = [(2, 1), (1, 2)]
TOLERANCE = 0.15  # of a log probability: a few roundings of 2^-9 in each layer, of logits that are spread by about 8
LEAST_EQUAL = 0.6  # of all tokens, up to the first that differs in each request


@pytest.fixture(scope="module", params=["qwen3-moe", "deepseek-v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    form: Form = request.param
    return make_tiny_moe(tmp_path_factory.mktemp("cuda-group") / form, form=form, shape=SHAPE)


def answers(model: Path, dp: int, cp: int, device: str, **worker: Any) -> list[Answer]:
    async def run() -> list[Answer]:
        scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_window": 4}
        flags = {
            "device": device,
            "dtype": "bfloat16",
            "max_num_seqs": 8,
            "block_size": 16,
            "kv_cache_memory_gb": 0.5,
            **worker,
        }
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
    return answers(model, 1, 1, "cuda")


def assert_close(found: list[Answer], expected: list[Answer], where: str) -> None:
    equal = total = 0
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        pairs = list(zip(a.tokens[0], b.tokens[0], strict=False))
        same = next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))
        equal, total = equal + same, total + len(b.tokens[0])
        for p, q in zip(a.logprobs[0][:same], b.logprobs[0][:same], strict=True):
            assert abs(p - q) < TOLERANCE, f"{where}: request {i}"
    assert equal >= LEAST_EQUAL * total, f"{where}: {equal} of {total} tokens are equal"


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("dp", "cp"), GROUPS)
def test_two_gpus_over_nccl(model: Path, expected: list[Answer], dp: int, cp: int, eager: bool) -> None:
    assert_close(answers(model, dp, cp, "cuda", enforce_eager=eager), expected, f"{dp} x {cp}")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("dp", "cp"), GROUPS)
def test_two_gpus_that_write_into_each_others_memory(model: Path, expected: list[Answer], dp: int, cp: int) -> None:
    found = answers(model, dp, cp, "cuda", all2all_backend="symmetric")
    assert_close(found, expected, f"{dp} x {cp}, symmetric")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_symmetric_memory_gives_the_bits_of_all_to_all(tmp_path: Path) -> None:
    model = make_tiny_moe(tmp_path / "model", form="qwen3-moe", shape=SHAPE)
    ways = [
        answers(model, 2, 1, "cuda", all2all_backend=name, deterministic="on") for name in ("symmetric", "all_to_all")
    ]
    assert [(answer.tokens, answer.logprobs) for answer in ways[0]] == [
        (answer.tokens, answer.logprobs) for answer in ways[1]
    ]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["all_to_all", "symmetric"])
@pytest.mark.parametrize(("dp", "cp"), GROUPS)
def test_a_killed_peer_frees_the_replay_that_waits_for_it(model: Path, dp: int, cp: int, backend: str) -> None:
    """The survivor is inside captured collectives when its peer dies. It keeps its weights and serves with a new peer, which has
    joined fewer groups than itself."""

    async def run() -> None:
        flags = {
            "device": "cuda",
            "dtype": "bfloat16",
            "max_num_seqs": 8,
            "kv_cache_memory_gb": 0.5,
            "all2all_backend": backend,
        }
        group = {"coupled": dp, "cp": cp, "gpus": GPUS, "scheduler": {"max_num_seqs": 8, "max_window": 16}}
        async with stack(model, worker=flags, with_router=False, **group) as s, s.session() as session:
            request = session.submit([3, 4, 5], Sampling(max_tokens=900))
            async for _ in request:
                break
            s.workers[1].running.kill()
            killed = time.monotonic()
            with pytest.raises(LockstepError):
                async for _ in request:
                    pass
            s.workers[1].start()
            await wait_serving(s.workers[1].address, timeout=60)
            await s.until_ready()
            print(f"{dp} x {cp}, {backend}: serves again {time.monotonic() - killed:.1f} s after its peer was killed")
            async with s.session() as again:
                answer = await again.submit([3, 4, 5], Sampling(max_tokens=8)).answer()
            assert len(answer.tokens[0]) == 8 and s.workers[0].running.returncode is None

    asyncio.run(run())


@pytest.mark.parametrize(("dp", "cp"), GROUPS)
def test_two_workers_that_share_a_gpu(model: Path, expected: list[Answer], dp: int, cp: int) -> None:
    assert_close(answers(model, dp, cp, "cuda", collectives="gloo"), expected, f"{dp} x {cp}")
