"""The mixture-of-experts layer on CPU: equal to one token at a time through its experts, whatever the routing; bits of a row alone."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels import moe
from lockstep_kernels.fp8 import Fp8Weight, dequantise
from lockstep_kernels.moe import Routing, reference
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_worker.experts import Experts
from tests.kernels.test_fp8_oracles import quantised

HIDDEN, WIDTH = 48, 32
DTYPES = [torch.float32, torch.bfloat16]
ROUTINGS = {
    "softmax": Routing(8, 2, "softmax", True),
    "softmax raw": Routing(6, 3, "softmax", False, 16.0),
    "groups by their best": Routing(12, 3, "softmax", False, 2.0, 4, 2, "max"),
    "groups by their best two": Routing(12, 3, "sigmoid", True, 2.5, 3, 2, "top2"),
    "all of them": Routing(4, 4, "sigmoid", True),
    "one": Routing(1, 1, "softmax", True),
}


def weights(experts: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(experts, 2 * WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(experts, HIDDEN, WIDTH, generator=generator) / WIDTH**0.5
    return gate_up.to(dtype), down.to(dtype)


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2**-5


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 40),
    pattern=st.sampled_from(["random", "one expert", "few experts", "none"]),
    dtype=st.sampled_from(DTYPES),
    operand=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_any_routing_equals_one_token_at_a_time(
    tokens: int, pattern: str, dtype: torch.dtype, operand: torch.dtype, seed: int
) -> None:
    experts, chosen = 7, 3
    torch.manual_seed(seed)
    ids = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)] or [torch.zeros(0)]).view(-1, chosen)
    if pattern == "one expert":
        ids = torch.tensor([4, -1, -1]).expand(tokens, -1)
    elif pattern == "few experts":
        ids = torch.tensor([1, 5, 2]).expand(tokens, -1)
    elif pattern == "none":
        ids = torch.full((tokens, chosen), -1)
    ids = torch.where(torch.rand(tokens, 1) < 0.3, -1, ids).int()  # rows that are not live
    gate_up, down = weights(experts, dtype)
    packed = moe.pack_experts(gate_up, down)
    operand = operand if dtype == torch.bfloat16 else torch.float32  # both forms of a bfloat16 weight
    x, plus = (torch.randn(tokens, HIDDEN).to(operand) for _ in range(2))
    factors = torch.rand(tokens, chosen)
    got = moe.mix(x, ids, factors, packed, plus=plus)
    want = plus.double() + reference.experts(x, ids, factors, gate_up, down).double().sum(1)
    torch.testing.assert_close(got.double(), want, rtol=tolerance(operand), atol=tolerance(operand))
    nowhere = (ids < 0).all(1)
    assert torch.equal(got[nowhere], plus[nowhere]) and got.dtype == operand


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_row_does_not_depend_on_its_neighbours(name: str, dtype: torch.dtype) -> None:
    routing, shared = ROUTINGS[name], 2
    torch.manual_seed(1)
    correction = torch.randn(routing.experts) / 10 if routing.scoring == "sigmoid" else None
    gate = torch.randn(routing.experts, HIDDEN).to(dtype)
    packed = moe.pack_experts(*weights(routing.experts + shared, dtype))
    layer = Experts.pack(routing, gate, packed, correction=correction)
    x, residual, live = torch.randn(70, HIDDEN), torch.randn(70, HIDDEN), torch.rand(70) < 0.8
    norm = Norm(torch.rand(HIDDEN), 1e-6)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = layer(x, residual, live, norm=norm)
        assert torch.equal(whole, layer(rms_norm(x, *norm), residual, live))
        assert torch.equal(whole[~live], residual[~live]) and not torch.equal(whole[live], residual[live])
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for part in (slice(0, 1), slice(3, 5), slice(9, 26), slice(0, 70)):
                assert torch.equal(layer(x[part], residual[part], live[part], norm=norm), whole[part])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ROUTINGS)
def test_weights_are_the_scores_of_the_best(name: str) -> None:
    """Against a search over every expert, one token at a time."""
    routing = ROUTINGS[name]
    torch.manual_seed(2)
    logits, bias = torch.randn(30, routing.experts), torch.randn(routing.experts)
    corrected = routing.scoring == "sigmoid"
    ids, factors = moe.route(logits, routing, correction=bias if corrected else None, shared=1)
    assert (ids[:, -1] == routing.experts).all() and (factors[:, -1] == 1).all()
    for t in range(30):
        scores = logits[t].double().softmax(0) if routing.scoring == "softmax" else logits[t].double().sigmoid()
        choice = scores + bias.double() if corrected else scores
        size = routing.group_size
        groups = [choice[g * size : (g + 1) * size].sort(descending=True).values for g in range(routing.groups)]
        merit = [float(g[0] if routing.group_score == "max" else g[:2].sum()) for g in groups]
        kept = sorted(range(routing.groups), key=lambda g: -merit[g])[: routing.top_groups]
        best = sorted((e for e in range(routing.experts) if e // size in kept), key=lambda e: -float(choice[e]))
        want = best[: routing.top_k]
        assert sorted(ids[t, :-1].tolist()) == sorted(want)
        total = float(scores[want].sum()) if routing.renormalise else 1.0
        for e, factor in zip(ids[t, :-1].tolist(), factors[t, :-1].tolist(), strict=True):
            assert factor == pytest.approx(float(scores[e]) / total * routing.scale, rel=1e-5)


def test_experts_are_put_one_by_one() -> None:
    gate_up, down = weights(3, torch.float32)
    stack = moe.ExpertStack(3, HIDDEN, WIDTH, torch.float32, torch.device("cpu"))
    for e in (2, 0):
        gate, up = gate_up[e].chunk(2)
        stack.put(e, gate, up, down[e])
    with pytest.raises(ValueError, match=r"experts \[1\] have no weights"):
        stack.finish()
    gate, up = gate_up[1].chunk(2)
    with pytest.raises(ValueError, match="down has shape"):
        stack.put(1, gate, up, down[1].T)
    stack.put(1, gate, up, down[1])
    x, ids, factors = torch.randn(5, HIDDEN), torch.randint(0, 3, (5, 1)).int(), torch.rand(5, 1)
    want = moe.mix(x, ids, factors, moe.pack_experts(gate_up, down), plus=x)
    assert torch.equal(moe.mix(x, ids, factors, stack.finish(), plus=x), want)


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups", "message"),
    [
        (8, 2, 3, 1, "8 experts in 3 groups"),
        (8, 2, 4, 5, "5 of 4 groups"),
        (8, 5, 4, 2, "5 experts cannot be chosen among 4"),
        (4, 2, 4, 2, "have no best two"),
        (2048, 2, 1, 1, "2048 experts"),
    ],
)
def test_routings_that_contradict_themselves_are_refused(
    experts: int, top_k: int, groups: int, top_groups: int, message: str
) -> None:
    score: Literal["top2"] = "top2"
    with pytest.raises(ValueError, match=message):
        Routing(experts, top_k, "sigmoid", True, 1.0, groups, top_groups, score)


def test_operands_that_do_not_fit_are_refused() -> None:
    packed = moe.pack_experts(*weights(2, torch.float32))
    ids, factors = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    with pytest.raises(ValueError, match=r"x has shape \(3, 47\)"):
        moe.mix(torch.ones(3, 47), ids, factors, packed, plus=torch.ones(3, 47))
    with pytest.raises(ValueError, match="weights has shape"):
        moe.experts(torch.ones(3, HIDDEN), ids, factors[:2], packed)
    with pytest.raises(ValueError, match="plus has shape"):
        moe.combine(torch.ones(3, 1, HIDDEN), ids, plus=torch.ones(2, HIDDEN))
    with pytest.raises(ValueError, match="logits has shape"):
        moe.route(torch.ones(3, 2), ROUTINGS["softmax"])
    with pytest.raises(ValueError, match="live has shape"):
        moe.route(torch.ones(3, 8), ROUTINGS["softmax"], live=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="2 experts have weights, 8 are routed to"):
        Experts.pack(ROUTINGS["softmax"], torch.ones(8, HIDDEN), packed)


@pytest.mark.parametrize("blocks", [True, False])
def test_stacks_of_8_bits(blocks: bool) -> None:
    """As a GPU keeps them; on CPU an expert is what its values and scales stand for."""
    gate_up, down = weights(2, torch.float32)
    meta = torch.device("meta")
    stack = moe.ExpertStack(2, HIDDEN, WIDTH, torch.bfloat16, meta)
    cpu = moe.ExpertStack(2, HIDDEN, WIDTH, torch.float32, torch.device("cpu"))
    wide = []
    for e in range(2):
        parts = [quantised(part, blocks) for part in (*gate_up[e].chunk(2), down[e])]
        stack.put(e, *parts)
        cpu.put(e, *parts)
        wide.append([dequantise(part, torch.float32) for part in parts])
    packed = stack.finish()
    assert packed.gate_up is not None and packed.down is not None
    assert packed.gate_up.scales == packed.down.scales == ("blocks" if blocks else "rows")
    assert packed.gate_up.values.shape == (2, 2 * WIDTH, HIDDEN) and packed.dtype == torch.bfloat16
    x, ids, factors = torch.randn(5, HIDDEN), torch.tensor([[0, 1]]).expand(5, -1).int(), torch.rand(5, 2)
    want = moe.pack_experts(torch.stack([torch.cat((g, u)) for g, u, _ in wide]), torch.stack([d for *_, d in wide]))
    assert torch.equal(moe.mix(x, ids, factors, cpu.finish(), plus=x), moe.mix(x, ids, factors, want, plus=x))
    mixed = moe.ExpertStack(2, HIDDEN, WIDTH, torch.bfloat16, meta)
    mixed.put(0, *(torch.empty(weight.shape, device=meta) for weight in wide[0]))
    with pytest.raises(ValueError, match="expert 1 are not quantised as"):
        mixed.put(1, *parts)


def test_a_weight_of_8_bits_splits_at_its_blocks() -> None:
    weight = torch.randn(256, 384)
    for blocks in (True, False):
        whole = quantised(weight, blocks)
        for dim, parts in ((0, 2), (1, 3)):
            pieces = [dequantise(p, torch.float32) for p in moe.split(whole, parts, dim) if isinstance(p, Fp8Weight)]
            assert torch.equal(torch.cat(pieces, dim), dequantise(whole, torch.float32))
    with pytest.raises(ValueError, match="do not divide into 4 parts"):
        moe.split(quantised(weight, True), 4, 0)
