"""The stream between the shards of a group: `Shards` of scheduler.proto, served by the coordinator and followed by the others.

Protobuf stops here. What a follower reads is one of `Formed`, `Called`, `Agreed` and `Ended`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from lockstep_common import rpc
from lockstep_common.clock import Clock
from lockstep_common.errors import ConfigError, Conflict, DeadlineExceeded, InvalidRequest, LockstepError, Unavailable
from lockstep_common.steps import ExpertLoads, Header
from lockstep_proto.v1 import scheduler_pb2, scheduler_pb2_grpc
from lockstep_scheduler.client import read_facts, read_header, read_loads, write_header, write_loads
from lockstep_scheduler.config import SchedulerConfig
from lockstep_scheduler.polls import Ballot, Coordinator, Tally
from lockstep_scheduler.settings import Group
from lockstep_scheduler.vote import Position, Rules, Vote

log = logging.getLogger(__name__)

UNREAD_MESSAGES = 4096  # a shard that does not read is lost
COORDINATOR_SLACK = 5.0  # seconds: the coordinator, which can name who is missing, gives a round up first


@dataclass(frozen=True, slots=True)
class Formed:
    """The group has formed. `drivers`: addresses of the workers that take the plans of the shard's ranks."""

    group: Group
    drivers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Called:
    epoch: int
    round: int


@dataclass(frozen=True, slots=True)
class Agreed:
    epoch: int
    round: int
    header: Header
    data: bytes  # the header as it came
    waited: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The group is lost."""

    epoch: int
    why: LockstepError


Told = Formed | Called | Agreed | Ended


# -- the coordinator's side ----------------------------------------------------------------------------------------------


class Hub(scheduler_pb2_grpc.ShardsServicer):
    """All streams of the other shards. The supervisor of the group forms and ends it through this, and gets what comes of it:
    `own(round, header, waited)` is this shard's header, or with None the call to vote; `loads(seq, loads)` are a rank's expert
    loads; `lose(why)` gives the group up."""

    own: Callable[[int, Header | None, float], None]
    loads: Callable[[int, ExpertLoads], None]
    lose: Callable[[LockstepError], None]

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._links: dict[int, _Link] = {}
        self._news = asyncio.Event()  # a shard has joined, or started
        self._group: Group | None = None
        self._polls: Coordinator | None = None
        self._sent: tuple[Header | None, bytes] = (None, b"")  # the last header, as every shard gets it

    @property
    def names(self) -> list[str]:
        return [f"scheduler shard {shard} ({address})" for shard, address in enumerate(self._config.shards)]

    @property
    def missing(self) -> list[int]:
        return [shard for shard in range(1, len(self._config.shards)) if shard not in self._links]

    async def complete(self, timeout: float) -> None:
        """Returns once every other shard has joined; DeadlineExceeded names those that have not."""
        await self._until(lambda: self.missing, "not joined", timeout)

    async def formed(self, group: Group, ranks: Sequence[range], drivers: Sequence[str], timeout: float) -> Coordinator:
        """Tells every shard its part of a group, whose polls these are, and waits until all have started. Unavailable: a shard
        has gone meanwhile. DeadlineExceeded names those that have not started."""
        if self.missing:
            raise Unavailable(f"{self.names[self.missing[0]]} has gone while the group was formed")
        tally = Tally(ranks, self.names, self._config.vote_timeout)
        self._group, self._polls = group, Coordinator(tally, self._tell, self.lose)
        for shard, link in self._links.items():
            own = ranks[shard]
            message = scheduler_pb2.GroupFormed(
                epoch=group.epoch,
                term=group.term,
                dp=group.dp,
                cp=group.cp,
                first_rank=own.start,
                drivers=[drivers[rank] for rank in own],
                facts=rpc.write_facts(group.facts),
                max_rows=group.max_rows,
                max_model_len=group.max_model_len,
                kept=group.kept,
                max_batched_tokens=group.max_batched_tokens,
            )
            link.send(scheduler_pb2.FromCoordinator(formed=message))
        polls = self._polls
        await self._until(lambda: self._idle(group.epoch), f"not started in epoch {group.epoch}", timeout)
        return polls

    def _idle(self, epoch: int) -> list[int]:
        """Shards that have not started in this epoch. Unavailable: one that was told of it has gone."""
        for shard in range(1, len(self._config.shards)):
            if shard not in self._links or self._links[shard].epoch != epoch:
                raise Unavailable(f"{self.names[shard]} has gone while the group was formed")
        return [shard for shard, link in sorted(self._links.items()) if link.started != epoch]

    async def _until(self, lacking: Callable[[], list[int]], what: str, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                while lacking():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            who = ", ".join(self.names[shard] for shard in lacking())
            raise DeadlineExceeded(f"{what} within {timeout:.0f} s: {who}") from None

    def ended(self, why: LockstepError) -> None:
        """Tells every shard that the group is lost."""
        if self._group is None:
            return
        lost = scheduler_pb2.GroupLost(epoch=self._group.epoch, why=rpc.detail(why))
        for link in self._links.values():
            link.send(scheduler_pb2.FromCoordinator(lost=lost))
        self._group = self._polls = None

    async def Follow(  # type: ignore[override]
        self, request_iterator: AsyncIterator[scheduler_pb2.FromShard], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        first = await anext(aiter(request_iterator), None)
        try:
            shard = self._admit(first)
        except LockstepError as error:
            await rpc.abort(context, error)
        link = _Link()
        if (before := self._links.get(shard)) is not None:  # it came back before its old stream was seen to break
            before.end.set()
        self._links[shard] = link
        self._news.set()
        log.info("%s joined", self.names[shard])
        tasks = [
            asyncio.create_task(self._read(shard, link, request_iterator)),
            asyncio.create_task(link.write(context)),
            asyncio.create_task(link.end.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if isinstance(failure := task.exception(), LockstepError):
                    await rpc.abort(context, failure)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._links.get(shard) is link:
                del self._links[shard]
                self._news.set()
            log.info("%s left", self.names[shard])
            if self._group is not None and link.epoch == self._group.epoch:
                self.lose(Unavailable(f"{self.names[shard]} is gone"))

    def _admit(self, message: scheduler_pb2.FromShard | None) -> int:
        """The place of the shard that joins with its first message."""
        if message is None or message.WhichOneof("message") != "join":
            raise InvalidRequest("the first message of a shard must be Join")
        join = message.join
        if not 1 <= join.shard < len(self._config.shards):
            raise Conflict(
                f"shard {join.shard} has no place among the {len(self._config.shards)} shard(s) of this group"
            )
        mine = self._config.agreed
        for name in sorted(mine.keys() | dict(join.settings).keys()):
            if mine.get(name) != join.settings.get(name):
                raise Conflict(
                    f"the shards of a group must be started with the same {name}: {self.names[join.shard]} has "
                    f"{join.settings.get(name)!r}, the coordinator {mine.get(name)!r}"
                )
        return int(join.shard)

    async def _read(self, shard: int, link: _Link, messages: AsyncIterator[scheduler_pb2.FromShard]) -> None:
        async for message in messages:
            kind = message.WhichOneof("message")
            if kind not in ("started", "ballot", "lost", "loads"):
                raise InvalidRequest(f"a shard has no message {kind!r} after Join")
            told: Any = getattr(message, kind)
            if self._group is None or self._polls is None or told.epoch != self._group.epoch:
                log.info("%s: %s of epoch %d, which is over", self.names[shard], kind, told.epoch)
            elif kind == "started":
                link.started = told.epoch
                self._news.set()
            elif kind == "ballot":
                self._count(shard, told)
            elif kind == "loads":
                self.loads(told.seq, read_loads(told.loads))
            else:
                why = rpc.from_detail(told.why)
                self.lose(type(why)(f"{self.names[shard]}: {why.message}"))

    def _count(self, shard: int, message: scheduler_pb2.Ballot) -> None:
        assert self._group is not None and self._polls is not None
        if message.term != self._group.term:
            self.lose(Conflict(f"{self.names[shard]} votes under term {message.term}, this is {self._group.term}"))
            return
        votes = [
            Vote(v.rank, v.want, v.running, v.rows_after, v.chunk_tokens, v.max_k, v.draining) for v in message.votes
        ]
        ballot = Ballot(message.round, message.seq, votes, message.turnaround_ns * 1e-9)
        self._polls.receive(shard, ballot, self._clock.now())

    def _tell(self, shard: int, number: int, header: Header | None, waited: float) -> None:
        assert self._group is not None
        if shard == 0:  # after the streams' writers have had their turn
            asyncio.get_running_loop().call_soon(self._deliver, self._group.epoch, number, header, waited)
            return
        if header is None:
            call = scheduler_pb2.CallToVote(epoch=self._group.epoch, round=number)
            message = scheduler_pb2.FromCoordinator(call=call)
        else:
            if self._sent[0] is not header:
                self._sent = (header, write_header(header))
            agreement = scheduler_pb2.Agreement(
                epoch=self._group.epoch, round=number, header=self._sent[1], waited_ns=int(waited * 1e9)
            )
            message = scheduler_pb2.FromCoordinator(agreement=agreement)
        if (link := self._links.get(shard)) is not None:  # else it is being lost
            link.send(message)

    def _deliver(self, epoch: int, number: int, header: Header | None, waited: float) -> None:
        if self._group is not None and self._group.epoch == epoch:
            self.own(number, header, waited)


class _Link:
    """One shard's stream, as the coordinator writes to it."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.epoch = 0  # of the last group that it is a part of
        self.started = 0  # the last epoch that it has started in
        self._outgoing: asyncio.Queue[scheduler_pb2.FromCoordinator] = asyncio.Queue(UNREAD_MESSAGES)

    def send(self, message: scheduler_pb2.FromCoordinator) -> None:
        if message.HasField("formed"):
            self.epoch = message.formed.epoch
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self.end.set()

    async def write(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            await context.write(await self._outgoing.get())


# -- the other shards' side ----------------------------------------------------------------------------------------------


class Following:
    """A shard's stream to its coordinator, and its polls. Errors are LockstepErrors that name the coordinator."""

    turnaround = 0.0  # nobody waits for this shard's header

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._name = f"the coordinator ({config.shards[0]})"
        self._channel = rpc.open_channel(config.shards[0], config.security)
        self._stub: Any = scheduler_pb2_grpc.ShardsStub(self._channel)
        self._call: Any = None
        self._outgoing: asyncio.Queue[scheduler_pb2.FromShard] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self._group: Group | None = None
        self._open: tuple[Ballot, float] | None = None  # the ballot that waits for its header, and since when

    async def join(self) -> None:
        """Opens the stream; whether the coordinator takes it shows at the first `next`."""
        await self.leave()
        self._outgoing = asyncio.Queue()
        join = scheduler_pb2.Join(shard=self._config.shard, settings=self._config.agreed)
        self._outgoing.put_nowait(scheduler_pb2.FromShard(join=join))
        self._call = self._stub.Follow(metadata=rpc.call_metadata(self._config.security))
        self._writer = asyncio.create_task(self._write(self._call, self._outgoing))

    async def next(self) -> Told:
        """What the coordinator says next. ConfigError: it does not take this shard as it was started."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        if message is grpc.aio.EOF:
            code, details = await self._call.code(), await self._call.details()
            trailers = await self._call.trailing_metadata()
            if code is grpc.StatusCode.OK:
                raise Unavailable(f"{self._name} closed the stream")
            raise self._failure(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details=details))
        return self._read(message)

    def cast(self, ballot: Ballot, position: Position, rules: Rules | None, now: float) -> Header | None:
        assert self._group is not None
        self._open = (ballot, now)
        votes = [
            scheduler_pb2.RankVote(
                rank=v.rank, want=v.want, running=v.running, rows_after=v.rows_after, chunk_tokens=v.chunk_tokens,
                max_k=v.max_k, draining=v.draining,
            )
            for v in ballot.votes
        ]  # fmt: skip
        message = scheduler_pb2.Ballot(
            epoch=self._group.epoch,
            term=self._group.term,
            round=ballot.round,
            seq=ballot.seq,
            votes=votes,
            turnaround_ns=int(ballot.turnaround * 1e9),
        )
        self._outgoing.put_nowait(scheduler_pb2.FromShard(ballot=message))
        return None

    def report(self, seq: int, loads: ExpertLoads) -> None:
        """Hands a rank's expert loads on to where they are wanted."""
        assert self._group is not None
        message = scheduler_pb2.RankLoads(epoch=self._group.epoch, seq=seq, loads=write_loads(loads))
        self._outgoing.put_nowait(scheduler_pb2.FromShard(loads=message))

    def started(self) -> None:
        """Tells the coordinator that this shard drives its ranks."""
        assert self._group is not None
        started = scheduler_pb2.ShardStarted(epoch=self._group.epoch)
        self._outgoing.put_nowait(scheduler_pb2.FromShard(started=started))

    def lost(self, epoch: int, why: LockstepError) -> None:
        """Tells the coordinator that this shard cannot go on."""
        lost = scheduler_pb2.GroupLost(epoch=epoch, why=rpc.detail(why))
        self._outgoing.put_nowait(scheduler_pb2.FromShard(lost=lost))

    def overdue(self, now: float) -> LockstepError | None:
        timeout = self._config.vote_timeout + COORDINATOR_SLACK
        if self._open is None or now - self._open[1] <= timeout:
            return None
        return DeadlineExceeded(f"{self._name} has sent no header of plan {self._open[0].seq} for {timeout:.0f} s")

    async def leave(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
            self._writer = None
        if self._call is not None:
            self._call.cancel()
            self._call = None
        self._group = self._open = None

    async def close(self) -> None:
        await self.leave()
        await self._channel.close()

    def _read(self, message: scheduler_pb2.FromCoordinator) -> Told:
        match message.WhichOneof("message"):
            case "formed":
                self._open = None
                return self._formed(message.formed)
            case "call":
                return Called(message.call.epoch, message.call.round)
            case "agreement":
                told = message.agreement
                self._open = None
                return Agreed(told.epoch, told.round, read_header(told.header), told.header, told.waited_ns * 1e-9)
            case "lost":
                return Ended(message.lost.epoch, rpc.from_detail(message.lost.why))
            case other:
                raise LockstepError(f"{self._name} sent a message {other!r} that this version does not know")

    def _formed(self, message: scheduler_pb2.GroupFormed) -> Formed:
        self._group = Group(
            epoch=message.epoch,
            term=message.term,
            dp=message.dp,
            facts=read_facts(message.facts),
            max_rows=message.max_rows,
            max_model_len=message.max_model_len,
            cp=message.cp,
            ranks=range(message.first_rank, message.first_rank + len(message.drivers)),
            kept=tuple(message.kept),
            max_batched_tokens=message.max_batched_tokens,
        )
        return Formed(self._group, tuple(message.drivers))

    def _failure(self, error: grpc.aio.AioRpcError) -> LockstepError:
        found = rpc.from_rpc_error(error, self._name)
        return ConfigError(found.message) if isinstance(found, Conflict) else found

    async def _write(self, call: Any, outgoing: asyncio.Queue[scheduler_pb2.FromShard]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader reports it
            while True:
                await call.write(await outgoing.get())
