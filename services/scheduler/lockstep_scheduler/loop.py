"""The step loop of one engine group: book what came back, agree on what comes next, send it.

`advance` is the loop, one turn per event (an outcome, a new request, a timer). It is synchronous and never waits: plans
leave through `Workers.send`, outcomes and requests come in as calls, events leave through `emit`, the ledger takes its
batches off the loop.

Late commit (P2): at most one plan waits at the workers behind the running one. It is composed when at most `lead_steps` steps
of the running one remain, and then only as early as it must be to arrive in time: what is left of the running plan, less the
measured turnaround, is given to requests that may still come (`_hold`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep_common.clock import Clock
from lockstep_common.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    LockstepError,
    Overloaded,
    RequestLost,
    Unavailable,
    Unsupported,
)
from lockstep_common.steps import (
    MAX_LOGPROBS,
    MAX_PROMPT_SCORES,
    U32,
    Body,
    Header,
    Kind,
    PlanOutcome,
    Sampling,
    WorkerFacts,
)
from lockstep_scheduler import plan
from lockstep_scheduler.blocks import chain, root
from lockstep_scheduler.booking import Booked, EventBatch, book, end_event, events, replay_event, scores_event
from lockstep_scheduler.ledger import Ledger
from lockstep_scheduler.pace import Pace
from lockstep_scheduler.plan import Limits, RankState, Waiting
from lockstep_scheduler.request import Choice, End, Phase, Request, Slots
from lockstep_scheduler.vote import Point, Position, Rules, agree, point, rules_for

VOTE_INTERVAL = 0.040
VOTE_INTERVALS = {"cpu": 0.160}  # where the services wake up on the cores that compute, fewer plans cost less
SHORTEST_HOLD = 0.001  # a timer costs more than it gains


class Workers(Protocol):
    """The workers of a formed group."""

    def send(self, header: Header, bodies: Sequence[Body]) -> None:
        """Queues plan `header.seq` to every rank; never blocks. A failure is reported to the group's supervisor."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """How the loop behaves; see config.py for what each option means."""

    max_batched_tokens: int = 2048
    max_window: int = 16
    max_waiting: int = 1024
    vote_interval: float = 0.0  # seconds; 0: by device
    a: int = 0
    b: int = 0
    watermark: float = 0.95
    max_prefill_tokens_per_point: int = 0
    prefix_caching: bool = True
    worker_timeout: float = 60.0
    grace: float = 10.0


@dataclass(frozen=True, slots=True)
class Group:
    """A formed engine group."""

    epoch: int
    term: int
    dp: int
    facts: WorkerFacts
    max_rows: int
    max_model_len: int


@dataclass(slots=True)
class Stats:
    """Counters since the start of the process, read by Load and by the metrics page."""

    generation_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    overrun_row_steps: int = 0
    placeholder_steps: int = 0
    nonfinite_rows: int = 0
    plans: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    requests: int = 0
    refused: int = 0
    ends: dict[str, int] = field(default_factory=lambda: {end.name.lower(): 0 for end in End if end})
    lead_seconds: float = 0.0
    leads: int = 0
    idle_seconds: float = 0.0
    queue_seconds: float = 0.0
    admitted: int = 0


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
    held: float = 0.0  # seconds that this took away from the turnaround that the workers measure


class StepLoop:
    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        ledger: Ledger,
        emit: Callable[[EventBatch], None],
        defer: Callable[[float], None] | None = None,
    ) -> None:
        """`defer(seconds)` calls `advance` after so many seconds; without it every plan is composed as soon as it may be."""
        self.settings = settings
        self.stats = Stats()
        self.waiting = Waiting()
        self.group: Group | None = None
        self.draining = False
        self._clock = clock
        self._ledger = ledger
        self._emit = emit
        self._defer = defer
        self._requests: dict[str, Request] = {}  # all that are not over, and those over less than `grace` ago
        self._expiry: deque[tuple[float, str]] = deque()
        self._arrivals = 0
        self._seq = self._step = self._point_tokens = 0
        self._owed = False
        self._inflight: deque[InFlight] = deque()
        self._last_booked = 0.0
        self._held_too_long = False  # the running plan ended before the next one was composed
        self.pace = Pace()

    # -- the loop -------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Sends plans while the next one is due. Every rank's body belongs to the one header that all ranks agree on."""
        while self.group is not None and self._due():
            for rank in self.ranks:
                self._requeue(plan.make_room(rank, self.slots))
            draft = self._draft()
            ballots = plan.votes(self.ranks, draft, self.slots, min(self.rules.a, self.rules.max_window), self.draining)
            header = agree(self._position(), self.rules, ballots)
            if header.kind is Kind.PARK:
                self._held_too_long = False
                return
            self._dispatch(header, draft)

    def on_outcome(self, outcome: PlanOutcome) -> None:
        """Books one rank's report and goes on."""
        flight = self._flight(outcome)
        if flight is None:
            return
        rank = self.ranks[outcome.dp_rank]
        booked = book(outcome, flight.tables[rank.index], self.slots)
        self._account(flight, rank, outcome, booked)
        self._publish(rank, booked)
        errors = self._ended(booked, outcome)
        self._record(outcome.seq, booked)
        self._score(flight.tables[rank.index], outcome)
        for batch in events(booked, self.slots, errors):
            self._emit(batch)
        flight.progress[rank.index] = outcome.first + outcome.steps
        flight.reported = self._last_booked
        if outcome.last:
            flight.complete[rank.index] = True
            self._settle(rank, outcome.seq)
            while self._inflight and all(self._inflight[0].complete):
                self._held_too_long = self._inflight.popleft().hold > self._last_booked and not self._inflight
                if self._inflight:
                    self._inflight[0].reported = self._last_booked  # it has just begun
        self.advance()

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
        left = 0 if self._owed else self.settings.max_batched_tokens * len(self.ranks)
        for choice in self._unfilled():
            if left <= 0:
                break
            left -= len(choice.tokens) - choice.computed
        return left <= 0 and not self._owed

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
            if self._defer is None or running.hold - now < SHORTEST_HOLD:
                running.hold = now
            else:
                running.held = running.hold - now
                self._defer(running.held)
        return now >= running.hold

    def _draft(self) -> plan.Draft | None:
        """What could be prefilled; None between vote points, where nobody asks."""
        running = any(len(plan.decodable(rank, self.slots)) for rank in self.ranks)
        if running and (self._owed or point(self._step, self.rules) is Point.NONE):
            return None
        if not self.waiting and not any(rank.prefilling for rank in self.ranks):
            return None
        return plan.draft_prefill(self.ranks, self.waiting, self.limits, self._clock.now())

    def _dispatch(self, header: Header, draft: plan.Draft | None) -> None:
        now = self._clock.now()
        notice = self.pace.notice(header)
        bodies: list[Body] = []
        flight = InFlight(header, [], [], [], [], notice, sent=now, reported=now)
        for position, rank in enumerate(self.ranks):
            common = {"seq": header.seq, "term": self.group.term, "ack": self._ledger.acked}  # type: ignore[union-attr]
            if header.kind is Kind.PREFILL:
                assert draft is not None
                body, mine = plan.commit_prefill(
                    rank, draft.ranks[position], self.slots, self.waiting, self.limits, **common
                )
            else:
                body, mine = plan.commit_decode(rank, self.slots, header.k, notice=notice, **common)
            bodies.append(body)
            flight.tables.append(self._table(mine))
            flight.rows.append(len(mine))
            flight.progress.append(0)
            flight.complete.append(False)
        if header.kind is Kind.PREFILL:
            self._after_prefill(header, draft, now)
        else:
            self._step += header.k
            self._owed, self._point_tokens = False, 0
        if not any(flight.rows):
            raise AssertionError(f"plan {header.seq} ({header.kind.name}) is empty though work is pending")
        self._seq = header.seq
        flight.continues = bool(self._inflight) or self._held_too_long
        self._held_too_long = False
        self._inflight.append(flight)
        self.stats.plans[header.kind.name.lower()] += 1
        self.workers.send(header, bodies)

    def _after_prefill(self, header: Header, draft: plan.Draft | None, now: float) -> None:
        """A point repeats up to max_prefill_tokens_per_point; then, if any row runs, one decode window is owed."""
        assert draft is not None
        self._point_tokens += max(header.micro_chunks)
        bound = self.settings.max_prefill_tokens_per_point or self.settings.max_batched_tokens
        self._owed = self._point_tokens >= bound
        for choice in draft.passed:
            choice.request.passed_over += 1
            choice.request.passed_since = min(choice.request.passed_since, now)
        for rank_draft in draft.ranks:
            for group in rank_draft.admits:
                first = group[0]
                if first.phase is not Phase.WAITING and first.index == 0 and len(first.tokens) == first.prompt_len:
                    self.stats.admitted += 1
                    self.stats.queue_seconds += now - first.request.arrived
                    self.stats.prompt_tokens += first.prompt_len
                    self.stats.cached_tokens += first.request.cached

    def _position(self) -> Position:
        assert self.group is not None
        return Position(self.group.epoch, self._seq + 1, self._step, self._owed)

    # -- the group ------------------------------------------------------------------------------------------------------

    def start(self, group: Group, workers: Workers) -> None:
        """A group has formed under a new epoch: empty caches, counters at 0. What waits is planned at once."""
        kv = group.facts.groups[0]
        settings = self.settings
        self.group, self.workers = group, workers
        self.limits = Limits(
            max_rows=group.max_rows,
            max_batched_tokens=settings.max_batched_tokens,
            max_model_len=group.max_model_len,
            max_window=settings.max_window,
            watermark=settings.watermark,
        )
        self.ranks: list[RankState] = [
            plan.new_rank(
                i,
                kv.num_blocks,
                kv.block_size,
                group.max_rows,
                settings.prefix_caching,
                group.facts.generated_reusable,
            )
            for i in range(group.dp)
        ]
        self.slots = Slots(3 * group.max_rows * group.dp, group.max_model_len)
        self._seq = self._step = self._point_tokens = 0
        self._owed = False
        self._inflight.clear()
        self.pace = Pace()
        self._set_rules()
        self._last_booked = self._clock.now()
        for request in self._requests.values():
            if not request.done:
                self._root(request)
        self.advance()

    def stop(self, error: LockstepError) -> None:
        """The group is lost: every request with progress ends with `error`; those that only wait go on waiting."""
        if self.group is None:
            return
        for request in list(self._requests.values()):
            if any(
                c.phase not in (Phase.WAITING, Phase.ENDED) or len(c.tokens) > c.prompt_len for c in request.choices
            ):
                self._end_request(request, End.ERROR, error)
        for rank in self.ranks:
            self._settle(rank, self._seq)
        self.group = None

    @property
    def ready(self) -> bool:
        return self.group is not None and not self.draining

    # -- requests -------------------------------------------------------------------------------------------------------

    def check(self, prompt: U32, sampling: Sampling, n: int, adapter: str = "") -> None:
        """Raises what `submit` would refuse the request with; changes nothing."""
        group = self.group
        if group is None:
            raise Unavailable("the engine group is not formed yet; try again", retry_after_ms=1000)
        if self.draining:
            raise Unavailable("the scheduler is shutting down; try another one", retry_after_ms=1000)
        if adapter:
            raise Unsupported("adapters are not supported", param="adapter")
        if len(prompt) == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if len(prompt) >= group.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {group.max_model_len} tokens. However, your prompt contains "
                f"{len(prompt)} input tokens, which leaves no room for an answer.",
                param="prompt",
            )
        if int(prompt.max()) >= group.facts.vocab_size:
            raise InvalidRequest(f"token id {int(prompt.max())} is out of vocabulary", param="prompt")
        if not 1 <= n <= group.max_rows:
            raise InvalidRequest(f"n must be between 1 and {group.max_rows}", param="n")
        if sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        if sampling.prompt_logprobs > MAX_LOGPROBS:
            raise InvalidRequest(f"prompt_logprobs must be at most {MAX_LOGPROBS}", param="prompt_logprobs")
        if len(prompt) * (sampling.prompt_logprobs + 1) > MAX_PROMPT_SCORES:
            raise InvalidRequest(
                f"prompt_logprobs: the prompt's tokens times n + 1 must be at most {MAX_PROMPT_SCORES}",
                param="prompt_logprobs",
            )
        pool = self.ranks[0].pool
        most = min(len(prompt) + self.settings.max_window, self._limit(len(prompt), sampling))
        if -(-most // pool.block_size) + n - 1 > pool.total:
            raise InvalidRequest(
                f"the prompt and its {n} choices need more KV cache than the {pool.total * pool.block_size} tokens there are",
                param="prompt",
            )
        if len(self.waiting) + n > self.settings.max_waiting:
            self.stats.refused += 1
            raise Overloaded(
                f"{len(self.waiting)} choices wait already (max_waiting {self.settings.max_waiting}); try again later",
                retry_after_ms=1000,
            )

    def submit(
        self,
        *,
        request_id: str,
        session: int,
        handle: int,
        prompt: U32,
        sampling: Sampling,
        n: int = 1,
        priority: int = 0,
        salt: str = "",
        deadline: float = math.inf,
        adapter: str = "",
    ) -> Request:
        """Queues a request, or refuses it. The caller calls `advance` when it has submitted all that it holds."""
        self.check(prompt, sampling, n, adapter)
        if request_id in self._requests:
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        self._arrivals += 1
        request = Request(
            request_id=request_id,
            session=session,
            handle=handle,
            prompt=prompt,
            sampling=sampling,
            n=n,
            priority=priority,
            arrival=self._arrivals,
            arrived=self._clock.now(),
            salt=salt,
            limit=self._limit(len(prompt), sampling),
            deadline=deadline,
        )
        request.choices = [Choice(request, i, tokens=prompt) for i in range(n)]
        self._root(request)
        self._requests[request_id] = request
        self.waiting.push(list(request.choices))
        self.stats.requests += 1
        return request

    def cancel(self, request: Request) -> None:
        self._end_request(request, End.CANCELLED, None)
        self.advance()

    def finish(self, request: Request, index: int, offset: int) -> None:
        """The router found a stop string; the device's own end wins if it is booked already (P7)."""
        if not 0 <= index < len(request.choices):
            raise InvalidRequest(f"the request has no choice {index}", param="choice")
        choice = request.choices[index]
        if choice.phase is Phase.ENDED:
            return
        generated = self._generated(choice)
        if choice.slot >= 0:
            self.slots.generated[choice.slot] = min(offset, generated)
        self._end_choice(choice, End.STOP, None, min(offset, generated))
        self.advance()

    def resume(self, request_id: str, session: int, handle: int, offsets: dict[int, int]) -> Request:
        """Gives a request to a new session, which gets each choice's tokens from its offset on."""
        request = self._requests.get(request_id)
        if request is None:
            raise RequestLost(f"request {request_id} is not held here (any more)")
        missed = {c.index: self._tokens(c)[offsets.get(c.index, 0) :] for c in request.choices}
        if request.sampling.logprobs >= 0 and any(len(tokens) for tokens in missed.values()):
            raise RequestLost(f"request {request_id} asked for logprobs, and those that were missed are not kept")
        request.session, request.handle = session, handle
        if request.scores and not request.scores_due and not any(offsets.values()):
            self._emit(scores_event(request))
        for choice in request.choices:
            if choice.slot >= 0:
                self.slots.session[choice.slot], self.slots.handle[choice.slot] = session, handle
            offset = min(offsets.get(choice.index, 0), self._generated(choice))
            if len(missed[choice.index]) or choice.phase is Phase.ENDED:
                self._emit(replay_event(session, choice, self._tokens(choice), offset))
        return request

    def orphan(self, session: int) -> None:
        """A session broke. Its requests go on for `grace` seconds; then they are cancelled."""
        now = self._clock.now()
        for request in self._requests.values():
            if request.session == session:
                request.session = -1
                request.orphaned = now
                for choice in request.choices:
                    if choice.slot >= 0:
                        self.slots.session[choice.slot] = -1

    def tick(self) -> LockstepError | None:
        """What time alone brings about; call it a few times a second. Returns an error if the workers are silent too long."""
        now = self._clock.now()
        for request in list(self._requests.values()):
            if request.done:
                continue
            if now >= request.deadline:
                error = DeadlineExceeded(f"the request's deadline passed with {self._where(request)}")
                self._end_request(request, End.ERROR, error)
            elif request.session < 0 and now - request.orphaned > self.settings.grace:
                self._end_request(request, End.CANCELLED, Cancelled("its router did not come back"))
        while self._expiry and self._expiry[0][0] <= now:
            self._requests.pop(self._expiry.popleft()[1], None)
        if self.group is None:
            return None
        if not self._inflight:
            for rank in self.ranks:
                self._settle(rank, self._seq)
        self.advance()
        if self._inflight and now - max(self._last_booked, self._inflight[0].sent) > self.settings.worker_timeout:
            flight = self._inflight[0]
            missing = [i for i, done in enumerate(flight.complete) if not done]
            return DeadlineExceeded(
                f"no outcome of plan {flight.header.seq} ({flight.header.kind.name.lower()}, k={flight.header.k}) for "
                f"{self.settings.worker_timeout:.0f} s; missing: dp rank {', '.join(map(str, missing))}"
            )
        return None

    def find(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    @property
    def unfinished(self) -> int:
        return sum(not request.done for request in self._requests.values())

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
        return self._step if self.group else 0

    @property
    def silence(self) -> float:
        return self._clock.now() - self._last_booked if self.group and self._inflight else 0.0

    # -- booking --------------------------------------------------------------------------------------------------------

    def _flight(self, outcome: PlanOutcome) -> InFlight | None:
        """The plan that an outcome belongs to; None for what another epoch, or a repetition, left behind."""
        if self.group is None or outcome.epoch != self.group.epoch:
            return None
        for flight in self._inflight:
            if flight.header.seq == outcome.seq and outcome.first == flight.progress[outcome.dp_rank]:
                return flight
        return None

    def _account(self, flight: InFlight, rank: RankState, outcome: PlanOutcome, booked: Booked) -> None:
        now = self._clock.now()
        self._last_booked = now
        stats = self.stats
        stats.generation_tokens += len(booked.tokens)
        stats.idle_seconds += outcome.idle_ns * 1e-9
        if flight.header.kind is Kind.DECODE:
            stats.overrun_row_steps += flight.rows[rank.index] * outcome.steps - len(outcome.words)
            if not flight.rows[rank.index]:
                stats.placeholder_steps += outcome.steps
            if outcome.step_ns and outcome.steps:
                self.pace.decoded(outcome.step_ns * 1e-9)
                self._set_rules()
        elif outcome.step_ns:
            self.pace.prefilled(outcome.step_ns * 1e-9, sum(flight.header.micro_chunks))
        if outcome.turnaround_ns:
            turnaround = outcome.turnaround_ns * 1e-9
            stats.lead_seconds += (flight.header.k - flight.notice) * self.pace.step - turnaround
            stats.leads += 1
            self.pace.turned(turnaround - flight.held)
        elif outcome.first == 0 and flight.continues:
            self.pace.came(outcome.idle_ns * 1e-9)

    def _set_rules(self) -> None:
        settings = self.settings
        if settings.a:
            self.rules = Rules(settings.a, settings.b or 4 * settings.a, settings.max_window)
        else:
            assert self.group is not None
            interval = settings.vote_interval or VOTE_INTERVALS.get(self.group.facts.device, VOTE_INTERVAL)
            self.rules = rules_for(self.pace.step, interval, settings.max_window)

    def _publish(self, rank: RankState, booked: Booked) -> None:
        """Blocks that generated tokens have filled can be shared from now on. The last token's KV is not written yet."""
        if not (rank.prefix_caching and rank.generated_reusable):
            return
        slots, size = self.slots, rank.pool.block_size
        at = booked.slots
        full = (slots.prompt_len[at] + slots.generated[at] - 1) // size
        for slot in at[full > slots.published[at]].tolist():
            choice = slots.choice[slot]
            if choice is not None and choice.phase is Phase.DECODE:
                plan.publish(rank, choice, slots, int(slots.prompt_len[slot] + slots.generated[slot] - 1))

    def _score(self, table: npt.NDArray[np.int64], outcome: PlanOutcome) -> None:
        """Keeps what came of prompts' scores; a prompt's are told when they are complete, before its first token."""
        for chunk in outcome.prompts:
            choice = self.slots.choice[table[chunk.row]]
            if choice is not None and choice.request.add_scores(chunk) and choice.request.session >= 0:
                self._emit(scores_event(choice.request))

    def _ended(self, booked: Booked, outcome: PlanOutcome) -> dict[int, LockstepError]:
        """Ends the choices that the device ended; returns the errors by entry."""
        why = dict(outcome.faults)
        errors: dict[int, LockstepError] = {}
        for entry in np.nonzero(booked.ends)[0].tolist():
            slot = int(booked.slots[entry])
            choice = self.slots.choice[slot]
            assert choice is not None
            rank = self.ranks[choice.rank]
            if entry in booked.faulty:
                self.stats.nonfinite_rows += 1
                message = why.get(int(self.slots.row[slot]), "the model's output was not a number")
                errors[entry] = choice.error = LockstepError(f"choice {choice.index} failed: {message}")
                if choice.phase is Phase.DECODE:
                    own = choice.blocks[choice.request.cached // rank.pool.block_size :]
                    rank.pool.withdraw(own)
            self._retire(choice, End(int(booked.ends[entry])))
        return errors

    def _record(self, seq: int, booked: Booked) -> None:
        if not self._ledger.wanted:
            self._ledger.append(seq, ())
            return
        entries = []
        for slot, offset, start, count in zip(
            booked.slots.tolist(), booked.offsets.tolist(), booked.starts.tolist(), booked.counts.tolist(), strict=True
        ):
            choice = self.slots.choice[slot]
            assert choice is not None
            entries.append((choice, offset, booked.tokens[start : start + count]))
        self._ledger.append(seq, entries)

    def _settle(self, rank: RankState, seq: int) -> None:
        """The last plan that listed a removed row is booked (P5): its slot is free, and a preempted choice waits again."""
        still = []
        for choice in rank.closing:
            if self.slots.last_seq[choice.slot] > seq:
                still.append(choice)
                continue
            generated = self.slots.generated_tokens(choice.slot)
            choice.tokens = np.concatenate([choice.request.prompt, generated])
            self.slots.close(choice.slot)
            choice.slot = -1
            if choice.phase is Phase.CLOSING:
                choice.phase = Phase.WAITING
                self.waiting.push([choice])
        rank.closing = still

    def _requeue(self, victims: list[Choice]) -> None:
        self.stats.preemptions += len(victims)
        for choice in victims:
            if choice.phase is Phase.WAITING:
                self.waiting.push([choice])

    # -- ends -----------------------------------------------------------------------------------------------------------

    def _end_request(self, request: Request, end: End, error: LockstepError | None) -> None:
        for choice in request.choices:
            if choice.phase is not Phase.ENDED:
                self._end_choice(choice, end, error, self._generated(choice))

    def _end_choice(self, choice: Choice, end: End, error: LockstepError | None, offset: int) -> None:
        """Ends a choice by the record's own decision, and tells its session."""
        choice.error = error
        if choice.slot >= 0:
            self.slots.alive[choice.slot] = False
        self._retire(choice, end)
        if choice.request.session >= 0:
            self._emit(end_event(choice.request.session, choice, offset))

    def _retire(self, choice: Choice, end: End) -> None:
        """The one place where a choice becomes ENDED (P7). Its row and blocks are free for the next plan."""
        assert choice.phase is not Phase.ENDED
        if choice.phase is Phase.WAITING:
            self.waiting.discard(choice)
        elif choice.phase in (Phase.PREFILL, Phase.DECODE):
            rank = self.ranks[choice.rank]
            plan.release(rank, choice)
            rank.held = False
        choice.phase, choice.end = Phase.ENDED, end
        self.stats.ends[end.name.lower()] += 1
        self._ledger.end(choice, self._generated(choice))
        request = choice.request
        if request.done:
            self._expiry.append((self._clock.now() + self.settings.grace, request.request_id))

    # -- small things ---------------------------------------------------------------------------------------------------

    def _table(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        table = np.full(self.limits.max_rows, -1, np.int64)
        table[self.slots.row[slots]] = slots
        return table

    def _limit(self, prompt_len: int, sampling: Sampling) -> int:
        assert self.group is not None
        return min(prompt_len + sampling.max_tokens, self.group.max_model_len)

    def _root(self, request: Request) -> None:
        """Without a prefix cache no block has a key: nothing is found, and nothing is offered."""
        assert self.group is not None
        if not self.settings.prefix_caching:
            return
        facts = self.group.facts
        request.root = root(facts.model, facts.weights_epoch, "", request.salt)
        keys = chain(request.root, request.prompt, facts.groups[0].block_size)
        for choice in request.choices:
            choice.keys = list(keys)

    def _generated(self, choice: Choice) -> int:
        return int(self.slots.generated[choice.slot]) if choice.slot >= 0 else len(choice.tokens) - choice.prompt_len

    def _tokens(self, choice: Choice) -> U32:
        return self.slots.generated_tokens(choice.slot) if choice.slot >= 0 else choice.tokens[choice.prompt_len :]

    def _where(self, request: Request) -> str:
        if all(c.phase is Phase.WAITING for c in request.choices):
            return f"the request still waiting ({len(self.waiting)} choices in the queue)"
        return f"{sum(self._generated(c) for c in request.choices)} tokens generated"
