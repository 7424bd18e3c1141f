"""The life of a shard that is not the coordinator: joins it, drives its ranks of the group while there is one, joins again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lockstep_common.errors import ConfigError, LockstepError
from lockstep_common.steps import PlanOutcome
from lockstep_scheduler.client import WorkerClient, WorkerGroup
from lockstep_scheduler.config import SchedulerConfig
from lockstep_scheduler.group import RETRY_SECONDS, describe, losing
from lockstep_scheduler.loop import StepLoop
from lockstep_scheduler.shards import Agreed, Called, Ended, Following, Formed, Told

log = logging.getLogger(__name__)


class Follower:
    """Drives a shard's part of the group that the coordinator forms. When the coordinator, or a worker of this shard, is lost,
    requests wait, with their tokens, for the next group (see `StepLoop.stop`)."""

    def __init__(
        self, config: SchedulerConfig, loop: StepLoop, changed: Callable[[], None], coordinator: Following
    ) -> None:
        self._config = config
        self._loop = loop
        self._changed = changed
        self._coordinator = coordinator
        self._clients: list[WorkerClient] = []
        self._workers = WorkerGroup(())

    async def run(self) -> None:
        """Joins, follows, joins again; until cancelled. ConfigError: the coordinator does not take this shard."""
        attempt = 0
        try:
            while True:
                try:
                    await self._coordinator.join()
                    while True:
                        await self._on(await self._coordinator.next())
                        attempt = 0
                except ConfigError:
                    raise  # trying again does not help
                except LockstepError as error:
                    self._stop(error)
                    delay = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                    log.warning("not in a group: %s; joining again in %.1f s", error.message, delay)
                    attempt += 1
                    await self._release()
                    await asyncio.sleep(delay)
        finally:
            await self._release()
            await self._coordinator.close()

    def lose(self, error: LockstepError) -> None:
        """Gives the group up, and tells the coordinator why; the first reason is the one that is told."""
        if (group := self._loop.group) is not None:
            self._coordinator.lost(group.epoch, error)
            self._stop(error)

    async def _on(self, told: Told) -> None:
        match told:
            case Formed():
                await self._start(told)
            case Ended():
                if self._current(told.epoch):
                    self._stop(told.why)
                await self._release()
            case Called() if self._current(told.epoch):
                with losing(self.lose, f"voting in round {told.round}"):
                    self._loop.call(told.round)
            case Agreed() if self._current(told.epoch):
                self._act(told)

    def _act(self, agreed: Agreed) -> None:
        self._workers.agreed(agreed.header, agreed.data)
        lagged = self._loop.stats.resyncs
        with losing(self.lose, f"acting on round {agreed.round}"):
            self._loop.on_header(agreed.round, agreed.header, agreed.waited)
        if self._loop.stats.resyncs > lagged:
            log.warning("plan %d: took the coordinator's step %d", agreed.header.seq, agreed.header.first_step)

    def _current(self, epoch: int) -> bool:
        return self._loop.group is not None and self._loop.group.epoch == epoch

    async def _start(self, formed: Formed) -> None:
        await self._release()
        group = formed.group
        self._clients = [WorkerClient(address, self._config.security) for address in formed.drivers]
        for client in self._clients:
            client.open_steps(self._on_outcome, self.lose)
        self._workers = WorkerGroup(self._clients)
        self._coordinator.started()
        self._loop.start(group, self._workers, self._coordinator)
        self._changed()
        log.info(
            "group formed: epoch %d, dp rank(s) %d to %d of %d, %s",
            group.epoch, group.ranks.start, group.ranks.stop - 1, group.dp, describe(group),
        )  # fmt: skip

    def _stop(self, why: LockstepError) -> None:
        if self._loop.group is not None:
            log.error("group lost: %s", why.message)
            self._loop.stop(why)
            self._changed()

    async def _release(self) -> None:
        clients, self._clients = self._clients, []
        await asyncio.gather(*(client.close() for client in clients))

    def _on_outcome(self, outcome: PlanOutcome) -> None:
        with losing(self.lose, f"booking plan {outcome.seq}"):
            self._loop.on_outcome(outcome)
