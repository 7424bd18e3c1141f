"""A session to a scheduler, message by message: load accounting, fan-out, breaks and resumption."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.clock import ManualClock
from lockstep_common.errors import LockstepError, Unavailable
from lockstep_common.steps import PromptScores, Sampling, f32, u32, u64
from lockstep_proto.v1 import common_pb2, scheduler_pb2
from lockstep_router import client as client_module
from lockstep_router.client import SchedulerSession
from lockstep_router.fleet import Submission
from lockstep_router.output import End


@dataclass
class Heard:
    """A sink that writes down what it is told."""

    n: int = 1
    log: list[Any] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    stops: dict[int, int] = field(default_factory=dict)
    fails: bool = False

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * self.n

    def accepted(self) -> None:
        self.log.append("accepted")

    def refused(self, error: LockstepError) -> None:
        self.log.append(("refused", error.code))

    def lost(self, error: LockstepError) -> None:
        self.log.append(("lost", error.code))

    def event(
        self,
        choice: int,
        offset: int,
        tokens: list[int],
        end: End,
        logprobs: Sequence[float],
        tops: Sequence[Sequence[tuple[int, float]]],
        cached: int,
        error: LockstepError | None,
    ) -> None:
        if self.fails:
            raise RuntimeError("a fault in this request's output")
        self.counts[choice] += len(tokens)
        self.log.append((choice, offset, tokens, end, list(logprobs), list(tops), cached, error and error.code))

    def scored(self, scores: PromptScores) -> None:
        self.log.append(("scored", len(scores), scores.ids.shape))

    def received(self) -> list[int]:
        return self.counts

    def stopped(self) -> dict[int, int]:
        return self.stops


FACTS = scheduler_pb2.GroupFacts(
    model="tiny", epoch=1, max_model_len=64, vocab_size=100, block_size=16, max_choices=4, dp=1
)


def down(**message: Any) -> scheduler_pb2.FromScheduler:
    return scheduler_pb2.FromScheduler(**message)


def load(**values: Any) -> common_pb2.Load:
    return common_pb2.Load(**({"ready": True, "max_running": 8} | values))


def events(*entries: tuple[int, int, int, list[int], int], term: int = 1, **more: Any) -> scheduler_pb2.FromScheduler:
    """(handle, choice, offset, tokens, end) each."""
    handles, choices, offsets, tokens, ends = zip(*entries, strict=True)
    return down(
        events=scheduler_pb2.Events(
            term=term,
            handles=np.array(handles, "<u8").tobytes(),
            choices=np.array(choices, "<u4").tobytes(),
            offsets=np.array(offsets, "<u4").tobytes(),
            counts=np.array([len(t) for t in tokens], "<u4").tobytes(),
            ends=bytes(ends),
            tokens=np.array([i for t in tokens for i in t], "<u4").tobytes(),
            **more,
        )
    )


def open_session(clock: ManualClock | None = None, *, grace_ms: int = 10_000) -> SchedulerSession:
    session = SchedulerSession("scheduler:1", router_id="r", clock=clock or ManualClock())
    session._welcome(scheduler_pb2.Welcome(shard_id="s", term=1, grace_ms=grace_ms, facts=FACTS, load=load()))
    return session


def submission(n: int = 1, prompt: int = 10, name: str = "a") -> Submission:
    return Submission(name, list(range(prompt)), Sampling(seed=7, stop_ids=(2,), bias=((5, 1.5),)), n)


def sent(session: SchedulerSession) -> list[tuple[str, Any]]:
    """What was written since the last call."""
    found: list[tuple[str, Any]] = [
        (m.WhichOneof("message") or "", getattr(m, m.WhichOneof("message") or "")) for m in session._outgoing
    ]
    session._outgoing.clear()
    return found


def test_a_submission_on_the_wire() -> None:
    session = open_session()
    handle = session.submit(submission(n=2), Heard(2))
    [(kind, message)] = sent(session)
    assert kind == "submit" and (message.handle, message.request_id, message.n) == (handle, "a", 2)
    assert u32(message.prompt).tolist() == list(range(10)) and message.sampling.seed == 7
    assert u32(message.sampling.stop_ids).tolist() == [2] and f32(message.sampling.bias_values).tolist() == [1.5]
    assert session.facts is not None and session.facts.max_model_len == 64


def test_what_was_sent_counts_until_a_snapshot_shows_it() -> None:
    session = open_session()
    first, second = (session.submit(submission(n=2), Heard(2)) for _ in range(2))
    assert (session.view().sent_choices, session.view().sent_tokens) == (4, 20)
    session._receive(down(load=load(waiting=0)))
    assert session.view().sent_choices == 4, "a snapshot taken before the acceptance knows nothing of it"
    session._receive(down(accepted=scheduler_pb2.Accepted(handle=first)))
    session._receive(down(load=load(waiting=2)))
    assert (session.view().sent_choices, session.view().waiting) == (2, 2)
    session.cancel(second)
    assert session.view().sent_choices == 0 and session.in_flight == 1
    session._receive(events((first, 0, 0, [5], 1), (first, 1, 0, [5], 2)))
    assert session.in_flight == 0 and session.view().sent_tokens == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["submit", "accept", "refuse", "load", "cancel", "end"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_counters_are_what_is_in_the_table_whatever_happens(steps: list[tuple[str, int]]) -> None:
    session = open_session()
    handles: list[int] = []
    for action, which in steps:
        handle = handles[which % len(handles)] if handles else 0
        if action == "submit":
            handles.append(session.submit(submission(n=which + 1), Heard(which + 1)))
        elif action == "accept":
            session._receive(down(accepted=scheduler_pb2.Accepted(handle=handle)))
        elif action == "refuse":
            session._receive(
                down(refused=scheduler_pb2.Refused(handle=handle, error=common_pb2.ErrorDetail(code="overloaded")))
            )
        elif action == "load":
            session._receive(down(load=load()))
        elif action == "cancel":
            session.cancel(handle)
        elif action == "end" and handle in session._entries:
            for choice in range(session._entries[handle].submission.n):
                session._receive(events((handle, choice, 0, [1], 1)))
        unseen = [entry.submission for entry in session._entries.values() if not entry.seen]
        assert session.view().sent_choices == sum(s.n for s in unseen)
        assert session.view().sent_tokens == sum(len(s.prompt) for s in unseen)
    for handle in handles:
        session.cancel(handle)
    assert (session.in_flight, session.view().sent_choices, session.view().sent_tokens) == (0, 0, 0)


def test_one_message_reaches_many_requests() -> None:
    session = open_session()
    sinks = [Heard(2), Heard()]
    first, second = session.submit(submission(n=2), sinks[0]), session.submit(submission(), sinks[1])
    top = common_pb2.TopLogprobs(
        index=np.array([1], "<u4").tobytes(),
        counts=np.array([2], "<u4").tobytes(),
        ids=np.array([7, 8], "<u4").tobytes(),
        values=np.array([-0.5, -1.0], "<f4").tobytes(),
    )
    session._receive(
        events(
            (first, 0, 0, [10, 11], 0), (999, 0, 0, [1], 0), (second, 0, 3, [20], 2), (first, 1, 0, [], 4),
            logprobs=np.array([-1, -2, -3, -4], "<f4").tobytes(), top=top, cached=np.array([6, 0, 9, 6], "<u4").tobytes(),
            errors=[scheduler_pb2.EntryError(entry=3, error=common_pb2.ErrorDetail(code="unavailable", message="x"))],
        )
    )  # fmt: skip
    assert sinks[0].log == [
        (0, 0, [10, 11], End.NONE, [-1.0, -2.0], [(), [(7, -0.5), (8, -1.0)]], 6, None),
        (1, 0, [], End.ERROR, [], [], 6, "unavailable"),
    ]
    assert sinks[1].log == [(0, 3, [20], End.LENGTH, [-4.0], [()], -1, None)]
    assert session.in_flight == 1


def test_a_fault_in_one_requests_handling_ends_that_request_only() -> None:
    session = open_session()
    bad, good = Heard(fails=True), Heard()
    first, second = session.submit(submission(), bad), session.submit(submission(), good)
    sent(session)
    session._receive(events((first, 0, 0, [1], 0), (second, 0, 0, [2], 0)))
    assert bad.log == [("lost", "internal")] and [entry[2] for entry in good.log] == [[2]]
    assert [kind for kind, _ in sent(session)] == ["cancel"] and session.in_flight == 1


def test_a_lower_term_is_a_scheduler_that_has_been_replaced() -> None:
    session, sink = open_session(), Heard()
    handle = session.submit(submission(), sink)
    session._receive(events((handle, 0, 0, [1], 0), term=3))
    session._receive(events((handle, 0, 1, [9], 0), term=2))
    assert [entry[2] for entry in sink.log] == [[1]]


def test_silence_makes_a_group_unready() -> None:
    clock = ManualClock()
    session = open_session(clock)
    assert session.view().ready
    clock.advance(client_module.SILENCE_SECONDS + 1)
    assert not session.view().ready and not session.connected
    session._receive(down(load=load()))
    assert session.view().ready
    session._receive(down(load=load(draining=True)))
    assert not session.view().ready


async def test_a_broken_stream_gives_back_what_was_not_accepted_and_resumes_the_rest() -> None:
    session = open_session()
    waiting, running, stopped = Heard(), Heard(2), Heard()
    session.submit(submission(name="w"), waiting)
    second = session.submit(submission(n=2, name="r"), running)
    third = session.submit(submission(name="s"), stopped)
    session._receive(down(accepted=scheduler_pb2.Accepted(handle=second)))
    session._receive(events((second, 1, 0, [5, 6], 0), (third, 0, 0, [5, 6, 7], 0)))
    stopped.stops = {0: 2}
    sent(session)
    session._broke(Unavailable("gone"))
    assert waiting.log == [("lost", "unavailable")] and session.in_flight == 2 and not session.view().ready
    session.finish(third, 0, 2)
    session.cancel(10**9)
    assert sent(session) == [], "nothing is written to a broken stream"
    session._welcome(scheduler_pb2.Welcome(shard_id="s", term=2, grace_ms=10_000, facts=FACTS, load=load()))
    [(kind, resume), (_, finish)] = sent(session)
    assert kind == "resume" and list(resume.request_ids) == ["r", "r", "s"]
    assert u64(resume.handles).tolist() == [second, second, third]
    assert (u32(resume.choices).tolist(), u32(resume.offsets).tolist()) == ([0, 1, 0], [0, 2, 3])
    assert (finish.handle, finish.choice, finish.offset) == (third, 0, 2)
    assert session._expiry is None


async def test_a_scheduler_that_stays_away_ends_its_requests_in_time() -> None:
    session, sink = open_session(grace_ms=20), Heard()
    handle = session.submit(submission(), sink)
    session._receive(down(accepted=scheduler_pb2.Accepted(handle=handle)))
    session._broke(Unavailable("gone"))
    assert sink.log == ["accepted"]
    await asyncio.sleep(0.05)
    assert sink.log == ["accepted", ("lost", "unavailable")] and session.in_flight == 0


def test_a_request_that_the_scheduler_lost() -> None:
    session, sink = open_session(), Heard()
    handle = session.submit(submission(), sink)
    session._receive(
        down(refused=scheduler_pb2.Refused(handle=handle, error=common_pb2.ErrorDetail(code="request_lost")))
    )
    assert sink.log == [("refused", "request_lost")] and session.in_flight == 0


def test_a_group_that_forms_anew_tells_its_facts() -> None:
    session = open_session()
    session._receive(down(facts=scheduler_pb2.GroupFacts(model="tiny", epoch=2, max_model_len=32, vocab_size=100)))
    assert session.facts is not None and (session.facts.epoch, session.facts.max_model_len) == (2, 32)


@pytest.mark.parametrize("message", [down(), down(welcome=scheduler_pb2.Welcome())])
def test_messages_of_other_versions_are_passed_over(message: scheduler_pb2.FromScheduler) -> None:
    open_session()._receive(message)
