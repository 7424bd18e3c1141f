"""What a simulated run came to: one row of figures. Times of latencies are those of `lockstep bench serve`, seen at the scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep_bench.sim.simulation import Simulation
from lockstep_common.steps import Kind

GPUS_PER_NODE = 8
_PERCENTILES = (50, 90, 99)


def row(simulation: Simulation) -> dict[str, Any]:
    """Throughput within the counted interval, latencies of the requests that began in it, votes, use of the ranks, host time."""
    case, seen, totals = simulation.case, simulation.seen, simulation.workers.totals
    seconds = max(simulation.end - case.warm_up, 1e-9)
    output = sum(tokens for at, tokens in seen.emitted if at > case.warm_up)
    mine = begun(simulation)
    prompts = int(seen.prompt[mine].sum())
    nodes = case.costs.layout.cp * case.engine.dp / GPUS_PER_NODE
    found: dict[str, Any] = {
        "ranks": case.engine.dp,
        "requests": len(simulation.asked),
        "ended": int((seen.ends == 1).sum()),
        "refused": seen.refused,
        "failed": seen.errors,
        "seconds": seconds,
        "in_tok_s": prompts / seconds,
        "out_tok_s": output / seconds,
        "in_tok_s_node": prompts / seconds / nodes,
        "out_tok_s_node": output / seconds / nodes,
    }
    found |= _latencies(simulation, mine)
    found |= _votes(simulation)
    usage = np.array([line[1:] for line in seen.usage if line[0] >= case.warm_up] or [(np.nan,) * 3])
    decode, prefill = totals.steps[Kind.DECODE], totals.steps[Kind.PREFILL]
    stats, before = simulation.loop.stats, simulation.before
    found |= {
        "placeholder_steps_share": totals.empty_rank_steps / max(1, decode * case.engine.dp),
        "placeholder_passes_share": totals.empty_rank_passes / max(1, prefill * case.engine.dp),
        "decode_step_ms": totals.seconds[Kind.DECODE] / max(1, decode) * 1e3,
        "prefill_pass_ms": totals.seconds[Kind.PREFILL] / max(1, prefill) * 1e3,
        "busy_share": sum(totals.seconds.values()) / seconds,
        "rows_mean": float(usage[:, 2].mean()),
        "kv_usage_mean": float(usage[:, 0].mean()),
        "kv_usage_max": float(usage[:, 1].max()),
        "preemptions": stats.preemptions - before.preemptions,
        "overrun_row_steps": stats.overrun_row_steps - before.overrun_row_steps,
        "cached_share": (stats.cached_tokens - before.cached_tokens)
        / max(1, stats.prompt_tokens - before.prompt_tokens),
        "computed_prompt_tok_s_node": totals.prefilled / seconds / nodes,
    }
    return found | _host(simulation)


def begun(simulation: Simulation) -> npt.NDArray[np.bool_]:
    """The requests whose first token came in the counted interval."""
    first = simulation.seen.first
    mine: npt.NDArray[np.bool_] = (first > simulation.case.warm_up) & ~np.isnan(first)
    return mine


def terms(simulation: Simulation, kind: Kind) -> dict[str, float]:
    """Milliseconds of a mean step of a kind, by what takes them."""
    totals = simulation.workers.totals
    steps = max(1, totals.steps[kind])
    return {name: value / steps * 1e3 for name, value in totals.terms[kind].items()}


def latencies(simulation: Simulation) -> dict[str, list[float]]:
    """Seconds by name, over the requests that began in the counted interval, as `plots.curves` takes them."""
    seen, mine = simulation.seen, begun(simulation)
    ended = mine & (seen.ends == 1)
    several = ended & (seen.got > 1)
    gaps = np.concatenate(seen.gaps) if seen.gaps else np.zeros(0)
    return {
        "ttft": (seen.first - seen.submitted)[mine].tolist(),
        "tpot": ((seen.last - seen.first)[several] / (seen.got[several] - 1)).tolist(),
        "itl": gaps.tolist(),
        "e2el": (seen.last - seen.submitted)[ended].tolist(),
    }


def _latencies(simulation: Simulation, mine: npt.NDArray[np.bool_]) -> dict[str, float]:
    seen = simulation.seen
    series: dict[str, Any] = dict(latencies(simulation))
    series["queue"] = (seen.admitted - seen.submitted)[mine].tolist()
    del series["e2el"]
    return {
        f"{name}_p{q}_ms": float(np.percentile(values, q)) * 1e3 if len(values) else float("nan")
        for name, values in series.items()
        for q in _PERCENTILES
    }


def _votes(simulation: Simulation) -> dict[str, Any]:
    votes = simulation.votes
    return {
        "prefill_any": votes.prefill_any,
        "prefill_all": votes.prefill_all,
        "prefill_idle": votes.prefill_idle,
        "prefill_with_placeholders": votes.with_placeholders,
        "decode_plans": votes.decode,
        "decode_at_point": votes.decode_at_point,
        "window_mean": votes.window_steps / max(1, votes.decode),
        "rules_a": simulation.rules.a,
        "rules_b": simulation.rules.b,
    }


def _host(simulation: Simulation) -> dict[str, float]:
    host, dp = simulation.loop.host, simulation.case.engine.dp
    total = host.compose + host.book
    return {
        "host_compose_us_body": host.compose / max(1, host.plans * dp) * 1e6,
        "host_book_us_outcome": host.book / max(1, host.outcomes) * 1e6,
        "host_us_plan": total / max(1, host.plans) * 1e6,
        "host_us_token": total / max(1, host.tokens) * 1e6,
    }
