"""The life of requests: submitted, given to another session, finished, cancelled, expired, and each choice's one end (P7).

The step loop says what the group is (`enter`), what the device ended (`retire`) and that time passes (`expire`); `waiting` is
the queue that it plans from. Nothing here composes plans.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from lockstep_common.clock import Clock
from lockstep_common.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LockstepError,
    RequestLost,
    Unavailable,
)
from lockstep_common.steps import U32, Sampling
from lockstep_scheduler import plan
from lockstep_scheduler.admission import total_tokens
from lockstep_scheduler.blocks import Key, chain, root
from lockstep_scheduler.booking import EventBatch, end_event, replay_event, scores_event
from lockstep_scheduler.ledger import Ledger
from lockstep_scheduler.ranks import Limits, RankState, Waiting
from lockstep_scheduler.request import Choice, End, Phase, Request, Slots
from lockstep_scheduler.settings import Group, Settings
from lockstep_scheduler.stats import Stats


class Lifecycle:
    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        ledger: Ledger,
        emit: Callable[[EventBatch], None],
        stats: Stats,
        check: Callable[[U32, Sampling, int, str], None],
    ) -> None:
        """`check(prompt, sampling, n, adapter)` raises what a request is refused with."""
        self.waiting = Waiting()
        self._settings = settings
        self._clock = clock
        self._ledger = ledger
        self._emit = emit
        self._stats = stats
        self._check = check
        self._requests: dict[str, Request] = {}  # all that are not over, and those over less than `grace` ago
        self._expiry: deque[tuple[float, str]] = deque()
        self._arrivals = 0
        self._block_size = 0

    def enter(self, group: Group, limits: Limits, ranks: Sequence[RankState], slots: Slots) -> None:
        """A group has formed; what waits goes on in it. What it has no room for ends."""
        self._group, self._limits, self._ranks, self._slots = group, limits, ranks, slots
        same_blocks, self._block_size = self._block_size == ranks[0].pool.block_size, ranks[0].pool.block_size
        for request in list(self._requests.values()):
            if request.done:
                continue
            if total_tokens(request.prompt, request.sampling, limits) < request.limit:
                error = f"the group has formed again with room for {limits.max_model_len} tokens, and {request.limit} were asked for"
                self.end(request, End.ERROR, Unavailable(error))
            elif not (same_blocks and request.root == self._root_of(request)):
                self._root(request)

    def end_all(self, error: LockstepError) -> None:
        """Ends every request."""
        for request in list(self._requests.values()):
            self.end(request, End.ERROR, error)

    # -- what routers ask for ---------------------------------------------------------------------------------------------

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
        """Queues a request, or refuses it."""
        self._check(prompt, sampling, n, adapter)
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
            limit=total_tokens(prompt, sampling, self._limits),
            deadline=deadline,
        )
        request.choices = [Choice(request, i, tokens=prompt) for i in range(n)]
        self._root(request)
        self._requests[request_id] = request
        self.waiting.push(list(request.choices))
        self._stats.requests += 1
        return request

    def finish(self, request: Request, index: int, offset: int) -> None:
        """The router found a stop string; the device's own end wins if it is booked already (P7)."""
        if not 0 <= index < len(request.choices):
            raise InvalidRequest(f"the request has no choice {index}", param="choice")
        choice = request.choices[index]
        if choice.phase is Phase.ENDED:
            return
        offset = min(offset, self.generated(choice))
        if choice.slot >= 0:
            self._slots.generated[choice.slot] = offset
        else:
            choice.tokens = choice.tokens[: choice.prompt_len + offset]
        self._end_choice(choice, End.STOP, None, offset)

    def resume(self, request_id: str, session: int, handle: int, offsets: dict[int, int]) -> Request:
        """Gives a request to a new session, which gets each choice's tokens from its offset on."""
        request = self._requests.get(request_id)
        if request is None:
            raise RequestLost(f"request {request_id} is not held here (any more)")
        missed = {c.index: self.tokens(c)[offsets.get(c.index, 0) :] for c in request.choices}
        if request.sampling.logprobs >= 0 and any(len(tokens) for tokens in missed.values()):
            raise RequestLost(f"request {request_id} asked for logprobs, and those that were missed are not kept")
        request.session, request.handle = session, handle
        if request.scores and not request.scores_due and not any(offsets.values()):
            self._emit(scores_event(request))
        for choice in request.choices:
            if choice.slot >= 0:
                self._slots.session[choice.slot], self._slots.handle[choice.slot] = session, handle
            offset = min(offsets.get(choice.index, 0), self.generated(choice))
            if len(missed[choice.index]) or choice.phase is Phase.ENDED:
                self._emit(replay_event(session, choice, self.tokens(choice), offset))
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
                        self._slots.session[choice.slot] = -1

    def find(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    @property
    def unfinished(self) -> int:
        return sum(not request.done for request in self._requests.values())

    # -- ends -------------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Ends what is past its deadline or has been without a session for too long, and forgets what is long over."""
        now = self._clock.now()
        for request in list(self._requests.values()):
            if request.done:
                continue
            if now >= request.deadline:
                error = DeadlineExceeded(f"the request's deadline passed with {self._where(request)}")
                self.end(request, End.ERROR, error)
            elif request.session < 0 and now - request.orphaned > self._settings.grace:
                self.end(request, End.CANCELLED, Cancelled("its router did not come back"))
        while self._expiry and self._expiry[0][0] <= now:
            self._requests.pop(self._expiry.popleft()[1], None)

    def end(self, request: Request, end: End, error: LockstepError | None) -> None:
        """Ends every choice that has not ended."""
        for choice in request.choices:
            if choice.phase is not Phase.ENDED:
                self._end_choice(choice, end, error, self.generated(choice))

    def _end_choice(self, choice: Choice, end: End, error: LockstepError | None, offset: int) -> None:
        """Ends a choice by the record's own decision, and tells its session."""
        choice.error = error
        if choice.slot >= 0:
            self._slots.alive[choice.slot] = False
        self.retire(choice, end)
        if choice.request.session >= 0:
            self._emit(end_event(choice.request.session, choice, offset))

    def retire(self, choice: Choice, end: End) -> None:
        """The one place where a choice becomes ENDED (P7). Its row and blocks are free for the next plan."""
        assert choice.phase is not Phase.ENDED
        if choice.phase is Phase.WAITING:
            self.waiting.discard(choice)
        elif choice.phase in (Phase.PREFILL, Phase.DECODE):
            rank = self._ranks[choice.rank]
            plan.release(rank, choice)
            rank.held = False
        choice.phase, choice.end = Phase.ENDED, end
        self._stats.ends[end.name.lower()] += 1
        self._ledger.end(choice, self.generated(choice))
        request = choice.request
        if request.done:
            self._expiry.append((self._clock.now() + self._settings.grace, request.request_id))

    # -- what a choice has ------------------------------------------------------------------------------------------------

    def generated(self, choice: Choice) -> int:
        """How many tokens it has generated, as far as booked."""
        return int(self._slots.generated[choice.slot]) if choice.slot >= 0 else len(choice.tokens) - choice.prompt_len

    def tokens(self, choice: Choice) -> U32:
        """The tokens that it has generated."""
        return self._slots.generated_tokens(choice.slot) if choice.slot >= 0 else choice.tokens[choice.prompt_len :]

    def _root(self, request: Request) -> None:
        """Names the blocks of its prompt anew."""
        request.root = self._root_of(request)
        keys = chain(request.root, request.prompt, self._block_size)
        for choice in request.choices:
            choice.keys = list(keys)

    def _root_of(self, request: Request) -> Key:
        """Without a prefix cache a request shares blocks with none but itself: when it comes back to a rank that has them."""
        facts, own = self._group.facts, f"request {request.arrival}"
        return root(facts.model, facts.weights_epoch, "", request.salt if self._settings.prefix_caching else own)

    def _where(self, request: Request) -> str:
        if all(c.phase is Phase.WAITING for c in request.choices):
            return f"the request still waiting ({len(self.waiting)} choices in the queue)"
        return f"{sum(self.generated(c) for c in request.choices)} tokens generated"
