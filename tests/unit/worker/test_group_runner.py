"""Runners of one group, a thread each over real gloo: the same plans give the same tokens in a group of any shape."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep_common.steps import Body, GroupConfig, Header, Kind, Plan, Sampling, WorkerFacts
from lockstep_worker.collectives import Place
from lockstep_worker.exchange.placement import Sharding
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.loaded import Loaded
from lockstep_worker.models import Model, load_model
from lockstep_worker.protocol import GroupLost
from lockstep_worker.runner import Runner
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


class Captured:
    """A model whose captured steps run on a CPU: its attention needs lengths on the host, which a captured step does not have."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.generated_reusable = False  # what was generated once has passes of its own
        self.prefilled: list[int] = []  # tokens of each captured prefill pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        if inputs.query_lens or not len(inputs.token_ids):
            return self._model.forward(inputs, kv)
        lens = inputs.query_starts.diff()
        count = int((lens > 0).sum())  # sequences that pad a pass come last
        if inputs.kind is Kind.PREFILL:
            self.prefilled.append(int(inputs.query_starts[-1]))
        known = replace(
            inputs,
            rows=inputs.rows[:count],
            query_starts=inputs.query_starts[: count + 1],
            seq_lens=inputs.seq_lens[:count],
            block_tables=tuple(table[:count] for table in inputs.block_tables),
            query_lens=tuple(lens[:count].tolist()),
            host_seq_lens=tuple(inputs.seq_lens[:count].tolist()),
        )
        return self._model.forward(known, kv)


def open_runner(model: Path, place: Place, port: int, *, redundant: int = 0, graphs: bool = False) -> Runner:
    runner = load_runner(model, place, redundant=redundant, graphs=graphs)
    join(runner, place, port)
    return runner


def load_runner(model: Path, place: Place, *, redundant: int = 0, graphs: bool = False) -> Runner:
    loaded_model = load_model(
        model,
        dtype=torch.float32,
        device=CPU,
        deterministic=False,
        sharding=Sharding(ranks=place.size, rank=place.rank, redundant=redundant),
    )
    loaded = Loaded(
        Captured(loaded_model) if graphs else loaded_model,
        TokenSampler,
        "tiny",
        "float32",
        CPU,
        False,
        ROWS,
        2048,
        MAX_LEN,
        BLOCK,
        BLOCKS,
        graphs=graphs,
        place=place,
    )
    runner = Runner(lambda progress: loaded, debug_collectives=True, collective_deadline_s=10.0)
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


def serve(model: Path, dp: int, cp: int, *, dual: bool = False, graphs: bool = False) -> list[dict[int, Choice]]:
    """What each rank saw: DP rank 0 has all choices, the others have none and run placeholders."""
    port, micro = free_port(), tuple(chunk_sums([len(c.prompt) for c in choices().values()], 12))

    def work(rank: int) -> dict[int, Choice]:
        place = Place(dp, cp, rank)
        runner = open_runner(model, place, port, graphs=graphs)
        before = replays(runner)
        driver = PlanDriver(runner, window=4, block=BLOCK * cp, dual=dual)
        if place.dp_rank == 0:
            driver.add(choices(), chunk=12)
            for _ in range(4):
                driver.decode()
            driver.settle()
        else:
            idle(runner, dual, micro=micro)
        if graphs:
            prefilled = list(micro) if place.dp_rank == 0 else [0] * len(micro)
            assert replays(runner)[0] - before[0] == 16 and replays(runner)[1][len(before[1]) :] == (
                [] if dual or cp > 1 else prefilled
            )
        runner.close()
        return driver.rows

    return together(work, dp * cp)


def replays(runner: Runner) -> tuple[int, list[int]]:
    """Captured decode steps, and tokens of captured prefill passes, so far."""
    model, graphs = runner._loaded.model, runner._graphs
    return (graphs._steps, list(model.prefilled)) if graphs and isinstance(model, Captured) else (0, [])


def chunk_sums(lengths: Sequence[int], chunk: int) -> list[int]:
    """Tokens of each pass of at most so many a row."""
    return [sum(min(chunk, max(0, n - start)) for n in lengths) for start in range(0, max(lengths), chunk)]


def together(work: Callable[[int], dict[int, Choice]], ranks: int) -> list[dict[int, Choice]]:
    """What each rank saw, a thread each."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks), timeout=60))


def idle(
    runner: Runner,
    dual: bool = False,
    *,
    epoch: int = 1,
    micro: tuple[int, ...] = (1, 1, 1),
    windows: int = 4,
    k: int = 4,
) -> None:
    """The same plans without a row."""
    plans = [Header(epoch, 1, Kind.PREFILL, 0, 1, row_bucket=ROWS, micro_chunks=micro, dual_batch=dual)]
    plans += [Header(epoch, 2 + i, Kind.DECODE, 0, k, row_bucket=ROWS, dual_batch=dual) for i in range(windows)]
    for header in plans:
        results = [*runner.run(Plan(header, Body(1, 0))), *runner.poll(wait=True)]
        assert all(len(result.words) == 0 for result in results) and len(results) in (len(micro), k)


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


@pytest.mark.parametrize(
    ("dp", "cp", "dual"), [(2, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)], ids=lambda value: str(value)
)
def test_captured_steps_of_a_group_sample_what_one_worker_does(model: Path, dp: int, cp: int, dual: bool) -> None:
    """All of them are replayed, on ranks without a row too."""
    (expected,) = serve(model, 1, 1)
    found = serve(model, dp, cp, dual=dual, graphs=True)
    for rank in range(cp):
        for row, choice in expected.items():
            assert found[rank][row].output == choice.output and found[rank][row].end == choice.end, f"{rank}, row {row}"


def test_only_one_worker_has_penalties_and_all_go_on_replaying(model: Path) -> None:
    asks = Sampling(frequency_penalty=0.8, repetition_penalty=1.3, bias=tuple((t, 0.01) for t in range(90)))
    plain = {0: Choice((1, 2, 3), limit=30)}
    port = free_port()

    def work(rank: int) -> dict[int, Choice]:
        runner = open_runner(model, Place(2, 1, rank), port, graphs=True)
        driver = PlanDriver(runner, window=4)
        driver.add({0: replace(plain[0], output=[])})
        driver.decode()
        captured = dict(runner._graphs._replays)  # type: ignore[union-attr]
        driver.add({1: Choice((5, 6, 7), asks if rank else Sampling(), limit=30)})
        before = replays(runner)
        for _ in range(6):
            driver.decode()
        driver.settle()
        assert replays(runner)[0] - before[0] == 24 and runner._graphs._replays == captured  # type: ignore[union-attr]
        runner.close()
        return driver.rows

    def alone(sampling: Sampling) -> list[int]:
        runner = open_runner(model, Place(), 0)
        driver = PlanDriver(runner)
        driver.add({0: replace(plain[0], output=[]), 1: Choice((5, 6, 7), sampling, limit=30)})
        driver.finish()
        assert driver.rows[1].output != driver.rows[0].output
        return driver.rows[1].output

    found = together(work, 2)
    for rank, sampling in enumerate((Sampling(), asks)):
        output = found[rank][1].output
        assert len(output) == 25 and output == alone(sampling)[:25]


def test_a_rank_whose_pass_fits_no_captured_one_takes_part_in_the_same_exchanges(model: Path) -> None:
    """Rank 1 has more sequences than a captured pass has room for; tokens that were generated before are computed by counts."""
    short = {row: Choice((row + 1, 2), limit=20) for row in range(ROWS)}
    long = {0: Choice(tuple(range(1, 11)), limit=20)}
    port = free_port()

    def work(rank: int) -> dict[int, Choice]:
        runner = open_runner(model, Place(2, 1, rank), port, graphs=True)
        driver, before = PlanDriver(runner, micro=16), replays(runner)[1]
        driver.add({row: replace(choice, output=[]) for row, choice in (short if rank else long).items()})
        assert replays(runner)[1] == before + ([10] if rank == 0 else [])
        driver.decode()
        if rank == 0:
            choice = driver.remove(0)
        else:
            driver.settle()
        driver.add({0: choice} if rank == 0 else {})
        driver.decode()
        driver.settle()
        runner.close()
        return driver.rows

    found = together(work, 2)
    runner = open_runner(model, Place(), 0)
    for rank, chosen in enumerate((long, short)):
        driver = PlanDriver(runner) if rank == 0 else PlanDriver(open_runner(model, Place(), 0))
        driver.add({row: replace(choice, output=[]) for row, choice in chosen.items()})
        driver.finish()
        for row, choice in driver.rows.items():
            output = found[rank][row].output
            assert len(output) >= 9 and output == choice.output[: len(output)], f"rank {rank}, row {row}"


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
            idle(runner, epoch=2, micro=(1,), windows=8, k=1)
        runner.close()
        return driver.rows

    for rank, found in enumerate(together(work, dp * cp)):
        for row, choice in found.items():
            assert choice.output == expected[row].output and choice.end == expected[row].end, f"rank {rank}, row {row}"
