"""`lockstep bench dbo`: what can be hidden, and the link over which it is measured."""

from __future__ import annotations

import time

import pytest
import torch

from lockstep_bench import overlap
from lockstep_worker.collectives import Alone


def test_what_can_be_hidden_grows_with_the_layers() -> None:
    assert overlap.hideable(3, 4) == pytest.approx(7 / 12) and overlap.hideable(3, 1000) == pytest.approx(
        2 / 3, abs=1e-3
    )
    assert overlap.hideable(2, 4) == pytest.approx(7 / 8) and overlap.hideable(2, 1000) > 0.999


def test_goals_compare_with_what_can_be_hidden() -> None:
    rows = [{"way": "a", "hidden": 0.5, "can be hidden": 0.6}, {"way": "b", "hidden": 0.4, "can be hidden": 0.6}]
    assert [goal.met for goal in overlap.goals(rows)] == [True, False]


def test_what_is_begun_meanwhile_travels_beside_it() -> None:
    link = overlap._Link(Alone())
    link.seconds = 0.05
    started = time.monotonic()
    first, second = link.swap_later("a", torch.ones(1)), link.all_gather_later("b", torch.ones(1))
    begun = time.monotonic() - started
    assert float(first()) == 1 and float(second()) == 1
    assert begun < 0.05 <= time.monotonic() - started < 0.095
