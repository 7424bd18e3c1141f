"""The scheduler's Prometheus page: read from the loop's counters when it is scraped, at no cost to a step."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lockstep_scheduler.eplb import Rebalancer
from lockstep_scheduler.loop import StepLoop
from lockstep_scheduler.stats import Stats


class LoopCollector(Collector):
    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        loop, stats = self._loop, self._loop.stats
        gauges = {
            "lockstep_running_choices": ("Choices that own a row", loop.running),
            "lockstep_waiting_choices": ("Choices that wait for a row", len(loop.waiting)),
            "lockstep_kv_usage_ratio": ("Owned KV blocks of the fullest rank", loop.kv_usage),
            "lockstep_group_ready": (
                "1 while the engine group is formed and takes requests",
                float(loop.group is not None and not loop.draining),
            ),
            "lockstep_step_seconds": ("Mean duration of a decode step", loop.pace.step),
            "lockstep_lead_steps": (
                "Steps before a window's end at which the next plan is composed",
                loop.pace.lead_steps,
            ),
            "lockstep_outcome_silence_seconds": ("Time since an outcome was booked while plans run", loop.silence),
        }
        for name, (help, value) in gauges.items():
            yield GaugeMetricFamily(name, help, value=value)
        counters = {
            "lockstep_generation_tokens": ("Tokens generated", stats.generation_tokens),
            "lockstep_prompt_tokens": ("Prompt tokens of admitted requests", stats.prompt_tokens),
            "lockstep_prompt_tokens_cached": ("Those found in the prefix cache", stats.cached_tokens),
            "lockstep_preemptions": ("Choices removed to make room", stats.preemptions),
            "lockstep_recomputed_tokens": (
                "Tokens computed again for choices that came back to a rank",
                stats.recomputed_tokens,
            ),
            "lockstep_overrun_row_steps": ("Row-steps run for rows that had ended", stats.overrun_row_steps),
            "lockstep_placeholder_steps": ("Decode steps of ranks without a row", stats.placeholder_steps),
            "lockstep_nonfinite_rows": ("Choices that ended with NaN or infinite logits", stats.nonfinite_rows),
            "lockstep_requests": ("Requests queued", stats.requests),
            "lockstep_requests_refused": ("Requests refused because the queue was full", stats.refused),
            "lockstep_device_idle_seconds": ("Time that workers waited for a plan", stats.idle_seconds),
            "lockstep_plan_lead_seconds_sum": (
                "How long before the running plan's end the next one arrived",
                stats.lead_seconds,
            ),
            "lockstep_plan_lead_seconds_count": ("Plans whose lead was measured", stats.leads),
            "lockstep_vote_resyncs": ("Headers whose step was not the one counted here", stats.resyncs),
            "lockstep_plan_round_trip_seconds_sum": (
                "From the last rank's report to the arrival of the next plan, less what was held back on purpose",
                stats.round_trip_seconds,
            ),
            "lockstep_plan_round_trip_seconds_count": ("Plans whose round trip was measured", stats.round_trips),
            "lockstep_queue_seconds_sum": ("Time from submit to admission", stats.queue_seconds),
            "lockstep_queue_seconds_count": ("Requests admitted", stats.admitted),
        }
        for name, (help, value) in counters.items():
            if name.endswith(("_sum", "_count")):
                yield GaugeMetricFamily(name, help, value=value)
            else:
                yield CounterMetricFamily(name, help, value=value)
        yield _votes(stats)
        plans = CounterMetricFamily("lockstep_plans", "Plans sent", labels=["kind"])
        for kind, count in stats.plans.items():
            plans.add_metric([kind], count)
        yield plans
        yield CounterMetricFamily(
            "lockstep_dual_batch_plans", "Plans whose steps were computed as two halves", stats.dual_batch_plans
        )
        if loop.experts:
            yield from _experts(loop.experts)
        ends = CounterMetricFamily("lockstep_choices_ended", "Choices that ended", labels=["reason"])
        for reason, count in stats.ends.items():
            ends.add_metric([reason], count)
        yield ends


def _experts(experts: Rebalancer) -> Iterable[Metric]:
    ratio = GaugeMetricFamily(
        "lockstep_moe_load_balance_ratio",
        "Expert load of the heaviest worker over the mean, as of the last report: mean of the layers, and the worst one",
        labels=["kind", "layers"],
    )
    for kind, balance in experts.balance.items():
        ratio.add_metric([kind, "mean"], balance.mean)
        ratio.add_metric([kind, "worst"], balance.worst)
    yield ratio
    counters = {
        "lockstep_expert_plans": ("Plans of where experts lie that moved something", experts.plans),
        "lockstep_expert_layers_moved": ("Layers whose experts moved in this epoch", experts.version),
        "lockstep_expert_slots_moved": ("Physical slots that got another expert in this epoch", experts.moved_slots),
    }
    for name, (help, value) in counters.items():
        yield CounterMetricFamily(name, help, value=value)


def _votes(stats: Stats) -> Metric:
    """How long this shard's ballots were under way; quantiles of the last ones."""
    votes = Metric("lockstep_vote_seconds", "From ballot to header, less what other ballots kept it back", "summary")
    last = sorted(stats.last_votes)
    for quantile in (0.5, 0.99):
        if last:
            value = last[min(len(last) - 1, int(quantile * len(last)))]
            votes.add_sample("lockstep_vote_seconds", {"quantile": str(quantile)}, value)
    votes.add_sample("lockstep_vote_seconds_sum", {}, stats.vote_seconds)
    votes.add_sample("lockstep_vote_seconds_count", {}, stats.votes)
    return votes


def serve(loop: StepLoop, host: str, port: int) -> None:
    registry = CollectorRegistry()
    registry.register(LoopCollector(loop))
    start_http_server(port, host, registry)
