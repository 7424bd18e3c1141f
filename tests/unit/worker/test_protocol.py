"""The worker's half of the plan protocol: order of plans (P1), kept outcomes and acks (P5), attach (P6), fencing, coalescing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lockstep_common.errors import Conflict, InvalidRequest, Unsupported
from lockstep_common.steps import (
    AddRow,
    Body,
    Flag,
    GroupConfig,
    Header,
    Kind,
    KvGroup,
    Plan,
    PlanOutcome,
    Sampling,
    TableWrite,
    TopLogprobs,
    WorkerFacts,
    pack_words,
)
from lockstep_worker.protocol import MAX_AGE_NS, Coalescer, PlanLog, RowTable, StepResult, spans, steps_of

FACTS = WorkerFacts("m", "h", "cpu", "float32", 10, 64, 4, 0, (KvGroup("full", 4, 20),), True, False)
MS = 1_000_000


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def group(epoch: int = 1, term: int = 1) -> GroupConfig:
    return GroupConfig(epoch, term, 0, 0, 0, 1, 1, "", 0, 4, 64, 32, 8, 0)


def configured(facts: WorkerFacts = FACTS, *, epoch: int = 1, term: int = 1) -> PlanLog:
    log = PlanLog()
    log.configure(group(epoch, term), facts)
    return log


def plan(seq: int, *, epoch: int = 1, term: int = 1, ack: int = 0, k: int = 4, salt: str = "") -> Plan:
    return Plan(Header(epoch, seq, Kind.DECODE, 0, k), Body(term, ack), f"{epoch}/{seq}{salt}".encode())


def outcome(seq: int, *, epoch: int = 1, first: int = 0, last: bool = True) -> PlanOutcome:
    return PlanOutcome(epoch, seq, 0, first, 1, last, u32(0), np.zeros(0, np.uint64))


# P1


def test_plans_run_in_order_repeats_are_ignored_gaps_refused() -> None:
    log = configured()
    assert log.accept(plan(1), 0) and log.accept(plan(2), 0)
    assert not log.accept(plan(1), 0) and not log.accept(plan(2), 0)
    with pytest.raises(Conflict, match="expected plan 3, got plan 5"):
        log.accept(plan(5), 0)
    assert log.accept(plan(3), 0) and log.accepted == 3


def test_a_repeat_with_another_header_is_refused() -> None:
    log = configured()
    log.accept(plan(1), 0)
    with pytest.raises(Conflict, match="another header"):
        log.accept(plan(1, salt="x"), 0)


def test_a_plan_without_steps_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no step"):
        configured().accept(Plan(Header(1, 1, Kind.PREFILL, 0, 1), Body(1, 0)), 0)


@pytest.mark.parametrize("field", ["moved_layer", "placement_version", "capture_bucket"])
def test_what_a_worker_cannot_do_is_refused_not_ignored(field: str) -> None:
    log, asked = configured(), plan(1)
    change: dict[str, Any] = {field: 1}
    with pytest.raises(Unsupported, match="cannot"):
        log.accept(replace(asked, header=replace(asked.header, **change)), 0)
    assert log.accept(asked, 0)


def test_experts_move_within_what_the_worker_has() -> None:
    log = configured(replace(FACTS, moe_layers=2, routed_expert_count=4, expert_slots=6))
    asked = plan(1)
    for layer, slots in ((2, 6), (1, 5)):
        header = replace(asked.header, moved_layer=layer, moved_experts=(0,) * slots, placement_version=1)
        with pytest.raises(
            InvalidRequest, match=f"layer {layer} to {slots} slots, this worker has 2 such layers of 6 slots"
        ):
            log.accept(replace(asked, header=header), 0)
    header = replace(asked.header, moved_layer=1, moved_experts=(0, 1, 2, 3, 0, 1), placement_version=1)
    assert log.accept(replace(asked, header=header), 0)
    with pytest.raises(Unsupported, match="captures a graph"):
        log.accept(replace(plan(2), header=replace(plan(2).header, capture_bucket=1)), 0)


def test_halves_need_experts_that_are_shared_out() -> None:
    asked = plan(1)
    halved = replace(asked, header=replace(asked.header, dual_batch=True))
    with pytest.raises(Unsupported, match="plan 1 is to be computed as two halves"):
        configured().accept(halved, 0)
    assert configured(replace(FACTS, moe_layers=2)).accept(halved, 0)


def test_a_worker_in_no_group_takes_no_plan() -> None:
    with pytest.raises(Conflict, match="in no group"):
        PlanLog().accept(plan(1), 0)
    log = configured()
    log.close()
    for call in (lambda: log.accept(plan(1), 0), lambda: log.attach(1, 1)):
        with pytest.raises(Conflict, match="in no group"):
            call()


# Fencing


def test_stale_epochs_and_terms_are_refused_everywhere() -> None:
    log = configured(epoch=3, term=5)
    for epoch, term in ((2, 9), (3, 4), (2, 4)):
        for call in (
            lambda e=epoch, t=term: log.accept(plan(1, epoch=e, term=t), 0),
            lambda e=epoch, t=term: log.attach(e, t),
            lambda e=epoch, t=term: log.check_configure(e, t),
        ):
            with pytest.raises(Conflict, match="epoch 3 term 5"):
                call()
    with pytest.raises(Conflict, match="configured for epoch 3"):
        log.accept(plan(1, epoch=4, term=5), 0)
    with pytest.raises(Conflict, match="epoch 4 or higher"):
        log.check_configure(3, 5)
    log.check_configure(4, 5)


def test_a_higher_term_fences_the_one_before() -> None:
    log = configured()
    assert log.accept(plan(1), 0)
    assert log.accept(plan(2, term=2), 0)
    with pytest.raises(Conflict, match="stale"):
        log.accept(plan(3, term=1), 0)
    log.attach(1, 7)
    with pytest.raises(Conflict, match="stale"):
        log.accept(plan(3, term=2), 0)
    assert log.accepted == 2


def test_a_new_epoch_begins_at_seq_1_and_drops_the_old_ones_outcomes() -> None:
    log = configured()
    old = plan(1)
    log.accept(old, 0)
    log.configure(group(epoch=2), FACTS)
    assert not log.start(old)
    log.record(outcome(1))
    assert log.take() == [] and log.finished == 0
    assert log.accept(plan(1, epoch=2), 0)


# P5 and P6


class LogMachine(RuleBasedStateMachine):
    """Random plans, runs, acks, attachments and streams that die, against plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.log = configured()
        self.recorded: list[PlanOutcome] = []
        self.accepted = self.started = self.finished = self.acked = 0
        self.delivered: list[PlanOutcome] = []  # by streams and attachments, each outcome once

    @rule(ahead=st.integers(-3, 3), data=st.data())
    def send(self, ahead: int, data: st.DataObject) -> None:
        seq = max(1, self.accepted + 1 + ahead)
        ack = data.draw(st.integers(0, self.finished))
        if ahead > 0:
            with pytest.raises(Conflict, match=f"expected plan {self.accepted + 1}"):
                self.log.accept(plan(seq, ack=ack), 0)
        else:
            assert self.log.accept(plan(seq, ack=ack), 0) == (seq == self.accepted + 1)
            self.accepted = max(self.accepted, seq)
        self.acked = max(self.acked, ack)

    @precondition(lambda self: self.started == self.finished < self.accepted)
    @rule()
    def start(self) -> None:
        assert self.log.start(plan(self.started + 1))
        self.started += 1

    @precondition(lambda self: self.started > self.finished)
    @rule(last=st.booleans())
    def record(self, last: bool) -> None:
        result = outcome(self.started, last=last, first=len(self.recorded))
        self.log.record(result)
        self.recorded.append(result)
        self.finished += last

    @rule()
    def take(self) -> None:
        self.delivered += self.log.take()

    @rule()
    def ack_of_the_future(self) -> None:
        with pytest.raises(Conflict, match="ack of plan"):
            self.log.accept(plan(self.accepted + 1, ack=self.finished + 1), 0)

    @rule()
    def attach(self) -> None:
        found = self.log.attach(1, 1)
        assert (found.accepted, found.started, found.finished) == (self.accepted, self.started, self.finished)
        assert list(found.outcomes) == [o for o in self.recorded if o.seq > self.acked]
        assert list(found.headers) == [plan(seq).header_bytes for seq in range(self.acked + 1, self.accepted + 1)]
        self.delivered += [o for o in found.outcomes if not any(o is d for d in self.delivered)]

    @invariant()
    def nothing_unacked_is_lost(self) -> None:
        held = [*self.delivered, *self.log._unsent]
        assert all(any(o is h for h in held) for o in self.recorded if o.seq > self.acked)


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_row_table_follows_plans_and_outcomes() -> None:
    rows = RowTable(4, (16,))
    add = AddRow(2, "a", 1, 3, u32(1, 2, 3, 9), 0, (u32(5, 6),), Sampling(), 20)
    rows.apply(Body(1, 0, adds=(add, AddRow(0, "b", 0, 1, u32(1), 0, (u32(9),), Sampling(), 9))))
    rows.book(pack_words([7, 8, 0], [2, 2, 0], [1, 0, int(Flag.FAULT)]))
    rows.apply(Body(1, 0, removes=u32(0), table_writes=(TableWrite(0, u32(2), u32(2), u32(2), u32(7, 8)),)))
    (state,) = rows.states()
    assert (state.row, state.request_id, state.choice, state.offset) == (2, "a", 1, 3)
    assert state.blocks[0].tolist() == [5, 6, 7, 8]


def test_row_table_waits_for_the_outcomes_of_the_plan_before() -> None:
    """Plan 2 is queued on the device, and gives row 0 to another request, while plan 1 still has tokens in flight."""
    log = configured()
    add = AddRow(0, "old", 0, 1, u32(1), 0, (u32(3),), Sampling(), 9)
    log.accept(first := Plan(Header(1, 1, Kind.DECODE, 0, 1), Body(1, 0, adds=(add,)), b"1"), 0)
    new = AddRow(0, "new", 0, 1, u32(1), 0, (u32(4),), Sampling(), 9)
    log.accept(second := Plan(Header(1, 2, Kind.DECODE, 0, 1), Body(1, 0, removes=u32(0), adds=(new,)), b"2"), 0)
    log.start(first)
    log.start(second)
    found = log.attach(1, 1)
    assert (found.started, found.finished) == (2, 0) and found.rows[0].request_id == "old"
    log.record(PlanOutcome(1, 1, 0, 0, 1, True, u32(1), pack_words([5], [0], [0])))
    (row,) = log.attach(1, 1).rows
    assert (row.request_id, row.offset) == ("new", 0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=6))
def test_spans(pairs: list[tuple[int, int]]) -> None:
    owner, values = spans([s for s, _ in pairs], [c for _, c in pairs])
    expected = [(i, v) for i, (start, count) in enumerate(pairs) for v in range(start, start + count)]
    assert list(zip(owner.tolist(), values.tolist(), strict=True)) == expected


# Coalescing


def coalescer(k: int = 8, notice: int = 0) -> Coalescer:
    return Coalescer(Header(1, 1, Kind.DECODE, 0, k), dp_rank=3, notice=notice, start_ns=0, idle_ns=17)


def word(flags: int = 0) -> StepResult:
    return StepResult(pack_words([5], [1], [flags]))


def test_a_quick_window_is_one_message() -> None:
    c = coalescer()
    assert [c.add(word(), (i + 1) * 100_000) for i in range(8)] == [False] * 7 + [True]
    found = c.flush(99)
    assert (found.first, found.steps, found.last, found.dp_rank) == (0, 8, True, 3)
    assert found.counts.tolist() == [1] * 8 and len(found.words) == 8
    assert (found.step_ns, found.turnaround_ns, found.idle_ns) == (100_000, 99, 17)


def test_first_tokens_ends_and_the_notice_go_at_once() -> None:
    for flag in (Flag.FIRST, Flag.STOP, Flag.LENGTH, Flag.FAULT):
        c = coalescer()
        assert not c.add(word(), 1000) and c.add(word(int(flag)), 2000)
        assert not c.flush(5).last
    c = coalescer(notice=3)
    assert [c.add(word(), i * 1000) for i in range(1, 4)] == [False, False, True] and c.notice_ns == 3000
    assert c.flush(0).turnaround_ns == 0


def test_idle_time_is_told_once() -> None:
    c = coalescer(k=2)
    c.add(word(1), 10)
    assert c.flush(0).idle_ns == 17
    c.add(word(), 20)
    assert c.flush(0).idle_ns == 0


@given(st.lists(st.integers(1, 6 * MS), min_size=1, max_size=30), st.data())
def test_outcomes_cover_every_step_once_and_none_gets_old(durations: list[int], data: st.DataObject) -> None:
    c = coalescer(k=len(durations), notice=data.draw(st.integers(0, len(durations))))
    now, covered, unsent_since = 0, 0, None
    for i, duration in enumerate(durations):
        now += duration
        if unsent_since is None:
            unsent_since = now
        if c.add(StepResult() if i % 3 else word(), now):
            found = c.flush(0)
            assert found.first == covered and found.counts.sum() == len(found.words)
            covered += found.steps
            assert found.last == (covered == len(durations))
            unsent_since = None
        else:
            assert now + duration - unsent_since <= MAX_AGE_NS
    assert covered == len(durations)


def test_logprobs_and_top_keep_their_words_when_steps_are_joined() -> None:
    c = coalescer(k=3)
    c.add(StepResult(pack_words([1, 2], [0, 1], 0)), 1)
    top = TopLogprobs(u32(1), u32(2), u32(7, 8), np.array([-1, -2], np.float32))
    c.add(StepResult(pack_words([3, 4], [0, 1], 0), np.array([np.nan, -1], np.float32), top), 2)
    c.add(StepResult(faults=((1, "why"),)), 3)
    found = c.flush(0)
    assert found.counts.tolist() == [2, 2, 0] and np.isnan(found.logprobs[:3]).all() and found.logprobs[3] == -1
    assert found.top is not None and found.top.index.tolist() == [3] and found.faults == ((1, "why"),)


def test_turnaround_is_the_time_from_notice_to_the_next_plan() -> None:
    log = configured()
    log.accept(plan(1), 100)
    assert log.turnaround(1, 500) == 0
    log.accept(plan(2), 900)
    assert log.turnaround(1, 500) == 400 and log.turnaround(1, 0) == 0 and log.turnaround(1, 1000) == 0


def test_steps_of_a_plan() -> None:
    assert steps_of(Header(1, 1, Kind.DECODE, 0, 5)) == 5
    assert steps_of(Header(1, 1, Kind.PREFILL, 0, 1, micro_chunks=(7, 8))) == 2
