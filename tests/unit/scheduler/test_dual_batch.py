"""Plans that are computed as two halves: the rule, the wire, and what the step loop makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_common.clock import ManualClock
from lockstep_common.errors import ConfigError
from lockstep_common.steps import Body, GroupConfig, Header, Kind, Sampling
from lockstep_proto.v1 import worker_pb2
from lockstep_scheduler.__main__ import loop_settings
from lockstep_scheduler.client import read_header, write_body, write_header
from lockstep_scheduler.config import SchedulerConfig
from lockstep_scheduler.ledger import NoLedger
from lockstep_scheduler.loop import StepLoop
from lockstep_scheduler.settings import Group, Settings
from lockstep_scheduler.vote import DualBatch, Position, Rules, Vote, agree
from lockstep_worker.server import plan_from
from tests.scripted_worker import ScriptedEngine

RANK = st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 9))


@given(st.integers(0, 40), st.lists(RANK, min_size=1, max_size=5), st.integers(1, 10), st.integers(1, 10))
def test_a_plan_is_halved_by_the_largest_rank(
    step: int, ranks: list[tuple[bool, int, int]], rows: int, tokens: int
) -> None:
    """And nothing else of the header depends on it."""
    votes = [Vote(i, w, r, r + w, t if w else 0, 4 if r else 0) for i, (w, r, t) in enumerate(ranks)]
    header = agree(Position(1, 1, step), Rules(4, 8, 6, DualBatch(rows, tokens)), votes)
    expected = {
        Kind.PARK: False,
        Kind.PREFILL: max(vote.chunk_tokens for vote in votes) >= tokens,
        Kind.DECODE: max(vote.running for vote in votes) >= rows,
    }
    assert header.dual_batch == expected[header.kind]
    assert replace(header, dual_batch=False) == agree(Position(1, 1, step), Rules(4, 8, 6), votes)


def test_halves_on_the_wire() -> None:
    for dual in False, True:
        header = Header(1, 2, Kind.DECODE, 8, 4, dual_batch=dual)
        data = write_header(header)
        assert read_header(data) == header
        assert plan_from(worker_pb2.Plan(header=data, body=write_body(Body(1, 0)))).header == header


class Sent:
    """Workers that only keep what they are sent."""

    def __init__(self) -> None:
        self.headers: list[Header] = []

    def send(self, header: Header, bodies: Sequence[Body]) -> None:
        self.headers.append(header)


def started(settings: Settings, moe_layers: int) -> tuple[StepLoop, Sent]:
    facts = ScriptedEngine(max_rows=4, num_blocks=40, wait=lambda seconds: None).configure(
        GroupConfig(1, 1, 0, 0, 0, 2, 1, "", 0, 4, 512, 64, 4, 0)
    )
    loop, sent = StepLoop(settings, ManualClock(), NoLedger(), lambda batch: None), Sent()
    loop.start(
        Group(1, 1, 2, replace(facts, moe_layers=moe_layers, routed_expert_count=4, expert_slots=4), 4, 512), sent
    )
    return loop, sent


@pytest.mark.parametrize("a", [0, 4], ids=["intervals by time", "in steps"])
@pytest.mark.parametrize(("tokens", "halved"), [(9, False), (8, True)])
def test_the_loop_asks_for_halves_from_the_threshold_on(a: int, tokens: int, halved: bool) -> None:
    loop, sent = started(Settings(a=a, dual=DualBatch(1, tokens)), moe_layers=2)
    loop.submit(request_id="r", session=0, handle=0, prompt=np.arange(8, dtype=np.uint32), sampling=Sampling())
    loop.advance()
    prefill, decode = sent.headers
    assert (prefill.kind, prefill.dual_batch) == (Kind.PREFILL, halved)
    assert (decode.kind, decode.dual_batch) == (Kind.DECODE, True)
    assert loop.stats.dual_batch_plans == 1 + halved


def test_where_nothing_travels_halves_are_refused() -> None:
    with pytest.raises(ConfigError, match="--enable-dbo"):
        started(Settings(dual=DualBatch(1, 1)), moe_layers=0)
    started(Settings(), moe_layers=0)


def test_settings() -> None:
    assert loop_settings(SchedulerConfig(workers=("a:1",))).dual is None
    assert loop_settings(SchedulerConfig(workers=("a:1",), enable_dbo=True)).dual == DualBatch(32, 512)
    with pytest.raises(ConfigError, match="dbo_decode_token_threshold must be at least 1"):
        SchedulerConfig(workers=("a:1",), enable_dbo=True, dbo_decode_token_threshold=0)
