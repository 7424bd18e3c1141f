"""The life of the engine group: wait for its workers, form it under a new epoch, watch it, form it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence

from lockstep_common.errors import ConfigError, Conflict, LockstepError
from lockstep_common.steps import ExpertLoads, GroupConfig, Header, PlanOutcome, WorkerFacts
from lockstep_scheduler.client import Found, WorkerClient, WorkerGroup, open_headers
from lockstep_scheduler.config import SchedulerConfig
from lockstep_scheduler.loop import StepLoop
from lockstep_scheduler.polls import divide
from lockstep_scheduler.settings import Group
from lockstep_scheduler.shards import Hub

log = logging.getLogger(__name__)

CONFIGURE_TIMEOUT = 300.0  # process groups, warm-up
ATTACH_TIMEOUT = 5.0
CLOSE_TIMEOUT = 30.0
JOIN_TIMEOUT = 10.0  # for the other shards, once the workers are loaded; then it is tried again
RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0)


class GroupSupervisor:
    """Keeps the group formed. When a worker is lost, the group forms anew under a higher epoch as soon as all workers are there;
    requests wait for that (see `StepLoop.stop`)."""

    def __init__(
        self, config: SchedulerConfig, loop: StepLoop, changed: Callable[[], None], hub: Hub | None = None
    ) -> None:
        """`hub`: where the other shards of the group are, if there are any."""
        self._config = config
        self._loop = loop
        self._changed = changed
        self._hub = hub
        if hub is not None:
            hub.own, hub.loads, hub.lose = self._on_header, self._on_loads, self.lose
        self._clients = [WorkerClient(address, config.security) for address in config.workers]  # by rank, once formed
        self._drivers: list[WorkerClient] = []  # the first worker of each DP rank: it gets the plans
        self._lost: asyncio.Event = asyncio.Event()
        self._why: LockstepError | None = None
        self._epoch = 0
        self._term = 0
        self._max_rows = self._max_batched_tokens = 0  # of the group, once its workers are loaded

    async def run(self) -> None:
        """Forms, watches, forms again; until cancelled. ConfigError: what was started cannot be a group. Once it was one, a worker
        that came back with other options is in the way until it is replaced."""
        attempt, formed = 0, False
        try:
            while True:
                try:
                    group = await self._form()
                    await self._start(group)
                except LockstepError as error:
                    if isinstance(error, ConfigError) and not formed:
                        raise  # trying again does not help
                    self._loop.hindered(error.message)
                    delay = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                    log.warning("the group does not form: %s; next try in %.1f s", error.message, delay)
                    attempt += 1
                    await self._leave()
                    await asyncio.sleep(delay)
                    continue
                attempt, formed = 0, True
                self._changed()
                log.info(
                    "group formed: epoch %d, %d x %d worker(s), %s", group.epoch, group.dp, group.cp, describe(group)
                )
                await self._lost.wait()
                assert self._why is not None
                log.error("group lost: %s", self._why.message)
                self._loop.stop(self._why)
                if self._hub is not None:
                    self._hub.ended(self._why)
                self._changed()
                await self._leave()
        finally:
            await asyncio.gather(*(client.close() for client in self._clients))

    async def _leave(self) -> None:
        await asyncio.gather(*(client.leave() for client in self._clients))

    def lose(self, error: LockstepError) -> None:
        """Gives the group up; the first reason is the one that is told."""
        if not self._lost.is_set():
            self._why = error
            self._lost.set()

    async def _form(self) -> Group:
        config = self._config
        seen = await asyncio.gather(*(client.loaded(config.load_timeout) for client in self._clients))
        if self._hub is not None:
            await self._hub.complete(JOIN_TIMEOUT)
        order = seats([client.address for client in self._clients], [found.facts for found in seen])
        self._clients, seen = [self._clients[i] for i in order], [seen[i] for i in order]
        models = [found.facts for found in seen]
        cp = models[0].cp
        dp = len(models) // cp
        self._drivers = self._clients[::cp]
        self._divided(dp)
        self._epoch = max(self._epoch, *(found.epoch for found in seen)) + 1
        self._term = max(self._term, *(found.term for found in seen), 1)
        self._lost, self._why = asyncio.Event(), None
        await self._close_open_plans(seen)
        if dp > 1 and config.lockstep == "auto" and not models[0].routed_experts:
            raise ConfigError(
                f"{models[0].model} has no routed experts, so workers gain nothing from stepping together: run one scheduler "
                "for each worker, or couple them all the same with --lockstep always"
            )
        addresses = [client.address for client in self._clients]
        self._max_rows = agreed_limit("max_num_seqs", config.max_num_seqs, addresses, [m.max_rows for m in models])
        self._max_batched_tokens = agreed_limit(
            "max_num_batched_tokens", config.max_num_batched_tokens, addresses, [m.max_batched_tokens for m in models]
        )
        max_model_len = min(facts.max_model_len for facts in models)
        if config.max_model_len > max_model_len:
            raise ConfigError(f"max_model_len {config.max_model_len} is more than the model's {max_model_len}")
        peers = tuple(client.address for client in self._clients)
        store_host, store_port = peers[0].rsplit(":", 1)[0], random.randint(20000, 59999)
        joining = [
            asyncio.create_task(
                client.configure(
                    GroupConfig(
                        epoch=self._epoch,
                        term=self._term,
                        rank=rank,
                        dp_rank=rank // cp,
                        cp_rank=rank % cp,
                        dp=dp,
                        cp=cp,
                        store_host=store_host,
                        store_port=store_port,
                        max_rows=self._max_rows,
                        max_model_len=config.max_model_len or max_model_len,
                        max_batched_tokens=self._max_batched_tokens,
                        max_window=config.max_window,
                        num_blocks=self._loop.num_blocks,
                        peers=peers,
                        capture_by_use=self._loop.reforming,
                    ),
                    CONFIGURE_TIMEOUT,
                )
            )
            for rank, client in enumerate(self._clients)
        ]
        try:
            facts = await asyncio.gather(*joining)
        except LockstepError:
            await self._expel([client for client, task in zip(self._clients, joining, strict=True) if not task.done()])
            raise
        finally:
            for task in joining:
                task.cancel()
        group = self._agree(facts, dp, cp)
        for rank in group.ranks:
            self._drivers[rank].open_steps(self._on_outcome, self.lose)
        for client in self._clients:
            client.watch(self._epoch, self.lose)
        return group

    async def _start(self, group: Group) -> None:
        """Starts this shard's loop, once all others run."""
        own = WorkerGroup([self._drivers[rank] for rank in group.ranks])
        if self._hub is None:
            self._loop.start(group, own)
            return
        drivers = [client.address for client in self._drivers]
        try:
            polls = await self._hub.formed(group, self._divided(group.dp), drivers, JOIN_TIMEOUT)
        except LockstepError as error:
            self._hub.ended(error)
            raise
        self._loop.start(group, own, polls)
        if polls.pending:
            self._loop.call(polls.pending)

    def _divided(self, dp: int) -> list[range]:
        try:
            return divide(dp, max(1, len(self._config.shards)))
        except ValueError as error:
            raise ConfigError(f"--shards: {error}") from None

    async def _expel(self, silent: Sequence[WorkerClient]) -> None:
        """Ends those workers that have not even left the group before: their steps hang, and the others cannot wait for them."""
        for client in silent:
            found = await client.loaded(ATTACH_TIMEOUT)
            if not found.in_group or found.epoch == self._epoch:
                continue  # it waits for others
            log.error("worker %s does not leave epoch %d: expelling it", client.address, found.epoch)
            reason = f"it did not leave epoch {found.epoch} when the group formed anew as epoch {self._epoch}"
            await client.expel(found.epoch, self._term, reason, ATTACH_TIMEOUT)

    async def _close_open_plans(self, seen: Sequence[Found]) -> None:
        """Lets every rank come out of the plans that a scheduler before this one had sent to some of them only."""
        epoch = seen[0].epoch
        if any(found.epoch != epoch or not found.in_group for found in seen):
            return  # the old group is broken, and its collectives fail by themselves
        attached = await asyncio.gather(*(client.attach(epoch, self._term, ATTACH_TIMEOUT) for client in self._drivers))
        highest = max(a.accepted for a in attached)
        await asyncio.gather(
            *(
                client.close_plans(self._term, headers, highest, CLOSE_TIMEOUT)
                for client, headers in zip(self._drivers, open_headers(attached), strict=True)
                if headers
            )
        )

    def _agree(self, facts: list[WorkerFacts], dp: int, cp: int) -> Group:
        hashes = {f.config_hash for f in facts}
        if len(hashes) > 1:
            pairs = ", ".join(
                f"{a} has {f.config_hash}" for a, f in zip((c.address for c in self._clients), facts, strict=True)
            )
            raise Conflict(f"the workers of a group must have one configuration, but {pairs}")
        blocks = {f.groups for f in facts}
        if len(blocks) > 1:
            raise Conflict("the workers of a group must agree on the number of KV blocks; they answered different ones")
        first = facts[0]
        kv = first.groups[0]
        fits = (kv.num_blocks - 1) * kv.block_size
        wanted = self._config.max_model_len or first.max_model_len
        return Group(
            epoch=self._epoch,
            term=self._term,
            dp=dp,
            cp=cp,
            facts=first,
            max_rows=self._max_rows,
            max_model_len=min(wanted, first.max_model_len, fits),
            ranks=self._divided(dp)[0],
            kept=tuple(kept_by(facts[rank * cp : (rank + 1) * cp]) for rank in range(dp)),
            max_batched_tokens=self._max_batched_tokens,
        )

    def _on_outcome(self, outcome: PlanOutcome) -> None:
        with losing(self.lose, f"booking plan {outcome.seq}"):
            self._loop.on_outcome(outcome)

    def _on_header(self, number: int, header: Header | None, waited: float) -> None:
        with losing(self.lose, f"acting on round {number}"):
            if header is None:
                self._loop.call(number)
            else:
                self._loop.on_header(number, header, waited)

    def _on_loads(self, seq: int, loads: ExpertLoads) -> None:
        with losing(self.lose, f"booking expert loads of plan {seq}"):
            self._loop.on_loads(seq, loads)


@contextlib.contextmanager
def losing(lose: Callable[[LockstepError], None], doing: str) -> Iterator[None]:
    """What fails in here costs the group, not the process."""
    try:
        yield
    except LockstepError as error:
        lose(error)
    except Exception as error:
        log.exception("%s failed", doing)
        lose(LockstepError(f"internal error while {doing}: {error!r}"))


def seats(addresses: Sequence[str], facts: Sequence[WorkerFacts]) -> list[int]:
    """Which worker takes each rank of the group: the one that was started for it.

    Workers that were started for no place in particular (a group of one) take the ranks in their order. ConfigError names the
    workers whose places do not make up one group.
    """
    if all(f.dp * f.cp == 1 for f in facts):
        return list(range(len(facts)))
    shapes = {(f.dp, f.cp) for f in facts}
    places = [f"{address} is rank {f.rank} of {f.dp} x {f.cp}" for address, f in zip(addresses, facts, strict=True)]
    size = facts[0].dp * facts[0].cp
    if len(shapes) > 1 or size != len(facts) or {f.rank for f in facts} != set(range(size)):
        raise ConfigError(
            f"{len(facts)} workers that make up no group: {'; '.join(places)}. Start each with the same --dp and --cp and a "
            "--rank of its own, and give all dp * cp addresses to the scheduler"
        )
    return sorted(range(size), key=lambda i: facts[i].rank)


def agreed_limit(name: str, wanted: int, addresses: Sequence[str], able: Sequence[int]) -> int:
    """What a group uses of a limit that each worker has: what is wanted; 0: as much as all of them can.

    `able`: what each worker has memory for. ConfigError if less than is wanted: it names the option `name` on both sides; or if a
    worker says nothing or 0, with which no group could run.
    """
    least = min(able)
    if least <= 0:
        raise ConfigError(
            f"worker {addresses[able.index(least)]} reports {name} {least}: it must be of the scheduler's version, and report "
            "what it has room for"
        )
    if wanted > least:
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"{name} {wanted} is more than worker {addresses[able.index(least)]} has room for: lower {option} of the scheduler "
            f"to {least} or less (0: what all workers can), or start the worker with {option} {wanted}"
        )
    return wanted or least


def kept_by(facts: Sequence[WorkerFacts]) -> int:
    """The epoch of the plans that the caches of a DP rank's workers are as they have left them; 0: not all of them are."""
    epochs = {f.kept_epoch for f in facts}
    return epochs.pop() if len(epochs) == 1 else 0


def describe(group: Group) -> str:
    kv = group.facts.groups[0]
    return (
        f"model {group.facts.model} ({group.facts.dtype} on {group.facts.device}), {group.max_rows} rows a rank, "
        f"context {group.max_model_len}, {kv.num_blocks - 1} KV blocks of {kv.block_size} tokens ({kv.dtype})"
    )
