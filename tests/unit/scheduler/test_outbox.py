import numpy as np
import pytest

from lockstep_common.steps import NO_U32, NO_U64
from lockstep_scheduler.booking import EventBatch
from lockstep_scheduler.outbox import Outbox


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
