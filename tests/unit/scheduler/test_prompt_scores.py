"""Scores of prompts through the step loop: whole, once, before the first token, whatever is chunked, preempted or cached."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common import rpc
from lockstep_common.errors import InvalidRequest
from lockstep_common.steps import (
    MAX_LOGPROBS,
    MAX_PROMPT_SCORES,
    NO_U32,
    NO_U64,
    Header,
    Kind,
    PromptChunk,
    PromptScores,
    Sampling,
)
from lockstep_scheduler.booking import EventBatch
from lockstep_scheduler.client import read_outcome
from lockstep_scheduler.request import Request
from lockstep_scheduler.server import write_events
from lockstep_worker.protocol import Coalescer, StepResult
from lockstep_worker.server import outcome_message
from tests.scripted_worker import Script, toy_scores
from tests.unit.scheduler.simulation import Simulation


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start * 7 + i * 13) % 997 for i in range(length)]


def check(sim: Simulation, request: Request) -> None:
    width = request.sampling.prompt_logprobs
    if width < 0 or len(request.prompt) == 1:
        assert request.handle not in sim.scores
        return
    same(sim.scores[request.handle], toy_scores(request.prompt.tolist(), width, sim.vocab_size))


def same(got: PromptScores, want: PromptScores) -> None:
    for name in ("logprobs", "ranks", "ids", "values"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), strict=True)


@given(
    seed=st.integers(0, 10_000),
    dp=st.integers(1, 2),
    num_blocks=st.sampled_from([34, 40, 64]),
    batched=st.sampled_from([5, 16, 32]),
)
@settings(max_examples=40, deadline=None)
def test_random_arrivals(seed: int, dp: int, num_blocks: int, batched: int) -> None:
    """Shared prompts, several choices, and pools so small that rows are preempted."""
    choose = random.Random(seed)
    sim = Simulation(dp=dp, num_blocks=num_blocks, seed=seed, max_rows=4, max_batched_tokens=batched)
    requests = []
    for _ in range(choose.randint(1, 12)):
        for _ in range(choose.randint(0, 12)):
            sim.turn()
        requests.append(
            sim.submit(
                prompt(choose.randint(1, 60), choose.randint(1, 3)),
                n=choose.choice([1, 1, 2]),
                max_tokens=choose.randint(1, 40),
                prompt_logprobs=choose.choice([-1, 0, 1, 3]),
            )
        )
    sim.run()
    sim.check_answers(requests)
    for request in requests:
        check(sim, request)


def test_a_prompt_that_is_scored_takes_nothing_from_the_cache_but_gives() -> None:
    sim = Simulation()
    first = sim.submit(prompt(21))
    sim.run()
    scored = sim.submit(prompt(21), prompt_logprobs=2)
    sim.run()
    again = sim.submit(prompt(21))
    sim.run()
    assert [request.cached for request in (first, scored, again)] == [0, 0, 20]
    check(sim, scored)


def test_what_was_scored_before_a_preemption_is_not_asked_for_again() -> None:
    sim = Simulation(num_blocks=22, block_size=4, max_rows=2)
    requests = [sim.submit(prompt(20, i), max_tokens=50, prompt_logprobs=1) for i in (1, 2)]
    sim.run()
    assert sim.loop.stats.preemptions
    adds = [add for bodies in sim.bodies for body in bodies for add in body.adds]
    assert [add.sampling.prompt_logprobs for add in adds] == [1, 1] + [-1] * (len(adds) - 2)
    for request in requests:
        check(sim, request)


def test_a_resumed_session_gets_the_scores_again_unless_it_has_tokens() -> None:
    sim = Simulation()
    request = sim.submit(prompt(9), max_tokens=30, prompt_logprobs=0)
    while not sim.got(request).tokens:
        sim.turn()
    kept = dict(sim.scores)
    for offset, again in ((1, False), (0, True)):
        sim.scores.clear()
        sim.received.clear()
        sim.loop.orphan(1)
        sim.received[request.handle, 0].tokens = sim.loop._tokens(request.choices[0])[:offset].tolist()
        sim.loop.resume(request.request_id, 1, request.handle, {0: offset})
        assert (request.handle in sim.scores) == again
    same(sim.scores[request.handle], kept[request.handle])


def test_what_costs_too_much_is_refused_by_name() -> None:
    sim = Simulation(num_blocks=40_000, max_model_len=140_000)
    for length, width in ((3, MAX_LOGPROBS + 1), (MAX_PROMPT_SCORES // 2 + 1, 1)):
        with pytest.raises(InvalidRequest, match="prompt_logprobs") as caught:
            sim.loop.check(np.ones(length, np.uint32), Sampling(prompt_logprobs=width), 1)
        assert caught.value.param == "prompt_logprobs"
    sim.loop.check(np.ones(MAX_PROMPT_SCORES // 2, np.uint32), Sampling(prompt_logprobs=1), 1)


def test_rows_of_nan_are_counted() -> None:
    sim = Simulation(scripts=[Script((1, 2, 3), tokens=(5, 6), end="fault")])
    sim.submit([1, 2, 3])
    sim.submit([4, 5])
    sim.run()
    assert sim.loop.stats.nonfinite_rows == 1


def test_scores_on_the_wire() -> None:
    scores = toy_scores(prompt(9), 3, 1000)
    coalescer = Coalescer(
        Header(1, 1, Kind.PREFILL, 0, 1, micro_chunks=(4, 5)), dp_rank=0, notice=0, start_ns=0, idle_ns=0
    )
    coalescer.add(StepResult(prompts=(PromptChunk(2, 1, scores[:3]),)), 1)
    coalescer.add(StepResult(prompts=(PromptChunk(2, 4, scores[3:]), PromptChunk(3, 1, scores[:0]))), 2)
    outcome = read_outcome(outcome_message(coalescer.flush(0)))
    assert [(chunk.row, chunk.start, len(chunk.scores)) for chunk in outcome.prompts] == [
        (2, 1, 3),
        (2, 4, 5),
        (3, 1, 0),
    ]
    same(PromptScores.joined([chunk.scores for chunk in outcome.prompts[:2]]), scores)
    batch = EventBatch(1, NO_U64, NO_U32, NO_U32, NO_U32, np.zeros(0, np.uint8), prompts=((7, scores),))
    (message,) = write_events(batch, 1).prompts
    assert message.handle == 7
    same(rpc.read_scores(message.scores), scores)
    for width in (-1, 0, 4):
        assert rpc.read_sampling(rpc.write_sampling(Sampling(prompt_logprobs=width))).prompt_logprobs == width
