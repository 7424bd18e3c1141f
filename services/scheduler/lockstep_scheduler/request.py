"""A request, its choices, and the arrays that hold what changes with every step.

A choice is what is scheduled: it waits, owns a row of one rank, and ends once (P7).

    WAITING -> PREFILL -> DECODE -> ENDED          (a joining choice is in PREFILL until its one token is recomputed)
       ^          |          |
       +- CLOSING <----------+                     preempted: its last plan is not booked yet

What the step loop books lives in `Slots`, one array element a choice, so that a batch of outcomes is a few array
operations. A choice has a slot from the plan that adds its row until the last plan that listed the row is booked (P5); a
row may have a new owner by then, a slot never.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from lockstep_common.errors import LockstepError
from lockstep_common.steps import NO_U32, U32, PromptChunk, PromptScores, Sampling
from lockstep_scheduler.blocks import Key


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    CLOSING = "closing"
    ENDED = "ended"


class End(enum.IntEnum):
    """How a choice ended; the numbers are those of the wire."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


@dataclass(slots=True, eq=False)
class Request:
    """One submitted request. `order` sorts the queue: priority, then age."""

    request_id: str
    session: int  # who gets the events; -1 while its router is away
    handle: int
    prompt: U32
    sampling: Sampling
    n: int
    priority: int
    arrival: int  # a counter: the age that counts
    arrived: float  # clock, for the queue-time metric
    limit: int  # total tokens at which a choice ends
    salt: str = ""
    root: Key = b""  # of the chain of block keys; set when the group is known
    deadline: float = float("inf")
    losses: int = 0  # groups that were lost while it ran
    orphaned: float = 0.0  # since when it has no session, if it has none
    choices: list[Choice] = field(default_factory=list)
    passed_over: int = 0
    passed_since: float = float("inf")
    cached: int = 0  # prompt tokens that the first choice found in the cache
    scores: list[PromptScores] = field(default_factory=list)  # of the prompt's tokens from the second on, without a gap
    scored: int = 0  # tokens that these are of

    @property
    def scores_due(self) -> bool:
        """Whether the prompt, or the rest of it, is still to be scored."""
        return self.sampling.prompt_logprobs >= 0 and self.scored < len(self.prompt) - 1

    def add_scores(self, chunk: PromptChunk) -> bool:
        """Keeps what is new (a choice that was preempted scores its prompt from the start); True if nothing is due any more."""
        known = self.scored + 1 - chunk.start
        if not self.scores_due or not 0 <= known < len(chunk.scores):
            return False
        self.scores.append(chunk.scores[known:])
        self.scored += len(chunk.scores) - known
        return not self.scores_due

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.arrival

    @property
    def done(self) -> bool:
        return all(choice.phase is Phase.ENDED for choice in self.choices)


@dataclass(slots=True, eq=False)
class Choice:
    request: Request
    index: int
    phase: Phase = Phase.WAITING
    end: End = End.NONE
    error: LockstepError | None = None
    tokens: U32 = field(default_factory=lambda: NO_U32)  # prompt and generated, as of the last add (or the end)
    rank: int = -1
    row: int = -1
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # positions whose KV is there or planned, while in PREFILL
    found: int = 0  # of these, those that were in the cache when it got its row
    had: int = -1  # positions that were there or planned when it gave a row back, or more; -1: it has had no row
    keys: list[Key] = field(default_factory=list)  # of the full blocks of `tokens`, and of those filled since
    joins: Choice | None = None  # PREFILL, row reserved: waits for this one's prompt
    borrowed: int = 0  # a joining choice copies its last block from this one and holds it until then; 0 none

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def order(self) -> tuple[int, int, int]:
        return (*self.request.order, self.index)

    @property
    def recomputed(self) -> int:
        """Tokens that it computes again, as the rank that it came back to has not kept them."""
        return max(0, min(self.had, len(self.tokens) - 1) - self.found)


class Slots:
    """Arrays over choices that own a row or are closing. Grown by doubling; a free slot holds None in `choice`."""

    def __init__(self, capacity: int, max_tokens: int) -> None:
        self.choice: list[Choice | None] = [None] * capacity
        self.tokens = np.zeros(
            (capacity, max_tokens), np.uint32
        )  # generated ones; pages that nobody writes cost nothing
        self.generated = np.zeros(capacity, np.int64)  # booked
        self.prompt_len = np.zeros(capacity, np.int64)
        self.planned = np.zeros(capacity, np.int64)  # total length after all plans sent, if no row ends early (P3)
        self.limit = np.zeros(capacity, np.int64)
        self.owned = np.zeros(capacity, np.int64)  # blocks in the row's table
        self.published = np.zeros(capacity, np.int64)  # leading blocks whose keys were offered to the pool
        self.row = np.zeros(capacity, np.int64)
        self.last_seq = np.zeros(capacity, np.int64)  # the last plan that listed the row
        self.handle = np.zeros(capacity, np.uint64)
        self.session = np.zeros(capacity, np.int64)
        self.index = np.zeros(capacity, np.uint32)
        self.cached = np.zeros(capacity, np.uint32)  # prompt tokens that the request found in the cache
        self.alive = np.zeros(capacity, bool)  # not ended, as far as booked
        self._free = list(range(capacity - 1, -1, -1))

    def open(self, choice: Choice) -> int:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.choice[slot] = choice
        prompt = choice.prompt_len
        generated = len(choice.tokens) - prompt
        self.tokens[slot, :generated] = choice.tokens[prompt:]
        self.generated[slot] = generated
        self.prompt_len[slot] = prompt
        self.planned[slot] = len(choice.tokens)
        self.limit[slot] = choice.request.limit
        self.owned[slot] = len(choice.blocks)
        self.published[slot] = 0
        self.row[slot] = choice.row
        self.last_seq[slot] = 0
        self.handle[slot] = choice.request.handle
        self.session[slot] = choice.request.session
        self.index[slot] = choice.index
        self.cached[slot] = choice.request.cached
        self.alive[slot] = True
        return slot

    def close(self, slot: int) -> None:
        self.choice[slot] = None
        self.alive[slot] = False
        self._free.append(slot)

    def generated_tokens(self, slot: int) -> U32:
        return self.tokens[slot, : self.generated[slot]].copy()

    def span(self, choice: Choice, start: int, stop: int) -> U32:
        """Tokens [start, stop) of prompt and generated ones."""
        prompt = choice.prompt_len
        if stop <= prompt:
            return choice.request.prompt[start:stop]
        generated = self.tokens[choice.slot, max(0, start - prompt) : stop - prompt]
        return np.concatenate([choice.request.prompt[start:prompt], generated]) if start < prompt else generated

    @property
    def used(self) -> int:
        return len(self.choice) - len(self._free)

    def _grow(self) -> None:
        old = len(self.choice)
        self.choice += [None] * old
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._free.extend(range(2 * old - 1, old - 1, -1))
