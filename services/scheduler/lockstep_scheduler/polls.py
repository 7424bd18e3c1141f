"""Where the votes of a group meet, and how agreements are numbered. Pure: time comes in as an argument.

Every agreement is a *round*, counted from 1 in each epoch. A round ends with one header: a plan for all ranks, or `park`. Rounds
are not plans: `park` takes a round and no seq. After `park` the next round is open and nobody has to vote in it until somebody
has something to say; then all others are called. As sleeping itself is a numbered agreement that every shard has taken part in,
new work and sleep cannot cross: work that came after a shard's vote is voted on in the next round.

With one scheduler the round is a call of `agree` (`Alone`). With several shards shard 0 is the `Coordinator` and keeps a `Tally`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lockstep_common.errors import Conflict, DeadlineExceeded, LockstepError
from lockstep_common.steps import ExpertLoads, Header, Kind
from lockstep_scheduler.vote import Position, Rules, Vote, agree

KEPT_ROUNDS = 2  # a shard asks again for the round that it is in, or for the one before


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one shard says in a round."""

    round: int
    seq: int  # of the plan that is voted on
    votes: Sequence[Vote]  # one a DP rank of the shard
    turnaround: float = 0.0  # seconds that its next plan takes to reach its workers, the vote's way included


class Polls(Protocol):
    """Where a shard casts its ballots."""

    @property
    def turnaround(self) -> float:
        """The longest of the other shards, if this one composes in time for all; else 0."""
        ...

    def cast(self, ballot: Ballot, position: Position, rules: Rules | None, now: float) -> Header | None:
        """The round's header if it is known at once; otherwise it comes to `StepLoop.on_header`."""
        ...

    def report(self, seq: int, loads: ExpertLoads) -> None:
        """A rank's expert loads, from a shard that does not decide where experts lie."""
        ...

    def overdue(self, now: float) -> LockstepError | None:
        """What to give the group up for: a round that has waited for too long, with the names of those that it waits for."""
        ...


class Alone:
    """The one scheduler of a group: its own votes are all there are."""

    turnaround = 0.0

    def cast(self, ballot: Ballot, position: Position, rules: Rules | None, now: float) -> Header | None:
        assert rules is not None
        return agree(position, rules, ballot.votes)

    def report(self, seq: int, loads: ExpertLoads) -> None:
        pass  # this shard decides

    def overdue(self, now: float) -> LockstepError | None:
        return None


def divide(dp: int, shards: int) -> list[range]:
    """The DP ranks of each shard: contiguous, in order, as even as can be; ValueError if a shard would have none."""
    if not 1 <= shards <= dp:
        raise ValueError(f"{dp} DP rank(s) cannot be divided among {shards} shards: each needs one at least")
    return [range(i * dp // shards, (i + 1) * dp // shards) for i in range(shards)]


@dataclass(slots=True)
class Round:
    """The open round of a tally."""

    number: int
    ballots: dict[int, Ballot] = field(default_factory=dict)  # by shard
    arrived: dict[int, float] = field(default_factory=dict)
    position: Position | None = None  # with the coordinator's own ballot
    rules: Rules | None = None


class Tally:
    """The rounds of one epoch, at the coordinator.

    Each shard casts once a round; a repeat changes nothing and gets the answer that there is, also when the round is decided
    (the last KEPT_ROUNDS are kept). The header is `agree` over all votes by rank, at the coordinator's position and rules.
    """

    def __init__(self, ranks: Sequence[range], names: Sequence[str], timeout: float) -> None:
        """`ranks`: the DP ranks of each shard; `names`: what to call them in errors; `timeout`: seconds for a round."""
        self.round = Round(1)
        self.asleep = True  # the last round said `park`: who casts first calls the others
        self.longest_turnaround = 0.0  # of the other shards, as of the last round
        self._ranks = [tuple(r) for r in ranks]
        self._names = names
        self._timeout = timeout
        self._decided: dict[int, Header] = {}
        self._waited: dict[int, dict[int, float]] = {}

    def cast(
        self, shard: int, ballot: Ballot, now: float, position: Position | None = None, rules: Rules | None = None
    ) -> Header | None:
        """Counts a ballot; the round's header if it is decided. `position` and `rules` come with shard 0's own.

        Conflict: the ballot is not of this round, or not of this shard's ranks.
        """
        if ballot.round < self.round.number:
            if (header := self._decided.get(ballot.round)) is None:
                raise Conflict(f"{self._names[shard]} votes in round {ballot.round}; round {self.round.number} is open")
            return header
        if ballot.round > self.round.number:
            raise Conflict(
                f"{self._names[shard]} votes in round {ballot.round} before round {self.round.number} is over"
            )
        if (ranks := tuple(vote.rank for vote in ballot.votes)) != self._ranks[shard]:
            raise Conflict(f"{self._names[shard]} votes for dp rank(s) {ranks}, but owns {self._ranks[shard]}")
        if shard not in self.round.ballots:
            self.round.ballots[shard] = ballot
            self.round.arrived[shard] = now
            if shard == 0:
                self.round.position, self.round.rules = position, rules
        if self.missing:
            return None
        return self._decide(now)

    @property
    def shards(self) -> int:
        return len(self._ranks)

    @property
    def missing(self) -> list[int]:
        """Shards whose ballot the open round lacks."""
        return [shard for shard in range(self.shards) if shard not in self.round.ballots]

    def waited(self, number: int, shard: int) -> float:
        """Seconds that a decided round's header was kept from a shard by the ballots of others."""
        return self._waited.get(number, {}).get(shard, 0.0)

    def overdue(self, now: float) -> LockstepError | None:
        """An error that names the shards and ranks that the open round has waited for too long."""
        arrived = self.round.arrived
        if not arrived or now - min(arrived.values()) <= self._timeout:
            return None
        seq = next(iter(self.round.ballots.values())).seq
        lacking = "; ".join(
            f"{self._names[shard]} (dp rank {', '.join(map(str, self._ranks[shard]))})" for shard in self.missing
        )
        return DeadlineExceeded(f"no vote on plan {seq} for {self._timeout:.0f} s; missing: {lacking}")

    def _decide(self, now: float) -> Header:
        done = self.round
        assert done.position is not None and done.rules is not None
        seqs = {shard: ballot.seq for shard, ballot in done.ballots.items()}
        if len(set(seqs.values())) > 1:
            counts = ", ".join(f"{self._names[shard]} is at plan {seq}" for shard, seq in sorted(seqs.items()))
            raise Conflict(f"the shards have not sent the same plans: {counts}")
        header = agree(
            done.position, done.rules, [v for shard in sorted(done.ballots) for v in done.ballots[shard].votes]
        )
        self._decided[done.number] = header
        self._waited[done.number] = {shard: now - at for shard, at in done.arrived.items()}
        for kept in (self._decided, self._waited):
            kept.pop(done.number - KEPT_ROUNDS, None)
        self.longest_turnaround = max((b.turnaround for shard, b in done.ballots.items() if shard), default=0.0)
        self.asleep = header.kind is Kind.PARK
        self.round = Round(done.number + 1)
        return header


class Coordinator:
    """The polls of shard 0: counts its own ballots and those that `receive` brings, and tells every shard the header.

    `tell(shard, round, header, waited)` carries a header to a shard, or with None the call to vote in that round; also to shard 0
    itself, and last to it, so that headers are under way before it composes its own plans. It must keep the order of what it is
    given for one shard. `lose` takes the Conflict of a ballot that cannot be counted.
    """

    def __init__(
        self,
        tally: Tally,
        tell: Callable[[int, int, Header | None, float], None],
        lose: Callable[[LockstepError], None],
    ) -> None:
        self.tally = tally
        self._tell = tell
        self._lose = lose

    @property
    def turnaround(self) -> float:
        return self.tally.longest_turnaround

    def cast(self, ballot: Ballot, position: Position, rules: Rules | None, now: float) -> Header | None:
        self._count(0, ballot, now, position, rules)
        return None

    @property
    def pending(self) -> int:
        """The open round, if others have voted in it before this shard's loop was there to be called; else 0."""
        return self.tally.round.number if self.tally.round.ballots else 0

    def receive(self, shard: int, ballot: Ballot, now: float) -> None:
        """A ballot of another shard."""
        self._count(shard, ballot, now)

    def report(self, seq: int, loads: ExpertLoads) -> None:
        pass  # this shard decides

    def overdue(self, now: float) -> LockstepError | None:
        return self.tally.overdue(now)

    def _count(
        self, shard: int, ballot: Ballot, now: float, position: Position | None = None, rules: Rules | None = None
    ) -> None:
        repeat = ballot.round < self.tally.round.number
        try:
            header = self.tally.cast(shard, ballot, now, position, rules)
        except Conflict as error:
            self._lose(error)
            return
        if header is not None:
            for one in [shard] if repeat else reversed(range(self.tally.shards)):
                self._tell(one, ballot.round, header, self.tally.waited(ballot.round, one))
        elif self.tally.asleep and len(self.tally.round.ballots) == 1:
            for one in reversed(self.tally.missing):  # wakes those that sleep, with the first ballot of a round
                self._tell(one, ballot.round, None, 0.0)
