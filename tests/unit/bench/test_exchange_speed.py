"""The traffic of `lockstep bench exchange --tokens`, and its goals."""

from __future__ import annotations

import pytest

from lockstep_bench import exchange_speed
from lockstep_bench.exchange_speed import Settings, _columns, _slowest, _Times, spread


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_token_goes_to_every_rank_by_different_experts(ranks: int) -> None:
    ids = spread(33, 128, 8)
    assert all(len(set(row)) == 8 and {e // (128 // ranks) for e in row} == set(range(ranks)) for row in ids.tolist())
    assert ids.unique().numel() == 128


def test_figures_lie_beside_those_of_the_same_rows() -> None:
    gpu = Settings(device="cuda")
    row = _columns(gpu, 256, _Times(20.0, 30.0), 25.0)
    assert row["MB"] == 256 * 7168 * 2 / 1e6 and row["recorded us"] == 28.3
    assert row["dispatch GB/s"] == pytest.approx(183.5, abs=0.1)
    assert _columns(Settings(device="cuda", hidden=2048), 256, _Times(1.0, 1.0), 1.0)["recorded us"] is None
    assert _columns(Settings(), 256, _Times(None, None), 1.0)["recorded us"] is None
    named = {"backend": "symmetric", "way": "captured", "tokens": 256}
    verdicts = [goal.met for goal in exchange_speed.goals([named | row, named | {"way": "counts"} | row])]
    assert verdicts == [True, False]


def test_the_slowest_rank_counts() -> None:
    rows = [{"rank": rank, "dispatch us": us, "combine us": 1.0} for rank, us in enumerate((1.0, 3.0, 2.0))]
    assert _slowest(rows) == {"dispatch us": 3.0, "combine us": 1.0}
    assert _slowest([{"rank": 0, "dispatch us": None, "combine us": None}]) == {"dispatch us": None, "combine us": None}
