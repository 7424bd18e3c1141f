"""Runners of one group, a thread each over real gloo: the same plans give the same tokens in a group of any shape."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

import pytest
import torch

from lockstep_common.steps import Body, GroupConfig, Header, Kind, Plan, Sampling
from lockstep_worker.collectives import Place
from lockstep_worker.exchange.placement import Sharding
from lockstep_worker.models import load_model
from lockstep_worker.runner import Loaded, Runner
from lockstep_worker.sampling import TokenSampler
from tests.moe_model import Form, MoeShape, make_tiny_moe
from tests.unit.worker.toy import BLOCK, BLOCKS, CPU, MAX_LEN, ROWS, Choice, PlanDriver

SHAPES = [(1, 2), (2, 1), (2, 2)]


@pytest.fixture(scope="module", params=["qwen3-moe", "deepseek-v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    form: Form = request.param
    return make_tiny_moe(tmp_path_factory.mktemp("group") / form, form=form)


def choices(count: int = 4) -> dict[int, Choice]:
    rng = random.Random(4)
    words = MoeShape().vocab - 3
    sampling = [Sampling(), Sampling(temperature=0.9, seed=3), Sampling(), Sampling(temperature=0.7, seed=9, top_k=40)]
    return {
        row: Choice(tuple(rng.randrange(words) for _ in range(length)), sampling[row], limit=length + 9 + row)
        for row, length in enumerate((1, 7, 18, 30)[:count])
    }


def open_runner(model: Path, place: Place, port: int, *, redundant: int = 0) -> Runner:
    loaded = Loaded(
        load_model(
            model,
            dtype=torch.float32,
            device=CPU,
            deterministic=False,
            sharding=Sharding(ranks=place.size, rank=place.rank, redundant=redundant),
        ),
        TokenSampler,
        "tiny",
        "float32",
        CPU,
        False,
        ROWS,
        MAX_LEN,
        BLOCK,
        BLOCKS,
        place=place,
    )
    runner = Runner(lambda progress: loaded, debug_collectives=True)
    runner.load(lambda share, message: None)
    store = ("127.0.0.1", port)
    peers = tuple(f"127.0.0.1:{rank}" for rank in range(place.size))
    runner.configure(
        GroupConfig(
            1,
            1,
            place.rank,
            place.dp_rank,
            place.cp_rank,
            place.dp,
            place.cp,
            *store,
            ROWS,
            MAX_LEN,
            64,
            8,
            BLOCKS,
            peers,
        )
    )
    return runner


def serve(model: Path, dp: int, cp: int, *, dual: bool = False) -> list[dict[int, Choice]]:
    """What each rank saw: DP rank 0 has all choices, the others have none and run placeholders."""
    seen: dict[int, dict[int, Choice]] = {}
    errors: list[BaseException] = []
    port = free_port()

    def work(rank: int) -> None:
        place = Place(dp, cp, rank)
        try:
            runner = open_runner(model, place, port)
            driver = PlanDriver(runner, window=4, block=BLOCK * cp, dual=dual)
            if place.dp_rank == 0:
                driver.add(choices(), chunk=12)
                for _ in range(4):
                    driver.decode()
                driver.settle()
            else:
                idle(runner, dual)
            seen[rank] = driver.rows
            runner.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(dp * cp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [seen[rank] for rank in range(dp * cp)]


def idle(runner: Runner, dual: bool = False) -> None:
    """The same plans without a row."""
    plans = [Header(1, 1, Kind.PREFILL, 0, 1, row_bucket=ROWS, micro_chunks=(1, 1, 1), dual_batch=dual)]
    plans += [Header(1, 2 + i, Kind.DECODE, 0, 4, row_bucket=ROWS, dual_batch=dual) for i in range(4)]
    for header in plans:
        results = [*runner.run(Plan(header, Body(1, 0))), *runner.poll(wait=True)]
        assert all(len(result.words) == 0 for result in results) and len(results) in (3, 4)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("dual", [False, True], ids=["as one", "as two halves"])
@pytest.mark.parametrize(("dp", "cp"), SHAPES)
def test_a_group_of_any_shape_samples_what_one_worker_does(model: Path, dp: int, cp: int, dual: bool) -> None:
    (expected,) = serve(model, 1, 1)
    assert all(choice.end for choice in expected.values())
    for rank, found in enumerate(serve(model, dp, cp, dual=dual)):
        if Place(dp, cp, rank).dp_rank:
            assert not found
            continue
        for row, choice in expected.items():
            assert found[row].output == choice.output and found[row].end == choice.end, f"rank {rank}, row {row}"
