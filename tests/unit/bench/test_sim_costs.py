"""The cost model: its laws, a case computed by hand, bytes and operations of known models, files that come with it."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_bench import shapes
from lockstep_bench.sim import costs, fit
from lockstep_bench.sim.costs import CostModel, Layout, Rates, Work, instant, other_ranks
from lockstep_bench.sim.shape import Shape, Widths, shape
from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind

UNIT = Shape(
    layers=2,
    moe_layers=1,
    dense_bytes=100,
    dense_flops=10,
    head_bytes=20,
    head_flops=4,
    kv_bytes=3,
    prefill_pair_flops=1,
    decode_pair_flops=2,
    expand_flops=0,
    activation_bytes=5,
    experts=4,
    chosen=2,
    expert_bytes=50,
    expert_flops=8,
    expert_activation_bytes=1,
    dispatch_bytes=1,
    combine_bytes=2,
)
ONES = Rates(*[1.0] * 8, link_bandwidth=1.0, link_latency=0.5, cp_bandwidth=1.0, cp_latency=0.25, layer=7.0, moe_layer=11.0, row=13.0)  # fmt: skip

lengths = st.lists(st.lists(st.integers(1, 500), max_size=4), min_size=4, max_size=4)


def decode(rows: list[list[int]], bucket: int = 0) -> Work:
    return Work.decode([sum(r) for r in rows], [len(r) for r in rows], bucket)


def test_a_step_by_hand() -> None:
    """Two ranks, rows of 10 and 20 tokens on one, of 5 on the other; all rates 1."""
    model = CostModel(UNIT, ONES, Layout(dp=2, copies=1.5, imbalance=1.25))
    cost = model.step(decode([[10, 20], [5]]))
    dense = [100 + 20, 100 + 20]  # bytes win over 2 x 10 + 2 x 4 operations
    attention = [max(30 * 3, 30 * 2), max(5 * 3, 5 * 2)]
    activations = [2 * 5 + 2 * 1 * 2 * 1, 1 * 5 + 1 * 1 * 2 * 1]
    rows = [2 * 13, 1 * 13]
    local = [sum(parts) for parts in zip(dense, attention, activations, rows, strict=True)]
    hit = 4 / 2 * (1 - (1 - 2 / 4) ** 3)
    experts = max(hit * 50, 1.25 * 3 * 2 / 2 * 8)
    exchange = max(2, 1.25 * 3 / 2) * 1.5 * 3 + 2 * 0.5
    base = 2 * 7 + 11
    assert cost.seconds == pytest.approx(base + max(local) + experts + exchange)
    assert cost.terms["skew"] == pytest.approx(max(local) - sum(local) / 2)
    assert cost.terms["attention"] == pytest.approx(sum(attention) / 2)
    assert cost.terms["exchange"] == pytest.approx(exchange)


def test_a_prompt_pass_by_hand() -> None:
    """A chunk of 3 behind 4 cached tokens attends to 5 + 6 + 7 keys; an empty rank pays the same."""
    work = Work.prefill([[4], []], [[3], []], [1, 0])
    assert work.pairs.tolist() == [18, 0] and work.context.tolist() == [4, 0] and work.tokens.tolist() == [3, 0]
    model = CostModel(replace(UNIT, expand_flops=6), ONES, Layout(dp=2))
    assert model.step(work).terms["attention"] == pytest.approx((max(4 * 3, 18) + 4 * 6) / 2)


@given(lengths, st.integers(0, 3), st.integers(1, 500))
def test_more_work_never_takes_less_time(rows: list[list[int]], rank: int, length: int) -> None:
    model = CostModel(UNIT, ONES, Layout(dp=4, copies=2, imbalance=1.2, overlap=0.5))
    before = model.step(decode(rows)).seconds
    rows[rank] = [*rows[rank], length]
    after = model.step(decode(rows)).seconds
    assert after >= before
    assert model.step(decode(rows, bucket=8)).seconds >= after


@given(lengths, st.sampled_from([f.name for f in fields(Rates)]))
def test_slower_rates_never_help(rows: list[list[int]], name: str) -> None:
    work = decode(rows)
    worse = getattr(ONES, name) * (0.5 if name.endswith(("flops", "bandwidth")) else 2.0)
    layout = Layout(dp=2, cp=2, overlap=0.7)
    work = replace(work, **{f: getattr(work, f)[:2] for f in ("tokens", "rows", "pairs", "context")})
    slow = CostModel(UNIT, replace(ONES, **{name: worse}), layout).step(work)
    assert slow.seconds >= CostModel(UNIT, ONES, layout).step(work).seconds - 1e-9


@given(lengths)
def test_terms_add_up_and_order_does_not_matter(rows: list[list[int]]) -> None:
    model = CostModel(UNIT, ONES, Layout(dp=4, overlap=0.3, micro_batches=2))
    cost = model.step(decode(rows))
    assert sum(cost.terms.values()) == pytest.approx(cost.seconds)
    assert all(value >= -1e-9 for name, value in cost.terms.items() if name != "hidden")
    assert model.step(decode(rows[::-1])).seconds == pytest.approx(cost.seconds)


def test_only_the_slowest_rank_counts() -> None:
    model = CostModel(replace(UNIT, experts=0, moe_layers=0), ONES, Layout(dp=3))
    alone = model.step(decode([[400], [], []])).seconds
    assert model.step(decode([[400], [399], [1]])).seconds == pytest.approx(alone)
    assert model.step(decode([[401], [], []])).seconds > alone


def test_overlap_hides_the_shorter_one() -> None:
    work = decode([[10], [10]])
    cost = {o: CostModel(UNIT, ONES, Layout(dp=2, overlap=o)).step(work) for o in (0.0, 1.0)}
    terms = cost[0.0].terms
    compute = sum(terms[n] for n in ("dense", "attention", "activations", "rows", "skew", "experts"))
    assert cost[0.0].seconds - cost[1.0].seconds == pytest.approx(min(compute, terms["exchange"]))


def test_context_parallel_ranks_share_attention() -> None:
    work = Work.prefill([[0]], [[1000]], [1])
    shape = replace(UNIT, experts=0, moe_layers=0)
    one, two = (CostModel(shape, ONES, Layout(cp=cp)).step(work).terms for cp in (1, 2))
    assert two["attention"] == pytest.approx(one["attention"] / 2)
    assert one["cp"] == 0 and two["cp"] == pytest.approx(1000 * 3 / 2 + 2 * 0.25)


def test_other_ranks() -> None:
    assert other_ranks(256, 8, 32) == pytest.approx(7.27 * 31 / 32, abs=0.01)
    assert other_ranks(256, 8, 8) == pytest.approx(5.30 * 7 / 8, abs=0.01)
    assert other_ranks(4, 4, 4) == pytest.approx(3)


def test_nothing_takes_no_time() -> None:
    assert CostModel(UNIT, instant(), Layout(dp=2)).step(decode([[10], []])).seconds == pytest.approx(0, abs=1e-20)


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_parameters_of_known_models() -> None:
    llama = shape(shapes.config("llama-3.1-8b"))
    assert (llama.dense_bytes + 2 * llama.head_bytes) / 2 == pytest.approx(8.03e9, rel=0.01)  # and the embeddings
    assert llama.kv_bytes == 32 * 2 * 8 * 128 * 2
    v3 = costs.load("h800-deepseek-v3-prefill-ep32").cost_model().shape
    total = v3.dense_bytes + v3.head_bytes + v3.moe_layers * v3.experts * v3.expert_bytes
    assert total == pytest.approx(671e9, rel=0.01)  # 8 bits a weight; head and embeddings in 16
    active = v3.dense_flops + v3.head_flops + v3.moe_layers * v3.chosen * v3.expert_flops
    assert active / 2 == pytest.approx(37e9, rel=0.03)
    assert v3.kv_bytes == 61 * 576 * 2


def test_a_config_that_lacks_something_is_named() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads"):
        shape({"hidden_size": 8, "num_hidden_layers": 1}, Widths())


# -- files and fits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", costs.names())
def test_files_that_come_with_the_package(name: str) -> None:
    machine = costs.load(name)
    model = machine.cost_model("" if machine.model else "qwen3-30b-a3b")
    step = model.step(Work.decode([64 * 4000] * model.layout.dp, [64] * model.layout.dp, 64))
    assert 0.001 < step.seconds < 0.2
    assert machine.sources


def test_a_file_that_is_no_cost_model(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"name": "x", "about": "", "rates": {"speed": 1}}))
    with pytest.raises(ConfigError, match="speed"):
        costs.load(str(path))
    with pytest.raises(ConfigError, match="h200"):
        costs.load("h2000")


def test_non_negative_least_squares() -> None:
    rng = np.random.default_rng(0)
    a = rng.random((12, 5))
    x = np.array([1.0, 0.0, 2.0, 0.0, 3.0])
    assert fit.non_negative(a, a @ x) == pytest.approx(x, abs=1e-8)
    found = fit.non_negative(a, rng.standard_normal(12))
    assert (found >= 0).all()


def test_a_fit_finds_the_rates_that_made_the_times() -> None:
    """Cells of a known machine: what it was made with is predicted again, cell by cell."""
    truth = fit._LEAST * 1.3 + fit._GUESS * np.array([0] * 6 + [2.0, 0.5, 3.0])
    steps = [
        ("llama-3.1-8b", Work.decode([200], [1])),
        ("llama-3.1-8b", Work.decode([64 * 1000], [64])),
        ("llama-3.1-8b", Work.prefill([[0]], [[8192]], [1])),
        ("llama-3.1-8b", Work.prefill([[8192]], [[4096]], [1])),
        ("qwen3-30b-a3b", Work.decode([200], [1])),
        ("qwen3-30b-a3b", Work.decode([256 * 600], [256])),
        ("qwen3-30b-a3b", Work.prefill([[0]], [[8192]], [1])),
        ("smollm2-135m", Work.decode([200], [1])),
        ("smollm2-135m", Work.decode([256 * 600], [256])),
        ("smollm2-135m", Work.prefill([[0] * 8], [[1024] * 8], [8])),
    ]
    cells = [fit.Cell(str(i), model, ((work, 10),), 1.0) for i, (model, work) in enumerate(steps)]
    times = fit.predict(cells, truth)
    cells = [replace(cell, seconds=seconds) for cell, seconds in zip(cells, times.tolist(), strict=True)]
    assert fit.predict(cells, fit.fit(cells)) == pytest.approx(times, rel=1e-3)


def test_neighbouring_decode_steps_are_one() -> None:
    works = [Work.decode([100 + i], [1], 1) for i in range(20)]
    found = fit._compressed([Work.prefill([[0]], [[100]], [1]), *works])
    assert [n for _, n in found] == [1, 16, 4]
    assert sum(float(w.context[0]) * n for w, n in found) == sum(range(100, 120))
    assert found[0][0].kind is Kind.PREFILL
