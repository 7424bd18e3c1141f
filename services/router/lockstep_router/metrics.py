"""What the router counts, under Prometheus names `lockstep_*`. A fault in counting is itself counted, never raised."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, Final, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lockstep_router.fleet import Fleet

log = logging.getLogger(__name__)
P = ParamSpec("P")

_LATENCIES: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAPS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_LENGTHS: Final = tuple(2**i for i in range(18))

# Of each group's snapshot: (name, field, help); the engine groups' own pages have more.
_GROUP_GAUGES: Final = (
    ("lockstep_num_requests_running", "running", "choices that own a row"),
    ("lockstep_num_requests_waiting", "waiting", "choices that wait for a row"),
    (
        "lockstep_waiting_uncached_tokens",
        "waiting_uncached_tokens",
        "prompt tokens that wait and that no cached block covers",
    ),
    ("lockstep_kv_cache_usage_ratio", "kv_usage", "owned KV blocks / all KV blocks, fullest rank"),
    ("lockstep_group_ready", "ready", "1 if the group takes requests"),
    ("lockstep_group_durable", "durable", "1 if the group's ledger is reachable"),
    ("lockstep_group_silence_seconds", "silence_ms", "time since the group last reported a step; 0 when idle"),
)
_GROUP_COUNTERS: Final = (
    ("lockstep_group_steps", "step", "decode steps planned in this epoch"),
    ("lockstep_group_generation_tokens", "generation_tokens", "tokens generated"),
    ("lockstep_group_prompt_tokens", "prompt_tokens", "prompt tokens admitted (prefix cache queries)"),
    ("lockstep_group_prefix_cache_hits", "cached_tokens", "prompt tokens found in the prefix cache"),
    ("lockstep_group_preemptions", "preemptions", "choices that lost their row to others"),
    ("lockstep_group_overrun_row_steps", "overrun_row_steps", "row-steps run for rows that had ended"),
)


def _guarded(count: Callable[Concatenate[Metrics, P], None]) -> Callable[Concatenate[Metrics, P], None]:
    def guarded(self: Metrics, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            count(self, *args, **kwargs)
        except Exception:
            self.faults.inc()
            log.debug("a metric could not be counted", exc_info=True)

    return guarded


class Metrics:
    """One registry per router. Labels take values from closed sets only, never from requests."""

    def __init__(self, fleet: Fleet) -> None:
        registry = self.registry = CollectorRegistry()
        self.faults = Counter("lockstep_metric_faults", "metrics that could not be counted", registry=registry)
        self._http = Counter("lockstep_http_requests", "HTTP answers", ["route", "code"], registry=registry)
        self._requests = Counter(
            "lockstep_requests",
            "requests by outcome: completed, cancelled, refused, failed",
            ["outcome"],
            registry=registry,
        )
        self._choices = Counter(
            "lockstep_choices", "choices that ended by themselves", ["finished_reason"], registry=registry
        )
        self.in_flight = Gauge(
            "lockstep_requests_in_flight", "requests between acceptance and their end", registry=registry
        )
        self._prompt_tokens = Counter("lockstep_prompt_tokens", "prompt tokens of requests", registry=registry)
        self._generation_tokens = Counter("lockstep_generation_tokens", "tokens delivered", registry=registry)
        self._cached_tokens = Counter(
            "lockstep_prompt_tokens_cached", "prompt tokens found in the cache", registry=registry
        )
        self.mismatches = Counter(
            "lockstep_resume_mismatches", "tokens that a resumed stream repeated differently", registry=registry
        )
        self.resubmitted = Counter(
            "lockstep_requests_resubmitted", "prompts placed again on another group", registry=registry
        )
        self._ttft = Histogram(
            "lockstep_time_to_first_token_seconds", "arrival to first token", buckets=_LATENCIES, registry=registry
        )
        self._gap = Histogram(
            "lockstep_inter_token_latency_seconds",
            "time between events of a choice / tokens of the event",
            buckets=_GAPS,
            registry=registry,
        )
        self._per_token = Histogram(
            "lockstep_request_time_per_output_token_seconds",
            "mean over a request, after its first token",
            buckets=_GAPS,
            registry=registry,
        )
        self._e2e = Histogram(
            "lockstep_e2e_request_latency_seconds", "arrival to end", buckets=_LATENCIES, registry=registry
        )
        self._prompt_length = Histogram(
            "lockstep_request_prompt_tokens", "prompt tokens of a request", buckets=_LENGTHS, registry=registry
        )
        self._output_length = Histogram(
            "lockstep_request_generation_tokens",
            "tokens of a request's choices together",
            buckets=_LENGTHS,
            registry=registry,
        )
        self._n = Histogram(
            "lockstep_request_params_n", "choices asked for", buckets=(1, 2, 5, 10, 20, 50), registry=registry
        )
        self._max_tokens = Histogram(
            "lockstep_request_params_max_tokens", "max_tokens in force", buckets=_LENGTHS, registry=registry
        )
        registry.register(_Groups(fleet))

    def page(self) -> bytes:
        return generate_latest(self.registry)

    @_guarded
    def http(self, route: str, code: int) -> None:
        self._http.labels(route, str(code)).inc()

    @_guarded
    def opened(self, prompt_tokens: int, choices: int, max_tokens: int) -> None:
        self.in_flight.inc()
        self._prompt_length.observe(prompt_tokens)
        self._n.observe(choices)
        self._max_tokens.observe(max_tokens)

    @_guarded
    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    @_guarded
    def gap(self, seconds: float, tokens: int) -> None:
        self._gap.observe(seconds / tokens)

    @_guarded
    def finished(self, reason: str) -> None:
        self._choices.labels(reason).inc()

    @_guarded
    def closed(
        self,
        outcome: str,
        *,
        seconds: float,
        decode_seconds: float,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int,
    ) -> None:
        self.in_flight.dec()
        self._requests.labels(outcome).inc()
        self._e2e.observe(seconds)
        self._generation_tokens.inc(output_tokens)
        if output_tokens:
            self._prompt_tokens.inc(prompt_tokens)
            self._cached_tokens.inc(cached_tokens)
            self._output_length.observe(output_tokens)
        if output_tokens > 1:
            self._per_token.observe(decode_seconds / (output_tokens - 1))


class _Groups(Collector):
    """The groups' last snapshots, read when the page is asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        for name, field, help in _GROUP_COUNTERS:
            counter = CounterMetricFamily(name, help, labels=["group"])
            for link in self._fleet.links:
                counter.add_metric([link.address], float(getattr(link.load, field)))
            yield counter

    def _gauges(self) -> Iterator[Metric]:
        for name, field, help in _GROUP_GAUGES:
            gauge = GaugeMetricFamily(name, help, labels=["group"])
            scale = 0.001 if field.endswith("_ms") else 1.0
            for link in self._fleet.links:
                value: Any = getattr(link.load, field) if field != "ready" else link.view().ready
                gauge.add_metric([link.address], float(value) * scale)
            yield gauge
        sent = GaugeMetricFamily("lockstep_group_in_flight", "this router's submissions at the group", labels=["group"])
        for link in self._fleet.links:
            sent.add_metric([link.address], float(link.in_flight))
        yield sent
