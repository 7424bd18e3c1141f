"""The step loop moves experts: real plans over scripted workers that count loads and apply every move."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lockstep_common.clock import ManualClock
from lockstep_common.errors import ConfigError, Unavailable
from lockstep_common.steps import Body, ExpertLoads, GroupConfig, Header, Kind, Plan, PlanOutcome, Sampling
from lockstep_scheduler.eplb import EplbPolicy
from lockstep_scheduler.ledger import NoLedger
from lockstep_scheduler.loop import StepLoop
from lockstep_scheduler.metrics import LoopCollector
from lockstep_scheduler.settings import Group, Settings
from lockstep_worker.protocol import StepResult
from tests.scripted_worker import ScriptedEngine
from tests.unit.scheduler.test_eplb import Ranks, facts_of

DP, LAYERS, EXPERTS, SLOTS = 2, 3, 8, 10
WEIGHTS = np.array([60, 30, 20, 10, 1, 1, 1, 1])  # of the experts, shifted by one in each layer


class Workers:
    """A rank runs a plan whole when it is its turn; each token is routed by WEIGHTS."""

    def __init__(self, policy: EplbPolicy, layers: int = LAYERS) -> None:
        self.clock = ManualClock()
        self.loop = StepLoop(
            Settings(max_batched_tokens=64, a=4, b=8, max_window=4, eplb=policy),
            self.clock,
            NoLedger(),
            lambda batch: None,
        )
        self.layers = layers
        self.form(1)

    def form(self, epoch: int) -> None:
        self.engines = [ScriptedEngine(max_rows=4, num_blocks=400, wait=lambda seconds: None) for _ in range(DP)]
        facts = [e.configure(GroupConfig(epoch, 1, i, i, 0, DP, 1, "", 0, 4, 512, 64, 4, 0)) for i, e in enumerate(self.engines)]  # fmt: skip
        own = replace(facts[0], moe_layers=self.layers, routed_expert_count=EXPERTS, expert_slots=SLOTS)
        self.headers: list[Header] = []
        self.reports: list[float] = []
        self.plans: deque[tuple[Header, Sequence[Body]]] = deque()
        self.counts = np.zeros((DP, 2, LAYERS, EXPERTS), np.uint32)
        self.experts = Ranks(facts_of(LAYERS, EXPERTS, SLOTS), DP)
        self.loop.start(Group(epoch, 1, DP, own, 4, 512), self)

    def send(self, header: Header, bodies: Sequence[Body]) -> None:
        self.headers.append(header)
        self.plans.append((header, bodies))

    def run(self, plans: int) -> None:
        for _ in range(plans):
            header, bodies = self.plans.popleft()
            self.experts.apply(header)
            self.clock.advance(0.05 * header.k)
            if header.report_loads:
                self.reports.append(self.clock.now())
            for rank, (engine, body) in enumerate(zip(self.engines, bodies, strict=True)):
                results = list(engine.run(Plan(header, body)))
                self.loop.on_outcome(self._outcome(header, rank, body, results))

    def _outcome(self, header: Header, rank: int, body: Body, results: list[StepResult]) -> PlanOutcome:
        prefill = header.kind is Kind.PREFILL
        tokens = sum(int(p.counts.sum()) for p in body.passes) if prefill else len(body.rows) * header.k
        for layer in range(LAYERS):
            self.counts[rank, 0 if prefill else 1, layer] += (tokens * np.roll(WEIGHTS, layer)).astype(np.uint32)
        loads = None
        if header.report_loads:
            loads = ExpertLoads(*self.counts[rank].copy(), steps=20)
            self.counts[rank] = 0
        return PlanOutcome(
            epoch=header.epoch,
            seq=header.seq,
            dp_rank=rank,
            first=0,
            steps=len(results),
            last=True,
            counts=np.array([len(r.words) for r in results], np.uint32),
            words=np.concatenate([r.words for r in results]),
            expert_loads=loads,
        )

    def submit(self, n: int, tokens: int) -> None:
        for i in range(n):
            self.loop.submit(
                request_id=f"{self.loop.stats.requests}",
                session=1,
                handle=i,
                prompt=np.arange(20, dtype=np.uint32) + i,
                sampling=Sampling(max_tokens=tokens),
                n=1,
                priority=0,
                salt="",
            )
        self.loop.advance()


def test_experts_move_while_requests_run() -> None:
    workers = Workers(EplbPolicy(enabled=True, interval=5.0, evidence=10))
    workers.submit(6, 400)
    workers.run(100)
    moves = [h for h in workers.headers if h.moved_layer >= 0]
    assert {h.moved_layer for h in moves} == set(range(LAYERS))
    assert [h.placement_version for h in moves] == list(range(1, len(moves) + 1))
    assert all(b - a >= 1.0 for a, b in zip(workers.reports, workers.reports[1:], strict=False))
    assert len(workers.reports) >= 0.05 * 4 * 90 / 1.3, "a report about once a second"
    experts = workers.loop.experts
    assert experts is not None and experts.version == len(moves)
    assert experts.balance["decode"].worst < 1.1
    settled = workers.headers.index(moves[-1])
    assert settled < 60, "what is even stays where it is"

    registry = CollectorRegistry()
    registry.register(LoopCollector(workers.loop))
    page = generate_latest(registry).decode()
    assert f"lockstep_expert_layers_moved_total {len(moves)}.0" in page
    ratio = next(line for line in page.splitlines() if 'kind="decode",layers="mean"' in line)
    assert 1 <= float(ratio.split()[-1]) < 1.1


def test_a_new_epoch_starts_from_the_initial_placement() -> None:
    workers = Workers(EplbPolicy(enabled=True, evidence=10))
    workers.submit(6, 400)
    workers.run(60)
    assert workers.loop.experts is not None and workers.loop.experts.version > 0
    workers.loop.stop(Unavailable("a worker is lost"))
    workers.form(2)
    workers.submit(2, 4)
    workers.run(1)  # `Ranks` start at the initial placement and version 0 as well
    assert workers.headers[0].placement_version == 0


def test_without_routed_experts_nothing_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="--enable-eplb"):
        Workers(EplbPolicy(enabled=True), layers=0)
    workers = Workers(EplbPolicy(evidence=1), layers=0)
    workers.submit(4, 200)
    workers.run(30)
    assert workers.loop.experts is None
    assert not any(h.report_loads or h.moved_layer >= 0 for h in workers.headers)
    registry = CollectorRegistry()
    registry.register(LoopCollector(workers.loop))
    assert b"expert" not in generate_latest(registry)


def test_disabled_it_reports_for_the_metrics_only() -> None:
    workers = Workers(EplbPolicy(evidence=1))
    workers.submit(6, 200)
    workers.run(40)
    assert not any(h.moved_layer >= 0 for h in workers.headers)
    assert workers.loop.experts is not None and workers.loop.experts.balance["decode"].mean > 1.3
