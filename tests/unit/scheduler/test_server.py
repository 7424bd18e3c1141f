"""The session's edge without sockets: what happens while a request's record is being written."""

from __future__ import annotations

import asyncio

import numpy as np

from lockstep_proto.v1 import common_pb2, scheduler_pb2
from lockstep_scheduler.ledger import NoLedger
from lockstep_scheduler.request import Request
from lockstep_scheduler.server import RouterSession, SchedulerService
from tests.unit.scheduler.simulation import Simulation


class SlowLedger(NoLedger):
    """Answers when it is told to."""

    wanted = True

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    async def open(self, request: Request, timeout: float) -> bool:
        await self.written.wait()
        return True


async def test_a_cancel_that_comes_before_the_record_is_written_is_not_lost() -> None:
    sim, ledger = Simulation(), SlowLedger()
    service = SchedulerService(sim.loop, ledger, sim.clock, shard_id="s", grace=10.0)
    session = RouterSession(1, "r")
    service._sessions[1] = session

    async def messages():  # type: ignore[no-untyped-def]
        for handle in (1, 2):
            sampling = common_pb2.Sampling(max_tokens=4, top_p=1, repetition_penalty=1, logprobs=-1)
            submit = scheduler_pb2.Submit(handle=handle, request_id=f"r{handle}", sampling=sampling, n=1)
            submit.prompt = np.array([1, 2, 3], "<u4").tobytes()
            yield scheduler_pb2.ToScheduler(submit=submit)
        await asyncio.sleep(0)  # both records are being written
        yield scheduler_pb2.ToScheduler(cancel=scheduler_pb2.Cancel(handle=1))

    await service._read(session, messages())
    ledger.written.set()
    await asyncio.gather(*service._tasks)
    sent = [session.outgoing.get_nowait() for _ in range(session.outgoing.qsize())]
    assert [m.refused.error.code for m in sent if m.HasField("refused")] == ["cancelled"]
    assert [m.accepted.handle for m in sent if m.HasField("accepted")] == [2]
    assert not session.recording and list(session.handles) == [2]
    assert sim.loop.find("r1") is None and len(sim.loop.waiting) + sim.loop.running == 1
