"""The numbers that a worker gives of itself: counted by the driver, on its metrics page and in its status."""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry

from lockstep_common.steps import Header, Kind
from lockstep_worker.driver import Driver
from lockstep_worker.metrics import DriverCollector
from lockstep_worker.protocol import Coalescer, PlanLog
from lockstep_worker.server import WorkerServer
from tests.unit.worker.toy import Choice, PlanDriver, ToyModel, hashed_logits, make_runner


def poisoned(history: tuple[int, ...]) -> np.ndarray:
    """Logits that are NaN after some tokens that follow a 13."""
    values = hashed_logits(history)
    if history[0] == 13 and len(history) > 3:
        values[7] = np.nan
    return values


async def test_rows_of_nan_are_counted() -> None:
    driver = Driver(make_runner(ToyModel(poisoned)), PlanLog())
    registry = CollectorRegistry()
    registry.register(DriverCollector(driver))
    server = WorkerServer(driver)

    class Counted(PlanDriver):
        def _book(self, results):  # type: ignore[no-untyped-def]
            found = list(results)
            if found:
                header = Header(0, 1, Kind.DECODE, 0, len(found))
                driver._open.append(Coalescer(header, dp_rank=0, notice=0, start_ns=0, idle_ns=0))
                driver._book(iter(found))
            super()._book(found)

    plans = Counted(make_runner(ToyModel(poisoned)), window=4)
    plans.add({0: Choice((1, 2), limit=12), 1: Choice((13, 4), limit=12), 2: Choice((13, 5), limit=12)})
    plans.finish()
    assert registry.get_sample_value("lockstep_worker_nonfinite_rows_total") == 2
    assert server._status().nonfinite_rows == 2
