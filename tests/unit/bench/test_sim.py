"""Simulated runs: every request ends once with its tokens, the same seed gives the same run, a small case is right by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_bench import shapes
from lockstep_bench.sim import __main__ as sim_main
from lockstep_bench.sim import figures, scale, traces
from lockstep_bench.sim import simulation as simulation_module
from lockstep_bench.sim.__main__ import main
from lockstep_bench.sim.costs import CostModel, Layout, Rates, instant
from lockstep_bench.sim.shape import shape
from lockstep_bench.sim.simulation import Case, Engine, Host, Simulation, simulate
from lockstep_bench.sim.simulation import settings as loop_settings
from lockstep_bench.sim.traces import Asked, Drawn, Lengths, draw
from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind
from lockstep_scheduler import plan

STEP, PASS = 0.010, 0.050


def fixed(dp: int = 1, step: float = STEP, prefill: float = PASS) -> CostModel:
    """Steps and passes of a fixed length."""
    return CostModel(shape(shapes.config("smollm2-135m")), _rates(step, prefill), Layout(dp=dp))


def _rates(step: float, prefill: float) -> Rates:
    rates = instant()
    return Rates(**{name: getattr(rates, name) for name in rates.__slots__} | {"step": step, "prefill_step": prefill})


def case(dp: int = 1, engine: dict[str, object] | None = None, options: dict[str, object] | None = None, **more: object) -> Case:  # fmt: skip
    sizes = {"max_rows": 8, "kv_tokens": 4096, "block_size": 16, "max_model_len": 512} | (engine or {})
    more = {"host": Host(0.0, 0.0, 0.0), "rtt_s": 0.0} | more
    return Case(Engine(dp=dp, **sizes), loop_settings({"a": 4, "b": 8, "max_window": 8} | (options or {})), fixed(dp), **more)  # type: ignore[arg-type]  # fmt: skip


def check_conserved(simulation: Simulation) -> None:
    """Each request ended once with as many tokens as it generates; nothing is left at the scheduler or the workers."""
    seen = simulation.seen
    assert (seen.ends == 1).all() and seen.errors == 0 and seen.refused == 0
    assert (seen.got == seen.expected).all()
    assert (seen.submitted <= seen.admitted).all() and (seen.admitted < seen.first).all()
    assert simulation.loop.stats.generation_tokens == seen.expected.sum()
    plan.check(simulation.loop.ranks, simulation.loop.slots, simulation.loop.limits)
    assert all(rank.pool.owned == 0 and rank.rows_in_use == 0 for rank in simulation.loop.ranks)


def test_one_request_by_hand() -> None:
    """A pass, then nine tokens in windows of at most 4 steps, no messages' time."""
    simulation = simulate(case(), [Asked(0.5, 30, 10)])
    check_conserved(simulation)
    assert simulation.seen.first[0] == pytest.approx(0.5 + PASS, abs=1e-6)
    assert simulation.seen.last[0] == pytest.approx(0.5 + PASS + 9 * STEP, abs=1e-6)
    row = figures.row(simulation)
    assert row["ttft_p50_ms"] == pytest.approx(50, abs=0.01) and row["tpot_p50_ms"] == pytest.approx(10, abs=0.01)
    assert (row["prefill_idle"], row["decode_plans"], row["placeholder_steps_share"]) == (0, 3, 0)
    assert row["prefill_any"] + row["prefill_all"] == 1
    assert simulation.workers.totals.steps == {Kind.PREFILL: 1, Kind.DECODE: 9}


def test_messages_and_the_host_take_time() -> None:
    """A first token waits for a round trip, the composing of its plan and the booking of its outcome."""
    slow = case(rtt_s=0.004, host=Host(submit_us=1000.0, outcome_us=2000.0, body_us=3000.0))
    simulation = simulate(slow, [Asked(0.0, 30, 1)])
    expected = 0.001 + 0.003 + 0.002 + PASS + 0.002 + 0.002
    assert simulation.seen.first[0] == pytest.approx(expected, abs=1e-6)


def test_late_commit_keeps_the_device_busy() -> None:
    """With a round trip of 4 ms and steps of 10 the next plan is composed in the last step, and is there when that ends; one
    that is composed when the plan before has ended would cost 3 steps of idle device in 20."""
    simulation = simulate(case(options={"max_window": 4}, rtt_s=0.004), [Asked(0.0, 30, 200)])
    check_conserved(simulation)
    busy = sum(simulation.workers.totals.seconds.values())
    assert busy == pytest.approx(PASS + 199 * STEP)
    assert simulation.end < busy + 0.03
    assert simulation.loop.stats.leads > 0 and simulation.loop.pace.turnaround < 0.010


def test_a_lone_rank_holds_all_others_in_its_step() -> None:
    """Two ranks, one request: the other one takes every step as a placeholder."""
    simulation = simulate(case(2), [Asked(0.0, 30, 10)])
    row = figures.row(simulation)
    assert row["placeholder_steps_share"] == pytest.approx(0.5) and row["placeholder_passes_share"] == pytest.approx(
        0.5
    )
    assert row["prefill_with_placeholders"] == 1


def test_an_answer_ends_by_itself_or_at_its_limit() -> None:
    asked = [Asked(0.0, 30, 10, max_tokens=50), Asked(0.0, 30, 10, max_tokens=5)]
    simulation = simulate(case(), asked)
    check_conserved(simulation)
    assert simulation.seen.got.tolist() == [10, 5]
    assert simulation.loop.stats.ends["stop"] == 1 and simulation.loop.stats.ends["length"] == 1


requests = st.lists(
    st.builds(
        Asked,
        arrival=st.floats(0, 2),
        prompt=st.integers(40, 200),
        output=st.integers(1, 60),
        prefix=st.integers(0, 1),
        prefix_tokens=st.integers(0, 40),
        max_tokens=st.sampled_from([0, 20, 100]),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(requests, st.sampled_from([1, 2, 3]), st.floats(0, 0.01), st.floats(0, 0.002), st.integers(0, 3))
def test_every_request_ends_once_with_its_tokens(
    asked: list[Asked], dp: int, rtt: float, jitter: float, seed: int
) -> None:
    """With messages that come late and out of step, few rows, and a KV cache that is too small for all of them."""
    asked = sorted(asked, key=lambda a: a.arrival)
    tight = {"max_rows": 4, "kv_tokens": 480}
    simulation = simulate(case(dp, tight, {"max_batched_tokens": 64}, rtt_s=rtt, jitter_s=jitter, seed=seed), asked)
    check_conserved(simulation)


def test_preemption_is_seen_and_nothing_is_lost() -> None:
    asked = [Asked(0.0, 100, 150) for _ in range(6)]
    simulation = simulate(case(engine={"kv_tokens": 640}), asked)
    check_conserved(simulation)
    assert figures.row(simulation)["preemptions"] > 0


def test_the_same_seed_gives_the_same_run() -> None:
    drawn = Drawn(60, Lengths("lognormal", 60, 0.6), Lengths("uniform", 20, 0.5), rate=40, prefix_share=0.5, seed=3)
    runs = [figures.row(simulate(case(2, rtt_s=0.001, jitter_s=0.0005, seed=s), draw(drawn))) for s in (1, 1, 2)]
    first, again, other = ({k: v for k, v in run.items() if not k.startswith("host_")} for run in runs)
    assert first == pytest.approx(again, nan_ok=True)
    assert first["ttft_p99_ms"] != other["ttft_p99_ms"]


def test_shared_beginnings_are_found() -> None:
    drawn = Drawn(40, Lengths("fixed", 64), Lengths("fixed", 4), rate=20, prefix_share=0.5)
    assert figures.row(simulate(case(), draw(drawn)))["cached_share"] == pytest.approx(0.5 * 39 / 40)


def test_many_ranks() -> None:
    """One request for each eighth rank; all take every step together."""
    engine = {"max_rows": 2, "kv_tokens": 512}
    simulation = simulate(case(128, engine), [Asked(0.0, 30, 4) for _ in range(16)])
    check_conserved(simulation)
    assert figures.row(simulation)["placeholder_steps_share"] == pytest.approx(7 / 8)


def test_a_closed_loop_keeps_so_many_requests() -> None:
    drawn = Drawn(80, Lengths("fixed", 32), Lengths("uniform", 30, 0.5), staggered=6)
    asked = draw(drawn)
    closed = case(engine={"max_rows": 16}, concurrency=6, seconds=3.0, warm_up=1.0)
    simulation = simulate(replace(closed, costs=fixed(prefill=0.001)), asked)
    assert simulation.end == 3.0
    submitted, ended = (~np.isnan(simulation.seen.submitted)).sum(), (simulation.seen.ends == 1).sum()
    assert submitted - ended == 6
    row = figures.row(simulation)
    assert row["out_tok_s"] == pytest.approx(6 / STEP, rel=0.2) and row["rows_mean"] <= 7


def test_a_full_queue_refuses() -> None:
    simulation = simulate(case(options={"max_waiting": 3}), [Asked(0.0, 30, 5) for _ in range(8)])
    assert simulation.seen.refused == 5 and (simulation.seen.ends == 1).sum() == 3


def test_the_loops_own_time_is_measured() -> None:
    found = scale.measured(2, 4, 0.5, 8, 64, 32)
    assert found["plans"] > 0 and found["host_us_token"] > 0 and found["rows_in_use"] > 3
    assert found["tokens"] == pytest.approx(2 * 4 * 0.5 / scale.STEP_S, rel=0.2)


# -- traces ------------------------------------------------------------------------------------------------------------


def test_traces_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    asked = [Asked(0.0, 10, 3), Asked(0.5, 20, 4, prefix=0, prefix_tokens=8, max_tokens=9)]
    traces.write(path, asked)
    assert traces.read(path) == asked


@pytest.mark.parametrize(
    "line",
    ["{", '{"arrival": 0}', '{"arrival": 0, "prompt_tokens": 0, "output_tokens": 1}', "[]", '{"arrival": -1, "prompt_tokens": 1, "output_tokens": 1}'],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt_tokens": 4, "output_tokens": 4}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        traces.read(path)


@given(st.sampled_from(["fixed", "uniform", "lognormal"]), st.integers(0, 5))
def test_drawn_lengths_have_their_mean(kind: str, seed: int) -> None:
    values = Lengths(kind, 400, 0.5).draw(np.random.default_rng(seed), 4000)
    assert values.min() >= 1 and values.mean() == pytest.approx(400, rel=0.05)


def test_requests_in_mid_answer_are_the_longer_ones() -> None:
    asked = draw(Drawn(4000, Lengths("fixed", 100), Lengths("lognormal", 200, 0.8), staggered=4000, seed=1))
    early, fresh = asked[:4000], asked[4000:]
    whole = np.mean([a.prompt - 100 + a.output for a in early])
    assert whole == pytest.approx(np.mean([a.output**2 for a in fresh]) / np.mean([a.output for a in fresh]), rel=0.1)
    assert all(a.output >= 1 and a.arrival == 0 for a in early)


@pytest.mark.parametrize("text", ["", "normal:3:1", "uniform:0", "lognormal:5:x", "-4"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        Lengths.parse(text)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_sweeps_and_keeps_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sim.json"
    flags = [
        "--model",
        "smollm2-135m",
        "--dp",
        "2",
        "--requests",
        "20",
        "--rate",
        "50",
        "--output",
        "16",
        "--sweep",
        "window=2,8",
        "--sweep",
        "a=2,4",
        "--json",
    ]
    assert main([*flags, str(path)]) == 0
    doc = json.loads(path.read_text())
    assert doc["benchmark"] == "sim" and [(r["window"], r["a"]) for r in doc["rows"]] == [
        (2, 2),
        (2, 4),
        (8, 2),
        (8, 4),
    ]
    assert all(row["ended"] == 20 for row in doc["rows"])


def test_the_command_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "latencies.svg"
    assert main(["--model", "smollm2-135m", "--requests", "5", "--plot", str(path)]) == 0
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    "flags",
    [["--costs", "nothing"], ["--sweep", "speed=1"], ["--sweep", "a="], ["--trace", "/nowhere"], ["--costs", "h200"]],
)
def test_the_command_says_what_is_wrong(flags: list[str]) -> None:
    assert main(["run", "--requests", "2", *flags]) == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--dp", "-1"], "--dp"),
        (["--shard-ranks", "0"], "--shard-ranks"),
        (["--max-window", "0"], "--max-window"),
        (["--sweep", "window=0"], "--max-window"),
        (["--rtt-ms", "-3"], "--rtt-ms"),
        (["--imbalance", "0.5"], "--imbalance"),
        (["--prefix-share", "2"], "--prefix-share"),
        (["--prefill-attempt-interval", "3", "--prefill-any-attempt-interval", "4"], "--prefill-any-attempt-interval"),
        (["--seconds", "1", "--warm-up", "2"], "--warm-up"),
        (["--warm-up", "100"], "no request has begun"),
    ],
)
def test_a_flag_that_cannot_be_is_named(flags: list[str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sim_main.errors, "print", lambda line, **_: said.append(line))
    assert main(["--model", "smollm2-135m", "--requests", "2", *flags]) == 1
    assert named in said[-1]


def test_a_group_of_nobody_is_refused() -> None:
    assert main(["scale", "--groups", "0x2"]) == 1


def test_a_long_run_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_module, "PROGRESS_S", 0.0)
    lines: list[str] = []
    simulate(case(), [Asked(0.5, 30, 10), Asked(1.5, 30, 10)], progress=lines.append)
    assert any("1 of 2 requests have ended" in line for line in lines)
