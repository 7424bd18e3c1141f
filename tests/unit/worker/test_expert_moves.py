"""Runners whose headers move experts and ask for loads: tokens stay what they were, all ranks are at the same place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep_common.steps import ExpertLoads, Plan
from lockstep_worker.collectives import Place
from lockstep_worker.protocol import Coalescer, StepResult, steps_of
from lockstep_worker.runner import Runner
from tests.moe_model import Form, MoeShape, make_tiny_moe
from tests.unit.worker.test_group_runner import choices, free_port, idle, open_runner, serve
from tests.unit.worker.toy import BLOCK, PlanDriver, ToyModel, make_runner

REDUNDANT, EXPERTS, TOP_K = 4, MoeShape().experts, MoeShape().top_k


class Rearranging:
    """A runner whose every plan moves a layer of its model, at random but alike on all ranks; every other plan reports loads."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.facts = runner.load(lambda share, message: None)
        self.loads: list[ExpertLoads] = []
        self.steps: list[int] = []

    def run(self, plan: Plan) -> Iterator[StepResult]:
        header, rng = plan.header, np.random.default_rng(plan.header.seq)
        slots = np.append(np.arange(EXPERTS), rng.integers(0, EXPERTS, REDUNDANT))
        header = replace(
            header,
            placement_version=header.seq,
            moved_layer=header.seq % self.facts.moe_layers,
            moved_experts=tuple(rng.permutation(slots).tolist()),
            report_loads=header.seq % 2 == 0,
        )
        outcomes = Coalescer(header, dp_rank=0, notice=0, start_ns=0, idle_ns=0)
        results = list(self.runner.run(replace(plan, header=header)))
        for i, result in enumerate(results):
            outcomes.add(result, i)
            assert (result.expert_loads is not None) == (header.report_loads and i + 1 == steps_of(header))
        outcome = outcomes.flush(0)
        self.steps.append(steps_of(header))
        assert outcome.last and (outcome.expert_loads is not None) == header.report_loads
        if outcome.expert_loads is not None:
            self.loads.append(outcome.expert_loads)
        return iter(results)

    def poll(self, *, wait: bool) -> Iterator[StepResult]:
        return self.runner.poll(wait=wait)

    @property
    def in_flight(self) -> int:
        return self.runner.in_flight


@pytest.fixture(scope="module", params=["qwen3-moe", "deepseek-v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    form: Form = request.param
    return make_tiny_moe(tmp_path_factory.mktemp("moves") / form, form=form)


@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (1, 2), (2, 2)])
def test_tokens_stay_while_experts_move(model: Path, dp: int, cp: int) -> None:
    (expected,) = serve(model, 1, 1)
    seen: dict[int, Rearranging] = {}
    drivers: dict[int, PlanDriver] = {}
    errors: list[BaseException] = []
    port = free_port()

    def work(rank: int) -> None:
        place = Place(dp, cp, rank)
        try:
            runner = seen[rank] = Rearranging(open_runner(model, place, port, redundant=REDUNDANT))
            drivers[rank] = driver = PlanDriver(runner, window=4, block=BLOCK * cp)  # type: ignore[arg-type]
            if place.dp_rank == 0:
                driver.add(choices(), chunk=12)
                for _ in range(4):
                    driver.decode()
                driver.settle()
            else:
                idle(runner)  # type: ignore[arg-type]
            runner.runner.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(dp * cp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for rank, runner in seen.items():
        facts, idling = runner.facts, Place(dp, cp, rank).dp_rank > 0
        assert (facts.routed_expert_count, facts.expert_slots) == (EXPERTS, EXPERTS + REDUNDANT)
        assert facts.moe_layers in (1, 2) and facts.expert_groups in (1, 2)
        assert [load.steps for load in runner.loads] == [
            runner.steps[0] + runner.steps[1],
            runner.steps[2] + runner.steps[3],
        ]
        assert all(load.prefill.shape == (facts.moe_layers, EXPERTS) for load in runner.loads)
        total = sum((load.prefill.sum() for load in runner.loads), start=0)
        if idling:
            assert total == 0 and not any(load.decode.any() for load in runner.loads)
            continue
        for row, choice in expected.items():
            assert drivers[rank].rows[row].output == choice.output and drivers[rank].rows[row].end == choice.end
        prompt_tokens = sum(len(choice.prompt) for choice in choices().values())
        first = runner.loads[0]
        assert (first.prefill.sum(1)[:-1] == prompt_tokens * TOP_K).all(), (
            "every token of every prompt, but in the last layer"
        )
        assert first.prefill.sum(1)[-1] == len(choices()) * TOP_K, "where only the last of each is needed"
        assert (first.decode.sum(1) > 0).all() and (first.decode.sum(1) <= 4 * len(choices()) * TOP_K).all()


def test_a_worker_of_its_own_has_no_experts_to_report() -> None:
    """All its experts are in one place: the scheduler is told that there are none to move, and asks for nothing."""
    facts = Rearranging(make_runner(ToyModel())).facts
    assert (facts.moe_layers, facts.expert_slots, facts.expert_groups) == (0, 0, 1)
