"""The mixture-of-experts kernels against their reference: in the interpreter on tiny shapes, on a GPU on those of models too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.device import DEVICE, HALF_DTYPES, ON_GPU, poisoned, randn, requires_gpu

from lockstep_kernels import moe  # isort: skip
from lockstep_kernels.fp8 import dequantise  # isort: skip
from lockstep_kernels.moe import Routing, grouped, kernel, reference, skinny  # isort: skip
from lockstep_kernels.moe.weights import ExpertWeights, Stack  # isort: skip
from lockstep_kernels.rms_norm import Norm, rms_norm  # isort: skip
from tests.kernels.test_fp8_oracles import quantised  # isort: skip

ROUTINGS = [
    Routing(8, 2, "softmax", True),
    Routing(60, 4, "softmax", False, 16.0),
    Routing(128, 8, "softmax", True),
    Routing(1, 1, "softmax", True),
    Routing(20, 6, "softmax", False, 2.0, 4, 2, "max"),
    Routing(12, 3, "sigmoid", True, 2.5, 3, 2, "top2"),
    Routing(256, 8, "sigmoid", True, 2.5, 8, 4, "top2"),
    Routing(16, 16, "sigmoid", True),
]
DTYPES = [torch.float32, *HALF_DTYPES]


def sorted_choice(ids: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = ids.argsort(1)
    return ids.gather(1, order), factors.gather(1, order)


def random_ids(tokens: int, experts: int, chosen: int, seed: int, dead: float = 0.2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :chosen]
    return torch.where(torch.rand(tokens, 1, generator=generator) < dead, -1, ids).int().to(DEVICE)


@settings(max_examples=20, deadline=None)
@given(
    routing=st.sampled_from(ROUTINGS),
    tokens=st.integers(1, 1000 if ON_GPU else 9),
    shared=st.integers(0, 2),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_route(routing: Routing, tokens: int, shared: int, masked: bool, seed: int) -> None:
    logits = randn(tokens, routing.experts, seed=seed)
    correction = randn(routing.experts, seed=seed + 1) / 10 if routing.scoring == "sigmoid" else None
    live = randn(tokens, seed=seed + 2) > 0 if masked else None
    got = sorted_choice(*kernel.route(logits, routing, correction, live, shared))
    want = sorted_choice(*reference.route(logits, routing, correction, live, shared))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)


@settings(max_examples=12, deadline=None)
@given(
    routing=st.sampled_from(ROUTINGS),
    tokens=st.integers(1, skinny.MOST_TOKENS),
    hidden=st.sampled_from([64, 72, 1030, 7168] if ON_GPU else [64, 72, 1030]),
    dtype=st.sampled_from(DTYPES),
    normed=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_choice_of_few_tokens(
    routing: Routing, tokens: int, hidden: int, dtype: torch.dtype, normed: bool, masked: bool, seed: int
) -> None:
    x = (randn(tokens, hidden, seed=seed) / hidden**0.5).to(dtype)
    weight = randn(routing.experts, hidden, dtype=dtype, seed=seed + 1)
    correction = randn(routing.experts, seed=seed + 2) / 10 if routing.scoring == "sigmoid" else None
    live = randn(tokens, seed=seed + 3) > 0 if masked else None
    norm = Norm(randn(hidden, seed=seed).abs() / hidden**0.5, 1e-6) if normed else None
    arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    wide = x.float() if norm is None else rms_norm(x.float(), *norm)
    want = sorted_choice(*reference.route(wide @ weight.float().T, routing, correction, live, 1))
    for _ in range(2):  # it leaves everything ready for the next time
        got = sorted_choice(*skinny.kernel.choose(x, norm, weight, arrived, routing, correction, live, 1))
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)
        assert arrived.item() == 0


@pytest.mark.parametrize("routing", ROUTINGS)
def test_logits_that_are_no_numbers_choose_distinct_experts(routing: Routing) -> None:
    logits = randn(4, routing.experts)
    logits[0], logits[1], logits[2, 0] = torch.nan, -torch.inf, torch.inf
    ids, _ = kernel.route(logits, routing, None, None, 1)
    assert ((ids >= 0) & (ids <= routing.experts)).all()
    assert all(len(set(row)) == routing.top_k + 1 for row in ids.tolist())


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(1, 3000 if ON_GPU else 40),
    experts=st.integers(1, 300 if ON_GPU else 9),
    chosen=st.integers(1, 4),
    block=st.sampled_from([16, 32, 128]),
    dead=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_plan(tokens: int, experts: int, chosen: int, block: int, dead: float, seed: int) -> None:
    ids = random_ids(tokens, experts, min(chosen, experts), seed, dead)
    check_plan(ids, experts, block)


def test_plan_of_more_pairs_than_a_program_takes_together() -> None:
    check_plan(random_ids(1500, 3, 3, 0), 3, 128)


def test_plan_of_more_chunks_than_a_program_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "AT_ONCE", 4)
    check_plan(random_ids(1500, 3, 3, 0), 3, 128)


def check_plan(ids: torch.Tensor, experts: int, block: int) -> None:
    got, want = kernel.plan(ids, experts, block), reference.plan(ids, experts, block)
    used, blocks = int(want.ends[-1]), int((want.blocks[0] >= 0).sum())
    assert torch.equal(got.ends, want.ends)
    assert torch.equal(got.order[:used], want.order[:used])
    assert torch.equal(got.blocks[0], want.blocks[0])
    assert torch.equal(got.blocks[:, :blocks], want.blocks[:, :blocks])


def operands(
    tokens: int, experts: int, hidden: int, width: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, ExpertWeights]:
    x, plus = randn(tokens, hidden, dtype=dtype, seed=seed), randn(tokens, hidden, dtype=dtype, seed=seed + 1)
    gate_up = (randn(experts, 2 * width, hidden, seed=seed + 2) / hidden**0.5).to(dtype)
    down = (randn(experts, hidden, width, seed=seed + 3) / width**0.5).to(dtype)
    return x, plus, ExpertWeights(experts, hidden, width, dtype, Stack(gate_up), Stack(down))


def of_8_bits(weights: torch.Tensor, parts: int, blocks: bool) -> tuple[Stack, torch.Tensor]:
    """[E, n, k] quantised expert by expert, in so many parts of n, and what that stands for in float32."""
    quantised_parts = [[quantised(part, blocks) for part in expert.chunk(parts)] for expert in weights.float()]
    values = torch.stack([torch.cat([part.values for part in expert]) for expert in quantised_parts])
    scale = torch.stack([torch.cat([part.scale for part in expert]) for expert in quantised_parts])
    wide = torch.stack([torch.cat([dequantise(part, torch.float32) for part in expert]) for expert in quantised_parts])
    return Stack(values, scale), wide


def check_mix(got: torch.Tensor, x: Any, ids: Any, factors: Any, packed: ExpertWeights, plus: torch.Tensor) -> None:
    """Each result is rounded to the operands' type twice, once within and once after an expert, and once with the sum."""
    assert packed.gate_up is not None and packed.down is not None
    want = plus.double() + reference.experts(x, ids, factors, packed.gate_up.values, packed.down.values).double().sum(1)
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}[packed.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    nowhere = (ids < 0).all(1)
    assert torch.equal(got[nowhere], plus[nowhere])


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 20),
    experts=st.integers(2, 5),
    hidden=st.sampled_from([64, 72, 136]),
    width=st.sampled_from([32, 40]),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([16, 32, 64]),
    seed=st.integers(0, 1000),
)
def test_grouped_products(
    tokens: int, experts: int, hidden: int, width: int, dtype: torch.dtype, rows: int, seed: int
) -> None:
    x, plus, packed = operands(tokens, experts, hidden, width, dtype, seed)
    assert packed.gate_up is not None and packed.down is not None
    ids = random_ids(tokens, experts, 2, seed)
    factors = torch.where(ids >= 0, randn(tokens, 2, seed=seed).abs(), torch.nan)  # of no pair without an expert
    plan = kernel.plan(ids, experts, rows)
    tiling = grouped.Tiling(64, 64, 3, 4, swap=rows < 64)
    gated = grouped.kernel.gate_up(x, packed.gate_up, plan, 2, tiling)
    pairs = grouped.kernel.down(gated, packed.down, plan, factors, tiling).view(tokens, 2, hidden)
    pairs = torch.where(ids[..., None] >= 0, pairs, torch.nan)
    assert pairs[ids >= 0].isfinite().all()
    check_mix(kernel.combine(pairs, ids, plus), x, ids, factors.nan_to_num(), packed, plus)


@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, skinny.MOST_TOKENS),
    chosen=st.integers(1, 3),
    hidden=st.sampled_from([64, 72, 600]),
    width=st.sampled_from([32, 40, 264] if ON_GPU else [32, 40]),
    dtype=st.sampled_from(DTYPES),
    normed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_experts_of_few_tokens(
    tokens: int, chosen: int, hidden: int, width: int, dtype: torch.dtype, normed: bool, seed: int
) -> None:
    x, plus, packed = operands(tokens, 5, hidden, width, dtype, seed)
    ids = random_ids(tokens, 5, chosen, seed)
    factors = torch.where(ids >= 0, randn(tokens, chosen, seed=seed).abs(), torch.nan)
    norm = Norm(randn(hidden, seed=seed).abs(), 1e-6) if normed else None
    got = skinny.mix(x, ids, factors, packed, plus, norm)
    operand = x if norm is None else rms_norm(x.float(), *norm)
    check_mix(got, operand, ids, factors.nan_to_num(), packed, plus)


def test_blocks_grow_with_the_number_of_pairs() -> None:
    assert [grouped.block_rows(t * 8, 128) for t in (3, 64, 170, 256, 512, 1024, 8192)] == [
        16,
        16,
        16,
        32,
        64,
        128,
        128,
    ]
    assert grouped.block_rows(10**6, 1) == grouped.LARGEST_BLOCK


@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, 9),
    hidden=st.sampled_from([64, 144]),
    width=st.sampled_from([32, 160]),
    dtype=st.sampled_from(HALF_DTYPES),
    blocks=st.booleans(),
    few=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_weights_of_8_bits(
    tokens: int, hidden: int, width: int, dtype: torch.dtype, blocks: bool, few: bool, seed: int
) -> None:
    x, plus, plain = operands(tokens, 3, hidden, width, dtype, seed)
    assert plain.gate_up is not None and plain.down is not None
    gate_up, wide_gate_up = of_8_bits(plain.gate_up.values, 2, blocks)
    down, wide_down = of_8_bits(plain.down.values, 1, blocks)
    packed = ExpertWeights(3, hidden, width, dtype, gate_up, down)
    ids, factors = random_ids(tokens, 3, 2, seed), randn(tokens, 2, seed=seed).abs()
    if few:
        x, plus, ids, factors = x[:2], plus[:2], ids[:2], factors[:2]
        got = skinny.mix(x, ids, factors, packed, plus, None)
    else:
        got = kernel.combine(grouped.experts(x, ids, factors, packed), ids, plus)
    want = ExpertWeights(3, hidden, width, dtype, Stack(wide_gate_up), Stack(wide_down))
    check_mix(got, x, ids, factors, want, plus)


@requires_gpu
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 64, 65, 256, 333, 1024, 4099])
@pytest.mark.parametrize(
    ("routing", "shared", "hidden", "width"),
    [
        (Routing(128, 8, "softmax", True), 0, 2048, 768),
        (Routing(64, 6, "softmax", False), 2, 2048, 1408),
        (Routing(8, 2, "softmax", True), 0, 1024, 1048),
    ],
)
def test_layers_of_models(
    routing: Routing, shared: int, hidden: int, width: int, tokens: int, dtype: torch.dtype
) -> None:
    """Through the public functions, against float32 products of every expert over all tokens."""
    x, plus, packed = operands(tokens, routing.experts + shared, hidden, width, dtype, tokens)
    assert packed.gate_up is not None and packed.down is not None
    gate = moe.pack_gate(randn(routing.experts, hidden, dtype=dtype, seed=9) / hidden**0.5, routing)
    norm = Norm(randn(hidden, seed=8).abs(), 1e-6)
    live = randn(tokens, seed=7) > -1
    operand, fused = (x, norm) if moe.fuses_norm(x, packed) else (rms_norm(x, *norm), None)
    ids, factors = moe.choose(operand, gate, live=live, shared=shared, norm=fused)
    got = moe.mix(operand, ids, factors, packed, plus=plus, norm=fused)
    normed = rms_norm(x.float(), *norm)
    total = plus.float()
    for e in range(packed.experts):
        g, u = (normed @ packed.gate_up.values[e].float().T).chunk(2, 1)
        result = (torch.nn.functional.silu(g) * u) @ packed.down.values[e].float().T
        total += result * (factors * (ids == e)).sum(1, keepdim=True)
    tolerance = {torch.float16: 2**-7, torch.bfloat16: 2**-4}[dtype]
    torch.testing.assert_close(got.float(), total, rtol=tolerance, atol=tolerance)
    assert torch.equal(got[~live], plus[~live])


@requires_gpu
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_a_captured_layer_follows_its_operands(tokens: int) -> None:
    """A graph captured over one routing is right for others: nothing about it depends on the data."""
    x, plus, packed = operands(tokens, 16, 256, 128, torch.bfloat16, 0)
    ids, factors = random_ids(tokens, 16, 4, 0), randn(tokens, 4).abs()
    moe.mix(x, ids, factors, packed, plus=plus)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.mix(x, ids, factors, packed, plus=plus)
    for seed, dead in ((1, 0.0), (2, 0.5), (3, 1.0)):
        ids.copy_(random_ids(tokens, 16, 4, seed, dead))
        out.copy_(poisoned(*out.shape))
        graph.replay()
        check_mix(out, x, ids, factors, packed, plus)
    ids.copy_(torch.tensor([3, -1, -1, -1], device=DEVICE).expand(tokens, -1))  # all at one expert
    graph.replay()
    check_mix(out, x, ids, factors, packed, plus)


@requires_gpu
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_bits_of_deterministic_experts_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, plus, packed = operands(4000, 16, 512, 384, dtype, 0)
    packed = replace(packed, deterministic=True)
    ids, factors = random_ids(4000, 16, 4, 0), randn(4000, 4).abs()
    whole = moe.mix(x, ids, factors, packed, plus=plus)
    for part in (slice(0, 1), slice(5, 7), slice(100, 164), slice(300, 900), slice(0, 2000)):
        assert torch.equal(moe.mix(x[part], ids[part], factors[part], packed, plus=plus[part]), whole[part])
