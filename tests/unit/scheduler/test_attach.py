"""P6: whatever a dead scheduler had sent to whom, every rank comes out at the same plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.errors import Conflict
from lockstep_common.steps import Attachment, Body, GroupConfig, Header, Kind, Plan
from lockstep_proto.v1 import worker_pb2
from lockstep_scheduler.client import open_headers, write_header
from lockstep_worker.protocol import PlanLog
from tests.scripted_worker import ScriptedEngine


def header(seq: int) -> Header:
    return Header(epoch=1, seq=seq, kind=Kind.DECODE, first_step=2 * seq, k=2)


def new_log() -> PlanLog:
    engine = ScriptedEngine()
    group = GroupConfig(1, 1, 0, 0, 0, 1, 1, "", 0, 8, 128, 32, 8, 0)
    log = PlanLog()
    log.configure(group, engine.configure(group))
    return log


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
@settings(deadline=None)
def test_every_cut_of_a_fan_out(accepted: list[int]) -> None:
    """Rank i has plans 1..accepted[i]; after the missing headers all ranks have accepted the same, in order, without gaps."""
    logs = [new_log() for _ in accepted]
    for log, count in zip(logs, accepted, strict=True):
        for seq in range(1, count + 1):
            assert log.accept(Plan(header(seq), Body(term=1, ack=0), write_header(header(seq))), 0)
    attached = [log.attach(1, 2) for log in logs]
    for log, missing in zip(logs, open_headers(attached), strict=True):
        for data in missing:
            seq = worker_pb2.Header.FromString(data).seq
            assert log.accept(Plan(header(seq), Body(term=2, ack=0), data), 0)
    assert {log.accepted for log in logs} == {max(accepted)}


def test_a_header_that_nobody_kept_is_an_error() -> None:
    ahead = Attachment(accepted=3, started=3, finished=3, headers=(write_header(header(3)),), rows=(), outcomes=())
    behind = Attachment(accepted=1, started=1, finished=1, headers=(), rows=(), outcomes=())
    with pytest.raises(Conflict, match=r"\[2\]"):
        open_headers([ahead, behind])
