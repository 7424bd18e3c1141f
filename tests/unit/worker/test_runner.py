"""The step loop over a toy model: same tokens whatever happens around a row, ends on the device, placeholders."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.errors import Conflict, LockstepError
from lockstep_common.steps import Body, Flag, GroupConfig, Header, Kind, Plan, Sampling, TopLogprobs, WorkerFacts
from lockstep_worker.collectives import CollectiveId, Group, Place
from lockstep_worker.collectives.record import DEVICE
from lockstep_worker.graphs import CAPTURED, EAGER_PLANS
from lockstep_worker.protocol import StepResult
from lockstep_worker.results import select_words
from lockstep_worker.runner import NOT_FINITE, Runner
from lockstep_worker.sampling import Variant
from tests.unit.worker.toy import (
    BLOCK,
    BLOCKS,
    MAX_LEN,
    ROWS,
    VOCAB,
    Choice,
    Mode,
    PlanDriver,
    ToyModel,
    hashed_logits,
    make_runner,
    solo,
    u32,
)

SEEDED = Sampling(temperature=1.0, top_p=0.9, seed=11)
MIXED = [
    Choice((1, 2, 3), Sampling(), limit=20),
    Choice((4, 5, 6, 7, 8, 9, 10), SEEDED, limit=21),
    Choice((4, 5, 6, 7, 8, 9, 10), SEEDED, limit=21, choice=1),
    Choice((9,), Sampling(temperature=0.7, top_k=5, seed=2**63 + 5, logprobs=3), limit=14),
    Choice((3, 3, 3, 3), Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2), limit=30),
    Choice((8, 1), Sampling(temperature=0.5, min_p=0.1, bias=((7, 3.0), (8, -100.0)), seed=3, logprobs=0), limit=25),
]


def fresh(choices: list[Choice]) -> dict[int, Choice]:
    return {row: replace(choice, output=[], logprobs=[], tops=[]) for row, choice in enumerate(choices)}


def results_of(choices: dict[int, Choice]) -> list[tuple[object, ...]]:
    return [(c.output, c.end, c.logprobs, c.tops) for c in choices.values()]


@pytest.fixture(scope="module")
def alone() -> list[tuple[object, ...]]:
    """Every choice run by itself, window 1."""
    return [results_of({0: solo(ToyModel(), c, window=1)})[0] for c in fresh(MIXED).values()]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("chunk", [1000, 2])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_batched_rows_equal_lone_rows(alone: list[tuple[object, ...]], window: int, chunk: int, mode: Mode) -> None:
    driver = PlanDriver(make_runner(ToyModel(), mode=mode), window=window)
    choices = fresh(MIXED)
    driver.add(choices, chunk=chunk)
    driver.finish()
    assert results_of(choices) == alone


@settings(max_examples=12, deadline=None)
@given(data=st.data(), mode=st.sampled_from(Mode))
def test_preemption_does_not_change_a_row(data: st.DataObject, mode: Mode) -> None:
    choices = fresh(MIXED[:3])
    driver = PlanDriver(make_runner(ToyModel(), mode=mode), window=data.draw(st.integers(1, 5)))
    driver.add(choices)
    for _ in range(3):
        driver.settle()
        if not (running := driver.running()):
            break
        row = data.draw(st.sampled_from(running))
        other = data.draw(st.sampled_from([r for r in range(ROWS) if r not in driver.rows or r == row]))
        driver.add({other: driver.remove(row)})
        driver.decode()
    driver.finish()
    expected = [solo(ToyModel(), c, window=8).output for c in fresh(MIXED[:3]).values()]
    assert [c.output for c in choices.values()] == expected


def test_row_ends_at_its_limit_in_the_middle_of_a_window() -> None:
    choice = solo(ToyModel(), Choice((1, 2, 3), limit=9), window=8)
    assert len(choice.output) == 6 and choice.end == Flag.LENGTH
    assert solo(ToyModel(), Choice((1, 2, 3), limit=4)).end == Flag.LENGTH


def test_row_stops_at_a_stop_id_and_its_mates_go_on() -> None:
    output = solo(ToyModel(), Choice((1, 2, 3), limit=30)).output
    stop = output[5]
    first = output.index(stop)
    other = next(token for token in range(VOCAB) if token not in output)
    driver = PlanDriver(make_runner(ToyModel()), window=8)
    choices = {0: Choice((1, 2, 3), Sampling(stop_ids=(other, stop)), limit=30), 1: Choice((5, 5), limit=30)}
    driver.add(choices)
    driver.finish()
    assert choices[0].output == output[: first + 1] and choices[0].end == Flag.STOP
    assert len(choices[1].output) == 28


def test_stop_wins_over_length() -> None:
    output = solo(ToyModel(), Choice((1, 2, 3), limit=5)).output
    assert solo(ToyModel(), Choice((1, 2, 3), Sampling(stop_ids=(output[-1],)), limit=5)).end == Flag.STOP


@pytest.mark.parametrize("mode", Mode)
def test_nan_ends_its_row_only(mode: Mode) -> None:
    poison = 13

    def logits(history: tuple[int, ...]) -> np.ndarray:
        values = hashed_logits(history)
        if history[0] == poison and len(history) >= 5:
            values[7] = np.nan
        return values

    healthy = solo(ToyModel(), Choice((1, 2, 3), SEEDED, limit=20)).output
    driver = PlanDriver(make_runner(ToyModel(logits), mode=mode), window=8)
    choices = {
        0: Choice((1, 2, 3), SEEDED, limit=20),
        1: Choice((poison, 4), Sampling(temperature=1.0, seed=5, logprobs=2), limit=20),
        2: Choice((poison, 4), limit=20),
    }
    driver.add(choices)
    driver.finish()
    assert choices[0].output == healthy and choices[0].end == Flag.LENGTH
    for row in (1, 2):
        assert choices[row].end == Flag.FAULT and choices[row].fault == NOT_FINITE
        assert len(choices[row].output) == 3


def test_rows_that_ended_are_passed_over_and_cost_no_forward() -> None:
    model = ToyModel()
    driver = PlanDriver(make_runner(model), window=4)
    driver.add({0: Choice((1, 2), limit=4)})
    driver.decode()
    assert driver.rows[0].end == Flag.LENGTH
    model.passes.clear()
    driver.decode([0])
    assert model.passes == []


def test_placeholder_changes_no_byte_of_the_cache() -> None:
    model = ToyModel()
    runner = make_runner(model)
    driver = PlanDriver(runner, window=4)
    driver.add({0: Choice((1, 2, 3, 4, 5), limit=40)})
    driver.decode()
    runner._group = Group(Place(2, 1))
    before = runner._kv.layer(0, 0).clone()
    model.passes.clear()
    for kind, chunks in ((Kind.DECODE, ()), (Kind.PREFILL, (7, 2))):
        results = list(runner.run(Plan(Header(1, 99, kind, 0, 3, micro_chunks=chunks), Body(1, 0))))
        assert [len(result.words) for result in results] == [0] * (3 if kind == Kind.DECODE else 2)
    assert model.passes == [(Kind.DECODE, 0)] * 3 + [(Kind.PREFILL, 0)] * 2
    assert torch.equal(runner._kv.layer(0, 0), before)


def test_ranks_that_share_no_experts_meet_before_every_step() -> None:
    met: list[CollectiveId] = []

    class Meeting(Group):
        def meet(self, mine: int) -> int:
            with self.recorder.during("step", "everybody") as collective:
                met.append(collective)
            return mine

    runner = make_runner(ToyModel())
    runner._group = Meeting(Place(2, 1))
    driver = PlanDriver(runner, window=4)
    driver.add({0: Choice((1, 2), limit=5)})
    driver.decode([0])
    assert [(c.seq, c.step) for c in met] == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]


def test_a_row_that_asks_for_much_is_replayed_like_any_other() -> None:
    """Tables have room for it from the start: no step that was captured is captured again, with others or alone."""
    asks = Sampling(presence_penalty=0.5, stop_ids=tuple(range(20, 40)), bias=tuple((t, 0.1) for t in range(VOCAB)))
    expected = solo(ToyModel(), Choice((1, 2, 3), asks, limit=20)).output
    for group in (Group(), Group(Place(2, 1))):
        runner = make_runner(ToyModel(), mode=Mode.REPLAYED)
        runner._group = group
        graphs, driver = runner._graphs, PlanDriver(runner, window=4)
        assert graphs is not None
        driver.add({0: Choice((4, 5), limit=12)})
        driver.decode()
        captured = dict(graphs._replays)
        driver.add({1: Choice((1, 2, 3), asks, limit=20)})
        before, plans = graphs._steps, driver.plans
        driver.finish()
        assert driver.rows[1].output == expected
        assert graphs._steps - before == 4 * (driver.plans - plans) and graphs._replays == captured


def test_results_that_a_device_owes_a_group_count_as_an_open_collective() -> None:
    runner = make_runner(ToyModel(), mode=Mode.LATE)
    runner._group = group = Group(Place(2, 1))
    driver = PlanDriver(runner, window=4)
    driver.add({0: Choice((4, 5), limit=40)})
    driver.decode()
    assert runner.in_flight == 1 and group.recorder.waiting() is None
    for _ in range(2):
        assert not list(runner.poll(wait=False))
        waiting = group.recorder.waiting()
        assert waiting is not None and waiting[0].scope == DEVICE and waiting[1] <= time.monotonic()
    driver.settle()
    assert group.recorder.waiting() is None


def test_a_groups_bucket_may_be_above_all_rows() -> None:
    runner = make_runner(ToyModel(), mode=Mode.REPLAYED)
    assert runner._graphs is not None
    assert [runner._graphs.size(rows) for rows in (1, 3, ROWS, ROWS + 2)] == [1, 4, ROWS, ROWS]


def test_blocks_are_zeroed_and_copied_before_the_step() -> None:
    runner = make_runner(ToyModel())
    driver = PlanDriver(runner)
    driver.add({0: Choice((1, 2, 3, 4), limit=10)})
    cache = runner._kv.layer(0, 0)
    source, target = 1, BLOCKS - 1
    body = Body(1, 0, copies=((u32([source]), u32([target])),), zeroes=(u32([2]),))
    list(runner.run(Plan(Header(1, 9, Kind.DECODE, 0, 1), body)))
    assert cache[target, 0, 0, :, 0].tolist() == [2, 3, 4, 5]
    assert not cache[2].any()


def test_plans_that_break_the_rules_are_errors() -> None:
    driver = PlanDriver(make_runner(ToyModel()))
    with pytest.raises(LockstepError, match=r"rows \[3\] decode without a prefill"):
        list(driver.runner.run(Plan(Header(1, 1, Kind.DECODE, 0, 1), Body(1, 0, rows=u32([3])))))
    driver.add({0: Choice((1, 2), limit=9)})
    with pytest.raises(LockstepError, match=r"rows \[0\] are added, but are in use"):
        driver.add({0: Choice((1, 2), limit=9)})


def test_configure_refuses_more_than_the_worker_was_started_for() -> None:
    runner = make_runner(ToyModel())
    with pytest.raises(Conflict, match="max_num_seqs"):
        runner.configure(GroupConfig(2, 1, 0, 0, 0, 1, 1, "", 0, ROWS + 1, MAX_LEN, 32, 8, 0))
    with pytest.raises(Conflict, match="max_num_batched_tokens"):
        runner.configure(GroupConfig(2, 1, 0, 0, 0, 1, 1, "", 0, ROWS, MAX_LEN, 2049, 8, 0))
    facts = runner.configure(GroupConfig(2, 1, 0, 0, 0, 1, 1, "", 0, ROWS, MAX_LEN, 32, 8, 20))
    assert facts.groups[0].num_blocks == 20 and facts.vocab_size == VOCAB
    assert (facts.max_rows, facts.max_batched_tokens) == (ROWS, 2048)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("rows", [ROWS, ROWS - 1], ids=["the same sizes", "fewer rows"])
def test_a_worker_that_joins_again_keeps_its_cache_and_rows_go_on_from_their_blocks(mode: Mode, rows: int) -> None:
    choice = Choice(tuple(range(1, 10)), limit=40)
    expected = solo(ToyModel(), replace(choice, output=[])).output
    model = ToyModel()
    runner = make_runner(model, mode=mode)
    driver = PlanDriver(runner, epoch=3)
    driver.add({1: choice})
    driver.decode()
    choice = driver.remove(1)
    before, captured = runner._kv.layer(0, 0).clone(), runner._graphs
    facts = runner.configure(GroupConfig(4, 1, 0, 0, 0, 1, 1, "", 0, rows, MAX_LEN, 32, 8, BLOCKS))
    assert facts.kept_epoch == 3
    assert torch.equal(runner._kv.layer(0, 0)[1:], before[1:]), "joining wrote to a block"
    assert (runner._graphs is captured) == (rows == ROWS or captured is None)
    model.passes.clear()
    again, computed = PlanDriver(runner, epoch=4), (len(choice.tokens) - 1) // BLOCK * BLOCK
    rest = len(choice.tokens) - computed
    again.add({1: choice}, computed=computed)
    assert rest < BLOCK and (mode is Mode.REPLAYED or model.passes[0] == (Kind.PREFILL, rest))
    again.finish()
    assert choice.output == expected and choice.end == Flag.LENGTH
    assert runner.configure(GroupConfig(5, 1, 0, 0, 0, 1, 1, "", 0, rows, MAX_LEN, 32, 8, BLOCKS)).kept_epoch == 4


def test_a_group_that_forms_again_serves_at_once_and_captures_steps_when_their_size_has_been_used() -> None:
    """Plans count, not rows: a rank without a row captures with the others."""
    expected = solo(ToyModel(), Choice((1, 2, 3), limit=40)).output
    for idle in (False, True):
        runner = make_runner(ToyModel(), mode=Mode.REPLAYED, capture_by_use=True)
        runner._group = Group(Place(2, 1))
        driver, graphs = PlanDriver(runner, window=4), runner._graphs
        assert graphs is not None and (ROWS, Variant.GREEDY, False) not in graphs._replays
        before = graphs._steps  # of warming up, alone
        driver.add({0: Choice((1, 2, 3), limit=40)})
        for plans in range(1, EAGER_PLANS + 3):
            driver.decode([] if idle else None)
            assert graphs._steps - before == 4 * max(0, plans - EAGER_PLANS)
        driver.settle()
        assert {(ROWS, variant, False) for variant in CAPTURED} <= graphs._replays.keys()
        output = driver.rows[0].output
        assert output == expected[: len(output)] and len(output) == (1 if idle else 1 + 4 * (EAGER_PLANS + 2))


def test_a_cache_is_kept_for_fewer_blocks_and_another_one_is_made_for_more() -> None:
    loaded = make_runner(ToyModel())._loaded
    runner = Runner(lambda progress: loaded)
    runner.load(lambda share, message: None)

    def configure(epoch: int, blocks: int) -> WorkerFacts:
        return runner.configure(GroupConfig(epoch, 1, 0, 0, 0, 1, 1, "", 0, ROWS, MAX_LEN, 32, 8, blocks))

    configure(2, BLOCKS - 1)
    PlanDriver(runner, epoch=2).add({0: Choice((1, 2, 3), limit=9)})
    facts = configure(3, BLOCKS - 2)
    assert facts.kept_epoch == 2 and facts.groups[0].num_blocks == BLOCKS - 2 and runner._kv.layer(0, 0).any()
    facts = configure(4, BLOCKS)
    assert facts.kept_epoch == 0 and facts.groups[0].num_blocks == BLOCKS and not runner._kv.layer(0, 0).any()


def test_select_words_keeps_logprobs_and_top_with_their_words() -> None:
    result = StepResult(
        np.array([10, 11, 12], np.uint64),
        np.array([-1, -2, -3], np.float32),
        TopLogprobs(u32([0, 2]), u32([1, 2]), u32([5, 6, 7]), np.array([-1, -3, -4], np.float32)),
    )
    kept = select_words(result, np.array([False, True, True]))
    assert kept.words.tolist() == [11, 12] and kept.logprobs is not None and kept.logprobs.tolist() == [-2, -3]
    assert kept.top is not None and kept.top.index.tolist() == [1]
    assert kept.top.ids.tolist() == [6, 7] and kept.top.counts.tolist() == [2]
