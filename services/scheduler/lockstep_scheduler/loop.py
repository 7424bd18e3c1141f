"""The step loop of one shard's DP ranks: book what came back, agree on what comes next, send it.

`advance` is the loop, one turn per event (an outcome, a new request, a timer). It is synchronous and never waits: plans
leave through `Workers.send`, outcomes and requests come in as calls, events leave through `emit`, the ledger takes its
batches off the loop. Votes leave through `Polls.cast`; a group of one shard has its header at once, with several it comes in
through `on_header`. Until then no plan is composed, but requests end, come and go: what the votes promised stays true, because
it only ever gets less (`draft.remainder`).

Late commit (P2): at most one plan waits at the workers behind the running one. It is composed when at most `lead_steps` steps
of the running one remain, and then only as early as it must be to arrive in time: what is left of the running plan, less the
measured turnaround, is given to requests that may still come (`_hold`).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep_common.clock import Clock
from lockstep_common.errors import ConfigError, Conflict, DeadlineExceeded, LockstepError, Overloaded, Unavailable
from lockstep_common.steps import U32, Body, ExpertLoads, Header, Kind, PlanOutcome, Sampling
from lockstep_scheduler import admission, plan
from lockstep_scheduler.between import Between
from lockstep_scheduler.blocks import Key
from lockstep_scheduler.booking import Booked, EventBatch
from lockstep_scheduler.books import Books
from lockstep_scheduler.draft import Draft, RankDraft, draft_prefill, remainder
from lockstep_scheduler.eplb import Rebalancer
from lockstep_scheduler.ledger import Ledger
from lockstep_scheduler.lifecycle import Lifecycle
from lockstep_scheduler.outbox import Outbox
from lockstep_scheduler.pace import Pace
from lockstep_scheduler.polls import Alone, Ballot, Polls
from lockstep_scheduler.ranks import Limits, RankState, new_rank
from lockstep_scheduler.request import Choice, End, Phase, Request, Slots
from lockstep_scheduler.settings import Group, Settings
from lockstep_scheduler.stats import Stats
from lockstep_scheduler.vote import Point, Position, Rules, after, point, rules_for

VOTE_INTERVAL = 0.040
VOTE_INTERVALS = {"cpu": 0.160}  # where the services wake up on the cores that compute, fewer plans cost less
SHORTEST_HOLD = 0.001  # a timer costs more than it gains


class Workers(Protocol):
    """The workers of a formed group."""

    def send(self, header: Header, bodies: Sequence[Body]) -> None:
        """Queues plan `header.seq` to every rank; never blocks. A failure is reported to the group's supervisor."""
        ...


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan that was sent and is not completely booked."""

    header: Header
    tables: list[npt.NDArray[np.int64]]  # slot of each row, one table a rank
    rows: list[int]  # rows listed
    progress: list[int]  # steps reported
    complete: list[bool]
    notice: int
    sent: float
    reported: float  # when it started or last reported, as far as known here
    continues: bool = False  # the plan before it ran until it came: the device should not have waited
    hold: float = 0.0  # when the plan behind it is composed; 0 undecided
    since: float = 0.0  # when that was decided
    timed: bool = False  # a timer will turn the loop then
    held: float = 0.0  # seconds that waiting took away from the turnaround that the workers measure
    turnaround: float = math.inf  # the shortest of its ranks': that of the one that reported last
    published: Sequence[Sequence[tuple[int, Key]]] = ()  # by rank: blocks that the plan fills, and names for others


@dataclass(slots=True, eq=False)
class Cast:
    """This shard's ballot in the open round."""

    draft: Draft | None
    at: float
    behind: bool  # a plan was running when it was cast


class StepLoop:
    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        ledger: Ledger,
        emit: Callable[[EventBatch], None],
        defer: Callable[[float], None] | None = None,
    ) -> None:
        """`defer(seconds)` calls `wake` after so many seconds; without it every plan is composed as soon as it may be."""
        self.settings = settings
        self.stats = Stats()
        self._outbox = Outbox(emit)
        self.requests = Lifecycle(settings, clock, ledger, self._outbox, self.stats, self.check)
        self._books = Books(self.requests, ledger, self._outbox, self.stats)
        self.waiting = self.requests.waiting
        self.find, self.resume, self.orphan = self.requests.find, self.requests.resume, self.requests.orphan
        self.submit = self.requests.submit  # the caller calls `advance` when it has submitted all that it holds
        self.group: Group | None = None
        self._between = Between(settings.reform_timeout)
        self.ranks: list[RankState] = []
        self.draining = False
        self._clock = clock
        self._ledger = ledger
        self._defer = defer
        self.rules: Rules | None = None
        self._position = Position(0, 1, 0)
        self._round = 1
        self._called = 0  # the last round that another shard has called this one to
        self._asleep = True  # the last round said `park`, or there was none
        self._heard = 0  # groups that had been queued when the ranks were asked last
        self._cast: Cast | None = None
        self._inflight: deque[InFlight] = deque()
        self._last_booked = 0.0
        self._held_too_long = False  # the running plan ended before the next one was composed
        self.pace = Pace()
        self.experts: Rebalancer | None = None  # at the shard that decides where routed experts lie

    # -- the loop -------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Votes and sends plans while the next one is due. Every rank's body belongs to the one header that all ranks agree on."""
        while self.group is not None and self._cast is None and self._has_news() and self._due():
            for rank in self.ranks:
                self._books.requeue(plan.make_room(rank, self.slots))
            header = self._vote()
            if header is None:
                return
            self._agreed(header)
            if self._asleep:
                return

    def _has_news(self) -> bool:
        """Whether asking the ranks can give another answer than before. After `park` it cannot until this shard is called, until
        something is queued, or until the plan that still ran has ended on every rank here: what waits then waits for rows, and
        the ranks give them back together. So a plan costs one round, however many outcomes it has, and ranks whose rows end in
        the same step are filled again in the same prefill plan."""
        if not self._asleep or self._called >= self._round:
            return True
        return bool(self.waiting) and (not self._inflight or self.waiting.pushed != self._heard)

    def wake(self) -> None:
        """The time that `defer` was asked to wait for is over, or nearly: a timer of whole milliseconds may come too early."""
        if self._inflight:
            self._inflight[0].timed = False
        self.advance()

    def on_header(self, number: int, header: Header, waited: float) -> None:
        """The header of a round in which other shards voted too; `waited`: seconds for which their ballots kept it back."""
        if self.group is None or self._cast is None or number != self._round:
            return  # of a group that is lost, or a repetition
        now = self._clock.now()
        self.stats.voted(now - self._cast.at - waited)
        if self._inflight:
            self._inflight[-1].held += waited  # the workers measure it as a part of the turnaround, and it is not ours
        self._agreed(header)
        self.advance()

    def call(self, number: int) -> None:
        """Somebody has something to say in round `number`: vote, even if there is nothing to say here."""
        self._called = max(self._called, number)
        self.advance()

    def on_outcome(self, outcome: PlanOutcome) -> None:
        """Books one rank's report and goes on; sessions hear of it when the plan that it called for has left."""
        flight = self._flight(outcome)
        if flight is None:
            return
        with self._outbox.held():
            self._book(flight, outcome)
            self.advance()
        if outcome.expert_loads is not None:  # last: to plan a placement takes milliseconds
            self.on_loads(outcome.seq, outcome.expert_loads)

    def _book(self, flight: InFlight, outcome: PlanOutcome) -> None:
        rank = self.ranks[outcome.dp_rank - self.group.ranks.start]  # type: ignore[union-attr]
        self._last_booked = self._clock.now()
        booked = self._books.book(rank, flight.tables[rank.index], outcome)
        self._account(flight, rank, outcome, booked)
        flight.progress[rank.index] = outcome.first + outcome.steps
        flight.reported = self._last_booked
        if outcome.last:
            flight.complete[rank.index] = True
            self._books.settle(rank, outcome.seq)
            while self._inflight and all(self._inflight[0].complete):
                done = self._inflight.popleft()
                self._held_too_long = done.hold > self._last_booked and not self._inflight
                if done.turnaround < math.inf:
                    self.stats.turned(done.turnaround - done.held)
                if self._inflight:
                    self._inflight[0].reported = self._last_booked  # it has just begun

    def on_loads(self, seq: int, loads: ExpertLoads) -> None:
        """Expert loads of a rank, here or on another shard."""
        if self.experts:
            self.experts.add(seq, loads, self._clock.now())
        else:
            self._polls.report(seq, loads)

    def _due(self) -> bool:
        """P2: nothing in flight, or one plan with at most `lead_steps` steps to go, as late as is safe."""
        if not self._inflight:
            return True
        running = self._inflight[0]
        remaining = running.header.k - min(running.progress)
        if len(self._inflight) > 1 or remaining > self.pace.lead_steps:
            return False
        return (running.header.kind is Kind.PREFILL and self._next_is_full()) or self._hold(running, remaining)

    def _next_is_full(self) -> bool:
        """Whether prompts that wait fill the next prefill step: then nothing that still comes could go into it, and holding it
        back would only risk an idle device, as prefill steps are not as even as decode."""
        left = 0 if self._position.owed else self.limits.max_batched_tokens * len(self.ranks)
        for choice in self._unfilled():
            if left <= 0:
                break
            left -= len(choice.tokens) - choice.computed
        return left <= 0 and not self._position.owed

    def _unfilled(self) -> Iterator[Choice]:
        """Choices whose prompts are not computed yet, in the order in which they will be."""
        for rank in self.ranks:
            yield from rank.prefilling
        for group in self.waiting.ordered():
            yield group[0]

    def _hold(self, running: InFlight, remaining: int) -> bool:
        """True if the next plan must be composed now; else the loop turns again when it must."""
        now = self._clock.now()
        if running.hold == 0.0:
            running.hold = self.pace.compose_at(running.header, remaining, running.reported)
            running.since = now
        if self._defer is None or running.hold - now < SHORTEST_HOLD:
            running.held = now - running.since
            return True
        if not running.timed:
            running.timed = True
            self._defer(running.hold - now)
        return False

    def _vote(self) -> Header | None:
        """Casts this shard's votes; the header, if it is known at once. While the group sleeps only who has something to say, or
        is called, votes."""
        self._set_rules()
        draft = self._draft()
        want_k = min(self.rules.a, self.limits.max_window) if self.rules is not None else self.limits.max_window
        first = self.group.ranks.start  # type: ignore[union-attr]
        votes = plan.votes(self.ranks, draft, self.slots, want_k, self.draining, first_rank=first)
        self._heard = self.waiting.pushed
        if self._asleep and self._called < self._round and not any(vote.want or vote.running for vote in votes):
            return None
        now = self._clock.now()
        self._cast = Cast(draft, now, bool(self._inflight))
        ballot = Ballot(self._round, self._position.seq, votes, self.pace.turnaround)
        return self._polls.cast(ballot, self._orders(now), self.rules, now)

    def _orders(self, now: float) -> Position:
        """The position, with what the next plan shall do about experts."""
        if (experts := self.experts) is None:
            return self._position
        return replace(
            self._position,
            placement_version=experts.version,
            move=experts.next_move(),
            report_loads=experts.report_due(now),
        )

    def _agreed(self, header: Header) -> None:
        """A round is over: everybody sends the same plan, or sleeps."""
        cast, self._cast = self._cast, None
        assert cast is not None
        self._round += 1
        self.pace.others = self._polls.turnaround
        self._asleep = header.kind is Kind.PARK
        if self._asleep:
            self._held_too_long = False
            return
        if header.seq != self._position.seq:
            raise Conflict(
                f"the group agreed on plan {header.seq}, but this shard has sent plans up to {self._position.seq - 1}"
            )
        if header.first_step != self._position.step:
            self.stats.resyncs += 1
        self._dispatch(header, cast)

    def _draft(self) -> Draft | None:
        """What could be prefilled; None between vote points, where nobody asks (a shard without the rules always answers)."""
        if not self.waiting and not any(rank.prefilling for rank in self.ranks):
            return None
        running = any(len(plan.decodable(rank, self.slots)) for rank in self.ranks)
        at = self._position
        if running and (at.owed or (self.rules is not None and point(at.step, self.rules) is Point.NONE)):
            return None
        return draft_prefill(self.ranks, self.waiting, self.limits, self._clock.now())

    def _dispatch(self, header: Header, cast: Cast) -> None:
        now, notice = self._clock.now(), self.pace.notice(header)
        for rank in self.ranks:
            rank.pool.take_news()  # of what is booked
        if header.kind is Kind.PREFILL:
            plans = self._prefill(header, cast.draft, now)
        else:
            sent = {"seq": header.seq, "term": self.group.term, "ack": self._ledger.acked, "notice": notice}  # type: ignore[union-attr]
            plans = [plan.commit_decode(rank, self.slots, header.k, **sent) for rank in self.ranks]
        rows = [len(listed) for _, listed in plans]
        if self._alone and not any(rows):
            raise AssertionError(f"plan {header.seq} ({header.kind.name}) is empty though work is pending")
        tables = [self._table(listed) for _, listed in plans]
        flight = InFlight(header, tables, rows, [0] * len(rows), [False] * len(rows), notice, now, now)
        self._position = after(self._position, header, self._point_bound)
        flight.published = [rank.pool.take_news() for rank in self.ranks]
        flight.continues = cast.behind or self._held_too_long
        self._held_too_long = False
        self._inflight.append(flight)
        self.stats.plans[header.kind.name.lower()] += 1
        self.stats.dual_batch_plans += header.dual_batch
        self.workers.send(header, [body for body, _ in plans])
        self._between.written = header.epoch
        if self.experts:
            self.experts.sent(header, now)

    def _prefill(self, header: Header, draft: Draft | None, now: float) -> list[tuple[Body, plan.Slot]]:
        """Each rank's body, of what is still there of its draft, and the slots that it lists."""
        drafts = [RankDraft() for _ in self.ranks] if draft is None else draft.ranks
        if not self._alone:
            drafts = [remainder(mine) for mine in drafts]
        sent = {"seq": header.seq, "term": self.group.term, "ack": self._ledger.acked}  # type: ignore[union-attr]
        budget = header.micro_chunks[0]
        self.waiting.remove(itertools.chain.from_iterable(mine.admits for mine in drafts))
        plans = [
            plan.commit_prefill(rank, mine, self.slots, self.waiting, self.limits, budget, **sent)
            for rank, mine in zip(self.ranks, drafts, strict=True)
        ]
        for choice in draft.passed if draft is not None else ():
            choice.request.passed_over += 1
            choice.request.passed_since = min(choice.request.passed_since, now)
        for group in itertools.chain.from_iterable(mine.admits for mine in drafts):
            first = group[0]
            if first.phase is Phase.WAITING:
                continue
            if first.had >= 0:
                self.stats.recomputed_tokens += first.recomputed
            elif first.index == 0:
                self.stats.admitted += 1
                self.stats.queue_seconds += now - first.request.arrived
                self.stats.prompt_tokens += first.prompt_len
                self.stats.cached_tokens += first.request.cached
        return plans

    # -- the group ------------------------------------------------------------------------------------------------------

    def start(self, group: Group, workers: Workers, polls: Polls | None = None) -> None:
        """A group has formed under a new epoch: counters at 0, and empty caches but for ranks that have kept what this shard's last
        plans left there. What waits is planned at once, and what ran in the epoch before goes on. `workers` are those of the
        group's `ranks`, which this shard drives; `polls` is where it votes. ConfigError: the settings do not fit the workers."""
        self._check_experts(group)
        kv = group.facts.groups[0]
        settings = self.settings
        self.group, self.workers, self._polls = group, workers, polls or Alone()
        self._alone = len(group.ranks) == group.dp
        self.limits = Limits(
            max_rows=group.max_rows,
            max_batched_tokens=settings.max_batched_tokens or group.max_batched_tokens,
            max_model_len=group.max_model_len,
            max_window=settings.max_window,
            watermark=settings.watermark,
            attention_span=settings.attention_span,
        )
        before, kept, same_model = self.ranks, self._between.kept(group), self._between.same_model(group)
        self._between.end()
        self.ranks = [
            new_rank(i, kv.num_blocks, kv.block_size, group.max_rows, group.facts.generated_reusable)
            for i in range(len(group.ranks))
        ]
        for i in kept:
            self.ranks[i].pool = before[i].pool
            self.ranks[i].pool.cut(kv.num_blocks)
        self.slots = Slots(3 * group.max_rows * len(group.ranks), group.max_model_len)
        self._position = Position(group.epoch, 1, 0)
        self._round, self._called, self._asleep, self._cast = 1, 0, True, None
        self._point_bound = settings.max_prefill_tokens_per_point or self.limits.max_batched_tokens
        self._inflight.clear()
        self.pace = Pace()
        self.experts = self._rebalancer(group)
        self._set_rules()
        self._last_booked = self._clock.now()
        if not same_model:
            model = f"{group.facts.model}, configuration {group.facts.config_hash}"
            self.requests.end_all(Unavailable(f"the group has formed again with another model ({model})"))
        self.requests.enter(group, self.limits, self.ranks, self.slots)
        self._books.enter(self.ranks, self.slots)
        self.advance()

    def _check_experts(self, group: Group) -> None:
        if group.facts.moe_layers:
            return
        if self.settings.eplb.enabled:
            raise ConfigError(
                "--enable-eplb: the workers count no loads of routed experts, so there is nothing to move"
            )
        if self.settings.dual is not None:
            raise ConfigError(
                "--enable-dbo: the workers share out no routed experts, so that nothing travels in a step"
            )

    def _rebalancer(self, group: Group) -> Rebalancer | None:
        if not group.facts.moe_layers or group.ranks.start:
            return None
        return Rebalancer(group.facts, group.dp * group.cp, group.dp, self.settings.eplb)

    def stop(self, error: LockstepError) -> None:
        """The group is lost. Requests wait, with the tokens that are booked, for it to form again; if it has not within
        `reform_timeout`, they end with an error that says why."""
        if self.group is None:
            return
        for flight in self._inflight:
            for rank in self.ranks:
                if not flight.complete[rank.index]:
                    rank.pool.retract(flight.published[rank.index])
        self._books.abandon(self._position.seq - 1, error)
        self._between.lose(self.group, error, self._clock.now())
        self.group = self._cast = None

    @property
    def known(self) -> Group | None:
        """The group that is formed, or that was and forms again."""
        return self.group or (self._between.lost if self.reforming else None)

    @property
    def ready(self) -> bool:
        """Whether requests are taken: a group that forms again will run them."""
        return self.known is not None and not self.draining

    @property
    def reforming(self) -> bool:
        return self._between.reforming

    @property
    def num_blocks(self) -> int:
        """See `Between.num_blocks`."""
        return self._between.num_blocks

    def hindered(self, why: str) -> None:
        """The group has tried to form again, and could not."""
        self._between.hindered = why

    # -- requests -------------------------------------------------------------------------------------------------------

    def check(self, prompt: U32, sampling: Sampling, n: int, adapter: str = "") -> None:
        """Raises what `submit` would refuse the request with; changes nothing but the count of what was refused."""
        if (known := self.known) is None:
            raise Unavailable("the engine group is not formed; try again", retry_after_ms=1000)
        if self.draining:
            raise Unavailable("the scheduler is shutting down; try another one", retry_after_ms=1000)
        vocab_size, pool = known.facts.vocab_size, self.ranks[0].pool
        admission.check_possible(prompt, sampling, n, adapter, vocab_size=vocab_size, limits=self.limits, pool=pool)
        try:
            admission.check_room(len(self.waiting), n, self.settings.max_waiting)
        except Overloaded:
            self.stats.refused += 1
            raise

    def cancel(self, request: Request) -> None:
        self.requests.end(request, End.CANCELLED, None)
        self.advance()

    def finish(self, request: Request, index: int, offset: int) -> None:
        """See `Lifecycle.finish`."""
        self.requests.finish(request, index, offset)
        self.advance()

    @property
    def unfinished(self) -> int:
        return self.requests.unfinished

    def _generated(self, choice: Choice) -> int:
        return self.requests.generated(choice)

    def _tokens(self, choice: Choice) -> U32:
        return self.requests.tokens(choice)

    def tick(self) -> LockstepError | None:
        """What time alone brings about; call it a few times a second. Returns an error if the workers are silent too long."""
        self.requests.expire()
        if self.group is None:
            if error := self._between.overdue(self._clock.now()):
                self._between.end()
                self.requests.end_all(error)
            return None
        if not self._inflight:
            for rank in self.ranks:
                self._books.settle(rank, self._position.seq - 1)
        self.advance()
        now = self._clock.now()
        if self._inflight and now - max(self._last_booked, self._inflight[0].sent) > self.settings.worker_timeout:
            flight = self._inflight[0]
            missing = [rank for rank, done in zip(self.group.ranks, flight.complete, strict=True) if not done]
            return DeadlineExceeded(
                f"no outcome of plan {flight.header.seq} ({flight.header.kind.name.lower()}, k={flight.header.k}) for "
                f"{self.settings.worker_timeout:.0f} s; missing: dp rank {', '.join(map(str, missing))}"
            )
        return self._polls.overdue(now)

    @property
    def running(self) -> int:
        return sum(rank.rows_in_use for rank in self.ranks) if self.group else 0

    @property
    def kv_usage(self) -> float:
        return max(rank.pool.usage for rank in self.ranks) if self.group else 0.0

    @property
    def waiting_uncached_tokens(self) -> int:
        """Prompt tokens of the waiting that the cache of no rank covers; the head of a long queue is looked up, the rest
        counts in full."""
        total = 0
        for position, group in enumerate(self.waiting.ordered()):
            first = group[0]
            hit = 0
            if self.group and position < 32 and not first.request.scores_due:
                size = self.ranks[0].pool.block_size
                hit = size * max(len(rank.pool.lookup(first.keys, len(first.keys))) for rank in self.ranks)
            total += max(1, len(first.tokens) - hit)
        return total

    @property
    def step(self) -> int:
        return self._position.step if self.group else 0

    @property
    def silence(self) -> float:
        return self._clock.now() - self._last_booked if self.group and self._inflight else 0.0

    # -- booking --------------------------------------------------------------------------------------------------------

    def _flight(self, outcome: PlanOutcome) -> InFlight | None:
        """The plan that an outcome belongs to; None for what another epoch, or a repetition, left behind."""
        if self.group is None or outcome.epoch != self.group.epoch:
            return None
        rank = outcome.dp_rank - self.group.ranks.start
        for flight in self._inflight:
            if flight.header.seq == outcome.seq and outcome.first == flight.progress[rank]:
                return flight
        return None

    def _account(self, flight: InFlight, rank: RankState, outcome: PlanOutcome, booked: Booked) -> None:
        stats = self.stats
        stats.generation_tokens += len(booked.tokens)
        stats.idle_seconds += outcome.idle_ns * 1e-9
        if flight.header.kind is Kind.DECODE:
            stats.overrun_row_steps += flight.rows[rank.index] * outcome.steps - len(outcome.words)
            if not flight.rows[rank.index]:
                stats.placeholder_steps += outcome.steps
            if outcome.step_ns and outcome.steps:
                self.pace.decoded(outcome.step_ns * 1e-9)
        elif outcome.step_ns:
            self.pace.prefilled(outcome.step_ns * 1e-9, sum(flight.header.micro_chunks))
        if outcome.turnaround_ns:
            turnaround = outcome.turnaround_ns * 1e-9
            stats.lead_seconds += (flight.header.k - flight.notice) * self.pace.step - turnaround
            stats.leads += 1
            self.pace.turned(turnaround - flight.held)
            flight.turnaround = min(flight.turnaround, turnaround)
        elif outcome.first == 0 and flight.continues:
            self.pace.came(outcome.idle_ns * 1e-9)

    def _set_rules(self) -> None:
        """The coordinator's, that is of the shard of DP rank 0; the others vote without knowing whether it is their turn."""
        assert self.group is not None
        settings = self.settings
        if self.group.ranks.start > 0:
            self.rules = None
        elif settings.a:
            self.rules = Rules(settings.a, settings.b or 4 * settings.a, settings.max_window, settings.dual)
        else:
            interval = settings.vote_interval or VOTE_INTERVALS.get(self.group.facts.device, VOTE_INTERVAL)
            self.rules = rules_for(self.pace.step, interval, settings.max_window, self.group.dp, settings.dual)

    def _table(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        table = np.full(self.limits.max_rows, -1, np.int64)
        table[self.slots.row[slots]] = slots
        return table
