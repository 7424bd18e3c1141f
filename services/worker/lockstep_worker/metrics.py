"""Prometheus metrics of a worker, read from the driver when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lockstep_worker.driver import Driver, State


class DriverCollector(Collector):
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def collect(self) -> Iterator[Metric]:
        driver = self._driver
        yield CounterMetricFamily("lockstep_worker_steps", "steps run", driver.steps)
        yield CounterMetricFamily("lockstep_worker_tokens", "tokens sampled", driver.tokens)
        yield CounterMetricFamily(
            "lockstep_worker_nonfinite_rows", "rows that ended with NaN or infinite logits", driver.nonfinite_rows
        )
        yield CounterMetricFamily("lockstep_worker_plans", "plans finished in this epoch", driver.plans.finished)
        yield GaugeMetricFamily("lockstep_worker_epoch", "epoch of the group", driver.plans.epoch)
        yield GaugeMetricFamily("lockstep_worker_ready", "1 if warmed up in a group", driver.state == State.READY)
        yield GaugeMetricFamily("lockstep_worker_loaded_ratio", "share of the weights loaded", driver.loaded)


def expose(driver: Driver, host: str, port: int) -> None:
    """Serves /metrics on a thread of its own."""
    registry = CollectorRegistry()
    registry.register(DriverCollector(driver))
    start_http_server(port, addr=host, registry=registry)
