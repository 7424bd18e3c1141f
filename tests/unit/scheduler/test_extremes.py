"""Limits at their ends: one row, one token a pass, a watermark of nothing, a pool that one prompt fills. Everything ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.errors import ContextLengthExceeded, InvalidRequest
from tests.unit.scheduler.simulation import Simulation


@given(
    seed=st.integers(0, 10_000),
    dp=st.integers(1, 3),
    shards=st.integers(1, 2),
    num_blocks=st.integers(3, 40),
    max_rows=st.integers(1, 4),
    tokens=st.sampled_from([1, 2, 7, 32, 1 << 20]),
    watermark=st.sampled_from([1e-6, 0.3, 0.95, 1.0]),
    window=st.sampled_from([1, 2, 16]),
    caching=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_nothing_stands_still(
    seed: int,
    dp: int,
    shards: int,
    num_blocks: int,
    max_rows: int,
    tokens: int,
    watermark: float,
    window: int,
    caching: bool,
) -> None:
    """What is taken ends with its tokens, and what cannot be taken is refused at once. Prompts are often as long as the pool."""
    choose = random.Random(seed)
    shards = min(shards, dp)
    sim = Simulation(
        dp=dp,
        shards=shards,
        num_blocks=num_blocks,
        max_rows=max_rows,
        max_batched_tokens=tokens,
        watermark=watermark,
        max_window=window,
        prefix_caching=caching,
        generated_reusable=bool(seed % 2),
        seed=seed,
    )
    pool = 4 * (num_blocks - 1)
    kept, refused = [], 0
    for _ in range(choose.randint(1, 10)):
        for _ in range(choose.randint(0, 10)):
            sim.turn()
        length = choose.choice([1, 4, pool // 2, pool - 5, pool - 1, pool, choose.randint(1, pool)])
        n = choose.choice([1, 1, 2, max_rows, max_rows + 1])
        try:
            kept.append(
                sim.submit(
                    [choose.randrange(3) for _ in range(max(1, length))],
                    n=n,
                    max_tokens=choose.choice([1, 5, pool]),
                    priority=choose.choice([0, 0, 1]),
                    shard=choose.randrange(shards),
                )
            )
        except (InvalidRequest, ContextLengthExceeded):
            refused += 1
            assert n > max_rows or n > 1 or length >= min(pool, 128), "refused, though it could have run"
    sim.run()
    sim.check_answers(kept)


@pytest.mark.parametrize("dp", [1, 3])
def test_all_rows_are_preempted_and_come_back(dp: int) -> None:
    """Each rank's rows outgrow its pool together, again and again, until one is left; then the others have their turn."""
    sim = Simulation(dp=dp, num_blocks=9, max_rows=8, max_model_len=128, watermark=1.0)
    requests = [sim.submit([i, 1, 2], max_tokens=28, advance=False) for i in range(8 * dp)]
    sim.loop.advance()
    sim.run()
    sim.check_answers(requests)
    assert sim.loop.stats.preemptions > 0


def test_more_choices_than_rows_are_refused_and_as_many_as_rows_run() -> None:
    sim = Simulation(dp=2, max_rows=3, num_blocks=60)
    other = sim.submit([9, 9], max_tokens=30)
    with pytest.raises(InvalidRequest, match="n must be between 1 and 3"):
        sim.submit([1, 2, 3], n=4)
    full = [sim.submit([i, 2, 3], n=3, max_tokens=6) for i in range(4)]
    sim.run()
    sim.check_answers([other, *full])


def test_choices_that_need_nearly_all_blocks_wait_for_an_empty_rank() -> None:
    """Eight blocks: the prompt and its first window take six, each further choice one more."""
    sim = Simulation(num_blocks=9, max_rows=3, max_window=2, max_model_len=128)
    first = sim.submit([1, 2, 3], max_tokens=12)
    wide = sim.submit(list(range(20)), n=3, max_tokens=3)
    sim.run()
    sim.check_answers([first, wide])
