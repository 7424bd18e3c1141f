"""Mixtures of experts at the shapes of the models: few tokens against the bytes of the experts they reach, many against the
tensor cores, and torch's grouped product beside both. Names say how many distinct experts a run reads, on average over its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import torch

from lockstep_bench.kernels import Case
from lockstep_kernels.moe import (
    ExpertWeights,
    Gate,
    Routing,
    choose,
    combine,
    fuses_norm,
    gate_logits,
    grouped,
    kernel,
    mix,
    pack_experts,
    pack_gate,
    route,
    skinny,
)
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_kernels.swiglu import kernel as elementwise

DEVICE: Final = torch.device("cuda")
DTYPE: Final = torch.bfloat16
SIZE: Final = DTYPE.itemsize
TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
PARTS: Final = (1, 8, 64, 256, 1024, 8192)
RUNS: Final = 6
CHECKED: Final = 48  # tokens
WORST: Final = 0.06  # error of values of about 1, of which bfloat16 keeps 8 bits


@dataclass(frozen=True)
class Model:
    name: str
    routing: Routing
    shared: int
    hidden: int
    width: int

    @property
    def experts(self) -> int:
        return self.routing.experts + self.shared

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.width * SIZE


QWEN: Final = Model("qwen3-30b-a3b", Routing(128, 8, "softmax", True), 0, 2048, 768)
LITE: Final = Model("deepseek-v2-lite", Routing(64, 6, "softmax", False), 2, 2048, 1408)
MODELS: Final = (QWEN, LITE)


@dataclass(frozen=True)
class Run:
    """Tokens of one run and where they go. Runs share the experts, which are many times the L2 cache together."""

    hidden: torch.Tensor
    x: torch.Tensor
    norm: Norm
    ids: torch.Tensor
    factors: torch.Tensor
    logits: torch.Tensor
    live: torch.Tensor


@cache
def _weights(model: Model) -> tuple[ExpertWeights, Gate]:
    gate_up = torch.randn(model.experts, 2 * model.width, model.hidden, device=DEVICE, dtype=DTYPE)
    down = torch.randn(model.experts, model.hidden, model.width, device=DEVICE, dtype=DTYPE)
    gate = torch.randn(model.routing.experts, model.hidden, device=DEVICE, dtype=DTYPE)
    packed = pack_experts(gate_up.mul_(model.hidden**-0.5), down.mul_(model.width**-0.5))
    return packed, pack_gate(gate.mul_(model.hidden**-0.5), model.routing)


def _run(model: Model, tokens: int) -> Run:
    hidden = torch.randn(tokens, model.hidden, device=DEVICE).to(DTYPE)
    norm = Norm(1 + 0.1 * torch.randn(model.hidden, device=DEVICE), 1e-6)
    live = torch.ones(tokens, dtype=torch.bool, device=DEVICE)
    x = rms_norm(hidden, *norm)
    logits = gate_logits(x, _weights(model)[1])
    ids, factors = route(logits, model.routing, live=live, shared=model.shared)
    return Run(hidden, x, norm, ids, factors, logits, live)


def _layer(model: Model, run: Run) -> torch.Tensor:
    """As `lockstep_worker.experts` calls it."""
    packed, gate = _weights(model)
    x, norm = (run.hidden, run.norm) if fuses_norm(run.hidden, packed) else (rms_norm(run.hidden, *run.norm), None)
    ids, factors = choose(x, gate, live=run.live, shared=model.shared, norm=norm)
    return mix(x, ids, factors, packed, plus=run.hidden, norm=norm)


def _by_torch(model: Model, run: Run) -> torch.Tensor:
    """Rows brought into order, torch's grouped products, rows brought back."""
    packed, _ = _weights(model)
    assert packed.gate_up is not None and packed.down is not None
    plan = kernel.plan(run.ids, model.experts, grouped.LARGEST_BLOCK)
    order = plan.order.long()
    rows = run.x[order // run.ids.shape[1]]
    gated = elementwise.silu_mul(torch._grouped_mm(rows, packed.gate_up.values.mT, offs=plan.ends))
    results = torch._grouped_mm(gated, packed.down.values.mT, offs=plan.ends)
    pairs = torch.empty_like(results)
    pairs[order] = results * run.factors.flatten()[order, None].to(DTYPE)
    return combine(pairs.view(*run.ids.shape, -1), run.ids, plus=run.hidden)


def cases() -> Iterator[Case]:
    for model in MODELS:
        for tokens in TOKENS:
            runs = _runs(model, tokens)
            yield _case(model, runs, "layer", [partial(_layer, model, run) for run in runs])
            yield _case(model, runs, "torch", [partial(_by_torch, model, run) for run in runs])
    for model in MODELS:
        for tokens in PARTS:
            yield from _parts(model, tokens)


def tuning() -> Iterator[Case]:
    """Other ways to cut the products, to be compared with the chosen ones."""
    for model in MODELS:
        for tokens in (8, 64, 256):
            yield from _other_tilings(model, tokens, _few_rows(), (16, 32) if tokens < 256 else (16, 32, 64))
        for tokens in (1024, 8192):
            yield from _other_tilings(model, tokens, _many_rows(), (64, 128))
        yield from _other_skinny(model)


def _runs(model: Model, tokens: int) -> list[Run]:
    return [_run(model, tokens) for _ in range(RUNS if tokens < 4096 else 2)]


def _case(
    model: Model,
    runs: Sequence[Run],
    what: str,
    calls: Sequence[Callable[[], Any]],
    *,
    share: float = 1.0,
    checked: bool = True,
) -> Case:
    """`share`: of the weights of an expert, and of the operations, that the calls need."""
    tokens, chosen = runs[0].ids.shape
    distinct = sum(len(set(run.ids.flatten().tolist())) for run in runs) / len(runs)
    size = share * distinct * model.expert_bytes + 2 * tokens * model.hidden * SIZE
    flops = share * 6 * tokens * chosen * model.hidden * model.width
    name = f"{model.name} T={tokens} {what}, {distinct:.0f} experts"
    check = partial(_error, model, runs[0], calls[0]) if checked else None
    return Case(name, calls, bytes=size, flops=flops, check=check)


def _error(model: Model, run: Run, call: Callable[[], Any]) -> float:
    packed, _ = _weights(model)
    assert packed.gate_up is not None and packed.down is not None
    got, worst = call(), 0.0
    for t in range(min(CHECKED, len(run.x))):
        ids = run.ids[t].long()
        gate, up = (packed.gate_up.values[ids].float() @ run.x[t].float()).chunk(2, 1)
        results = packed.down.values[ids].float() @ (torch.nn.functional.silu(gate) * up)[..., None]
        want = run.hidden[t].float() + (results[..., 0] * run.factors[t, :, None]).sum(0)
        worst = max(worst, float(((got[t].float() - want).abs() / want.abs().clamp(min=1)).max()))
    if not worst < WORST:
        raise AssertionError(f"the largest error is {worst}")
    return worst


def _parts(model: Model, tokens: int) -> Iterator[Case]:
    """The launches of a layer by themselves."""
    packed, gate = _weights(model)
    assert packed.gate_up is not None and packed.down is not None
    runs = _runs(model, tokens)
    part = partial(_case, model, runs, checked=False)
    gate_bytes = model.routing.experts * model.hidden * SIZE
    if fuses_norm(runs[0].hidden, packed):
        choices = [partial(choose, run.hidden, gate, live=run.live, shared=model.shared, norm=run.norm) for run in runs]
        yield replace(part("norm, gate and choice", choices, share=0), bytes=gate_bytes)
        gated = [skinny.kernel.gate_up(run.x, None, packed.gate_up, run.ids) for run in runs]
        ups = [partial(skinny.kernel.gate_up, run.x, run.norm, packed.gate_up, run.ids) for run in runs]
        downs = [
            partial(skinny.kernel.down, h, packed.down, run.ids, run.factors, run.hidden)
            for h, run in zip(gated, runs, strict=True)
        ]
        yield part("gate and up", ups, share=2 / 3)
        yield part("down and sum", downs, share=1 / 3)
        return
    yield replace(part("gate", [partial(gate_logits, run.x, gate) for run in runs], share=0), bytes=gate_bytes)
    routes = [partial(route, run.logits, model.routing, live=run.live, shared=model.shared) for run in runs]
    yield part("route", routes, share=0)
    chosen = runs[0].ids.shape[1]
    rows = grouped.block_rows(tokens * chosen, model.experts)
    yield part("plan", [partial(kernel.plan, run.ids, model.experts, rows) for run in runs], share=0)
    yield from _products(model, runs, rows, *grouped.tilings(rows), what=f"rows {rows}")
    pairs = torch.randn(tokens, chosen, model.hidden, device=DEVICE).to(DTYPE)
    sums = part("sum", [partial(combine, pairs, run.ids, plus=run.hidden) for run in runs], share=0)
    yield replace(sums, bytes=sums.bytes + pairs.numel() * SIZE)


def _products(
    model: Model, runs: Sequence[Run], rows: int, first: grouped.Tiling, second: grouped.Tiling, what: str
) -> Iterator[Case]:
    packed, _ = _weights(model)
    assert packed.gate_up is not None and packed.down is not None
    chosen = runs[0].ids.shape[1]
    ups: list[Callable[[], Any]] = []
    downs: list[Callable[[], Any]] = []
    for run in runs:
        plan = kernel.plan(run.ids, model.experts, rows)
        gated = grouped.kernel.gate_up(run.x, packed.gate_up, plan, chosen, first)
        ups.append(partial(grouped.kernel.gate_up, run.x, packed.gate_up, plan, chosen, first))
        downs.append(partial(grouped.kernel.down, gated, packed.down, plan, run.factors, second))
    yield _case(model, runs, f"gate and up {what}", ups, share=2 / 3, checked=False)
    yield _case(model, runs, f"down {what}", downs, share=1 / 3, checked=False)


def _few_rows() -> Iterator[tuple[grouped.Tiling, grouped.Tiling]]:
    for k, stages in ((64, 3), (64, 4), (64, 6), (128, 2), (128, 3), (128, 4)):
        yield grouped.Tiling(64, k, stages, 4, True), grouped.Tiling(128, k, stages, 4, True)
    yield grouped.Tiling(128, 64, 3, 4, True), grouped.Tiling(64, 64, 6, 4, True)
    yield grouped.Tiling(128, 64, 4, 8, True), grouped.Tiling(256, 64, 4, 8, True)
    yield grouped.Tiling(64, 64, 4, 4, False), grouped.Tiling(128, 64, 4, 4, False)
    yield grouped.Tiling(32, 128, 4, 4, False), grouped.Tiling(64, 128, 4, 4, False)
    yield grouped.Tiling(32, 128, 4, 2, False), grouped.Tiling(32, 128, 5, 4, False)


def _many_rows() -> Iterator[tuple[grouped.Tiling, grouped.Tiling]]:
    yield grouped.Tiling(128, 64, 3, 8, False), grouped.Tiling(256, 64, 3, 8, False)
    yield grouped.Tiling(128, 64, 4, 8, False), grouped.Tiling(256, 64, 4, 8, False)
    yield grouped.Tiling(64, 64, 4, 8, False), grouped.Tiling(128, 64, 4, 8, False)
    yield grouped.Tiling(64, 64, 4, 4, False), grouped.Tiling(128, 64, 4, 4, False)
    yield grouped.Tiling(128, 64, 4, 8, True), grouped.Tiling(256, 64, 4, 8, True)
    yield grouped.Tiling(64, 128, 3, 4, False), grouped.Tiling(128, 128, 3, 8, False)


def _other_tilings(
    model: Model,
    tokens: int,
    tilings: Iterator[tuple[grouped.Tiling, grouped.Tiling]],
    rows: Sequence[int],
) -> Iterator[Case]:
    runs = _runs(model, tokens)
    for first, second in tilings:
        for count in rows:
            if count >= 64 or first.swap or first.block_n >= 32:
                yield from _products(model, runs, count, first, second, f"rows {count} {first} {second}")


def _other_skinny(model: Model) -> Iterator[Case]:
    packed, _ = _weights(model)
    assert packed.gate_up is not None and packed.down is not None
    for tokens in (1, 2):
        runs = _runs(model, tokens)
        part = partial(_case, model, runs, checked=False)
        for shape in (
            (4, 512, 4),
            (8, 512, 4),
            (16, 512, 8),
            (4, 1024, 4),
            (8, 1024, 8),
            (8, 256, 4),
            (16, 256, 4),
            (2, 2048, 8),
        ):
            tiling = skinny.kernel.Tiling(*shape)
            ups = [
                partial(skinny.kernel.gate_up, run.x, run.norm, packed.gate_up, run.ids, tiling=tiling) for run in runs
            ]
            yield part(f"gate and up {shape}", ups, share=2 / 3)
        for shape in ((4, 256, 4), (2, 256, 4), (4, 128, 4), (8, 128, 4), (2, 512, 4), (8, 256, 8), (4, 512, 8)):
            tiling = skinny.kernel.Tiling(*shape)
            gated = torch.randn(runs[0].ids.numel(), model.width, device=DEVICE).to(DTYPE)
            downs = [
                partial(skinny.kernel.down, gated, packed.down, run.ids, run.factors, run.hidden, tiling=tiling)
                for run in runs
            ]
            yield part(f"down and sum {shape}", downs, share=1 / 3)
