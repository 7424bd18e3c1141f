"""Runners of one group, a thread each over real gloo: the same plans give the same tokens in a group of any shape."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep_common.steps import Body, GroupConfig, Header, Kind, Plan, Sampling, WorkerFacts
from lockstep_worker.collectives import Place
from lockstep_worker.exchange.placement import Sharding
from lockstep_worker.models import load_model
from lockstep_worker.protocol import GroupLost
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
    runner = load_runner(model, place, redundant=redundant)
    join(runner, place, port)
    return runner


def load_runner(model: Path, place: Place, *, redundant: int = 0) -> Runner:
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
    runner = Runner(lambda progress: loaded, debug_collectives=True, collective_deadline_s=2.0)
    runner.load(lambda share, message: None)
    return runner


def join(runner: Runner, place: Place, port: int, *, epoch: int = 1) -> WorkerFacts:
    store = ("127.0.0.1", port)
    peers = tuple(f"127.0.0.1:{rank}" for rank in range(place.size))
    return runner.configure(
        GroupConfig(
            epoch,
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


def serve(model: Path, dp: int, cp: int, *, dual: bool = False) -> list[dict[int, Choice]]:
    """What each rank saw: DP rank 0 has all choices, the others have none and run placeholders."""
    port = free_port()

    def work(rank: int) -> dict[int, Choice]:
        place = Place(dp, cp, rank)
        runner = open_runner(model, place, port)
        driver = PlanDriver(runner, window=4, block=BLOCK * cp, dual=dual)
        if place.dp_rank == 0:
            driver.add(choices(), chunk=12)
            for _ in range(4):
                driver.decode()
            driver.settle()
        else:
            idle(runner, dual)
        runner.close()
        return driver.rows

    return together(work, dp * cp)


def together(work: Callable[[int], dict[int, Choice]], ranks: int) -> list[dict[int, Choice]]:
    """What each rank saw, a thread each."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks), timeout=60))


def idle(runner: Runner, dual: bool = False, *, epoch: int = 1, passes: int = 3, windows: int = 4, k: int = 4) -> None:
    """The same plans without a row."""
    micro = (1,) * passes
    plans = [Header(epoch, 1, Kind.PREFILL, 0, 1, row_bucket=ROWS, micro_chunks=micro, dual_batch=dual)]
    plans += [Header(epoch, 2 + i, Kind.DECODE, 0, k, row_bucket=ROWS, dual_batch=dual) for i in range(windows)]
    for header in plans:
        results = [*runner.run(Plan(header, Body(1, 0))), *runner.poll(wait=True)]
        assert all(len(result.words) == 0 for result in results) and len(results) in (passes, k)


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


@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (2, 2)])
def test_who_is_left_of_a_lost_group_goes_on_from_its_blocks(model: Path, dp: int, cp: int) -> None:
    """The last worker is lost in the middle of a plan. With a new one in its place only the ends of rows are computed again."""
    (expected,) = serve(model, 1, 1)
    lost, ports = dp * cp - 1, (free_port(), free_port())
    gone = threading.Event()

    def work(rank: int) -> dict[int, Choice]:
        place = Place(dp, cp, rank)
        runner = open_runner(model, place, ports[0])
        driver = PlanDriver(runner, window=4, block=BLOCK * cp)
        if place.dp_rank == 0:
            driver.add(choices(), chunk=12)
            driver.decode()
            driver.settle()
        else:
            idle(runner, windows=1)
        booked = {row: replace(choice, output=list(choice.output)) for row, choice in driver.rows.items()}
        if rank == lost:
            runner.interrupt()
            runner.close()
            gone.set()
            runner = load_runner(model, place)
        else:
            gone.wait()
            with pytest.raises(GroupLost):
                driver.decode() if place.dp_rank == 0 else idle(runner, windows=1)
            runner.leave()
        facts = join(runner, place, ports[1], epoch=2)
        assert facts.kept_epoch == (0 if rank == lost else 1)
        return go_on(runner, place, booked)

    def go_on(runner: Runner, place: Place, booked: dict[int, Choice]) -> dict[int, Choice]:
        driver, computed = PlanDriver(runner, window=1, block=BLOCK * cp, epoch=2), BLOCK * cp
        if place.dp_rank == 0:
            long = {row: choice for row, choice in booked.items() if not choice.end and len(choice.tokens) > computed}
            assert len(long) >= 3
            driver.add(long, computed=computed)
            for _ in range(8):
                driver.decode()
            driver.settle()
        else:
            idle(runner, epoch=2, passes=1, windows=8, k=1)
        runner.close()
        return driver.rows

    for rank, found in enumerate(together(work, dp * cp)):
        for row, choice in found.items():
            assert choice.output == expected[row].output and choice.end == expected[row].end, f"rank {rank}, row {row}"
