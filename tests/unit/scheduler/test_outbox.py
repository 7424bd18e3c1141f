from collections.abc import Sequence

import numpy as np
import pytest

from lockstep_common.clock import ManualClock
from lockstep_common.steps import NO_U32, NO_U64, Body, GroupConfig, Header, Plan, PlanOutcome, Sampling
from lockstep_scheduler.booking import EventBatch
from lockstep_scheduler.ledger import NoLedger
from lockstep_scheduler.loop import StepLoop
from lockstep_scheduler.outbox import Outbox
from lockstep_scheduler.settings import Group, Settings
from tests.scripted_worker import ScriptedEngine


def batch(session: int) -> EventBatch:
    return EventBatch(session, NO_U64, NO_U32, NO_U32, NO_U32, np.zeros(0, np.uint8))


def test_events_keep_their_order_and_come_behind_what_is_done_meanwhile() -> None:
    came: list[object] = []
    outbox = Outbox(lambda batch: came.append(batch.session))
    outbox(batch(1))
    with outbox.held():
        outbox(batch(2))
        outbox(batch(3))
        came.append("plan")
    outbox(batch(4))
    assert came == [1, "plan", 2, 3, 4]


def test_events_are_told_when_what_is_done_meanwhile_fails() -> None:
    came: list[int] = []
    outbox = Outbox(lambda batch: came.append(batch.session))
    with pytest.raises(ValueError, match="lost"), outbox.held():
        outbox(batch(1))
        raise ValueError("lost")
    assert came == [1]


class Worker:
    """One rank that runs a plan when it is told to."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.plans: list[Plan] = []
        self.engine = ScriptedEngine(max_rows=4, num_blocks=64, wait=lambda seconds: None)
        facts = self.engine.configure(GroupConfig(1, 1, 0, 0, 0, 1, 1, "", 0, 4, 512, 64, 4, 0))
        settings = Settings(max_batched_tokens=64, a=1, b=4, max_window=4)
        self.loop = StepLoop(settings, ManualClock(), NoLedger(), self.emit)
        self.loop.start(Group(1, 1, 1, facts, 4, 512), self)

    def send(self, header: Header, bodies: Sequence[Body]) -> None:
        self.came.append("plan")
        self.plans.append(Plan(header, bodies[0]))

    def emit(self, batch: EventBatch) -> None:
        self.came.append("end" if batch.ends.any() else "tokens")

    def run(self) -> None:
        plan = self.plans.pop(0)
        results = list(self.engine.run(plan))
        words = [result.words for result in results]
        counts = np.array([len(step) for step in words], np.uint32)
        self.loop.on_outcome(
            PlanOutcome(1, plan.header.seq, 0, 0, len(results), True, counts=counts, words=np.concatenate(words))
        )


def test_a_plan_leaves_before_sessions_hear_of_the_outcome_that_called_for_it() -> None:
    worker = Worker()
    prompt, sampling = np.arange(20, dtype=np.uint32), Sampling(max_tokens=30)
    worker.loop.submit(request_id="a", session=1, handle=0, prompt=prompt, sampling=sampling)
    worker.loop.advance()
    turns = []
    while worker.plans:
        worker.came.clear()
        worker.run()
        turns.append(list(worker.came))
    assert ["plan", "tokens"] in turns and ["tokens", "plan"] not in turns
    assert turns[-1] == ["end"]
