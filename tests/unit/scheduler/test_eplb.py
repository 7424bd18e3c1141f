"""Expert placement: the planner's law, what moves and when, and that no expert is ever lost on the way."""

from __future__ import annotations

import numpy as np

from lockstep_common.steps import (
    NO_U32,
    NO_U64,
    Body,
    ExpertLoads,
    Header,
    Kind,
    KvGroup,
    PlanOutcome,
    WorkerFacts,
)
from lockstep_proto.v1 import worker_pb2
from lockstep_scheduler.client import read_facts, read_outcome, write_body, write_header
from lockstep_worker.server import _facts, outcome_message, plan_from


def test_a_move_and_its_loads_on_the_wire() -> None:
    header = Header(
        1, 2, Kind.DECODE, 8, 4, placement_version=3, moved_layer=1, report_loads=True, moved_experts=(2, 0, 1, 1)
    )
    message = worker_pb2.Plan(header=write_header(header), body=write_body(Body(1, 0)))
    assert plan_from(message).header == header

    loads = ExpertLoads(np.arange(6, dtype=np.uint32).reshape(2, 3), np.full((2, 3), 2**32 - 1, np.uint32), 9)
    outcome = read_outcome(outcome_message(PlanOutcome(1, 2, 0, 0, 1, True, NO_U32, NO_U64, expert_loads=loads)))
    assert outcome.expert_loads is not None and outcome.expert_loads.steps == 9
    np.testing.assert_array_equal(outcome.expert_loads.prefill, loads.prefill)
    np.testing.assert_array_equal(outcome.expert_loads.decode, loads.decode)
    without = outcome_message(PlanOutcome(1, 2, 0, 0, 1, True, NO_U32, NO_U64))
    assert read_outcome(without).expert_loads is None


def test_facts_of_experts_on_the_wire() -> None:
    facts = WorkerFacts(
        "m", "h", "cpu", "float32", 10, 64, 4, 0, (KvGroup("full", 4, 20),), True, True, True, 58, 256, 288, 8
    )
    assert read_facts(_facts(facts)) == facts
