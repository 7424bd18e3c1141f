import gc
from collections.abc import Iterator

import pytest

from lockstep_common import collector


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_requests_in_flight_are_not_looked_at_for_every_few_hundred_new_objects() -> None:
    collector.settle()
    ran = sum(generation["collections"] for generation in gc.get_stats())
    in_flight = [[number] for number in range(20_000)]
    assert sum(generation["collections"] for generation in gc.get_stats()) == ran
    assert len(in_flight) == 20_000


def test_what_refers_to_itself_is_still_collected() -> None:
    collector.settle()
    before = gc.get_freeze_count()
    assert before > 0
    for _ in range(60_000):
        cycle: list[object] = []
        cycle.append(cycle)
    assert gc.get_stats()[0]["collected"] >= 1 and gc.get_count()[0] < 60_000
