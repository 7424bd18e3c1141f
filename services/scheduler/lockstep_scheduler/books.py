"""What an outcome changes beyond the arrays: choices that end, prefixes that can be shared, scores, the ledger, sessions' events.

`booking.book` does the arithmetic of a batch; here only what is not the same for all rows is touched one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lockstep_common.errors import LockstepError, Unavailable
from lockstep_common.steps import PlanOutcome
from lockstep_scheduler import plan
from lockstep_scheduler.booking import Booked, EventBatch, book, events, scores_event
from lockstep_scheduler.ledger import Ledger
from lockstep_scheduler.lifecycle import Lifecycle
from lockstep_scheduler.ranks import RankState
from lockstep_scheduler.request import Choice, End, Phase, Request, Slots
from lockstep_scheduler.stats import Stats

MAX_LOSSES = 3


class Books:
    """Books the reports of one shard's ranks."""

    def __init__(self, requests: Lifecycle, ledger: Ledger, emit: Callable[[EventBatch], None], stats: Stats) -> None:
        self._requests = requests
        self._ledger = ledger
        self._emit = emit
        self._stats = stats

    def enter(self, ranks: Sequence[RankState], slots: Slots) -> None:
        """A group has formed."""
        self._ranks, self._slots = ranks, slots

    def book(self, rank: RankState, table: npt.NDArray[np.int64], outcome: PlanOutcome) -> Booked:
        """`table`: the slot of each row as of the outcome's plan (P5)."""
        booked = book(outcome, table, self._slots)
        self._publish(rank, booked)
        errors = self._ended(booked, outcome)
        self._record(outcome.seq, booked)
        self._score(table, outcome)
        for batch in events(booked, self._slots, errors):
            self._emit(batch)
        return booked

    def settle(self, rank: RankState, seq: int) -> None:
        """The last plan that listed a removed row is booked (P5): its slot is free, and a preempted choice waits again."""
        still = []
        for choice in rank.closing:
            if self._slots.last_seq[choice.slot] > seq:
                still.append(choice)
                continue
            generated = self._slots.generated_tokens(choice.slot)
            choice.tokens = np.concatenate([choice.request.prompt, generated])
            self._slots.close(choice.slot)
            choice.slot = -1
            if choice.phase is Phase.CLOSING:
                choice.phase = Phase.WAITING
                self._requests.waiting.push([choice])
        rank.closing = still

    def abandon(self, seq: int, error: LockstepError) -> None:
        """The group is lost, and plan `seq` was the last: all that ran waits again, with what is booked. What has run in
        MAX_LOSSES groups that were lost may be what they are lost by, and ends."""
        ran: set[Request] = set()
        for rank in self._ranks:
            for choice in plan.preempt_all(rank, self._slots):
                ran.add(choice.request)
                if choice.phase is Phase.WAITING:
                    self._requests.waiting.push([choice])
            self.settle(rank, seq)
        for request in sorted(ran, key=lambda request: request.order):
            request.losses += 1
            if request.losses == MAX_LOSSES:
                why = f"{error.message}; the request has now run in {MAX_LOSSES} groups that were lost, and is not tried again"
                self._requests.end(request, End.ERROR, Unavailable(why))

    def requeue(self, victims: list[Choice]) -> None:
        """Preempted choices wait again; those with a slot as soon as they are settled."""
        self._stats.preemptions += len(victims)
        for choice in victims:
            if choice.phase is Phase.WAITING:
                self._requests.waiting.push([choice])

    def _publish(self, rank: RankState, booked: Booked) -> None:
        """Blocks that generated tokens have filled can be shared from now on. The last token's KV is not written yet."""
        if not rank.generated_reusable:
            return
        slots, size = self._slots, rank.pool.block_size
        at = booked.slots
        full = (slots.prompt_len[at] + slots.generated[at] - 1) // size
        for slot in at[full > slots.published[at]].tolist():
            choice = slots.choice[slot]
            if choice is not None and choice.phase is Phase.DECODE:
                plan.publish(rank, choice, slots, int(slots.prompt_len[slot] + slots.generated[slot] - 1))

    def _score(self, table: npt.NDArray[np.int64], outcome: PlanOutcome) -> None:
        """Keeps what came of prompts' scores; a prompt's are told when they are complete, before its first token."""
        for chunk in outcome.prompts:
            choice = self._slots.choice[table[chunk.row]]
            if choice is not None and choice.request.add_scores(chunk) and choice.request.session >= 0:
                self._emit(scores_event(choice.request))

    def _ended(self, booked: Booked, outcome: PlanOutcome) -> dict[int, LockstepError]:
        """Ends the choices that the device ended; returns the errors by entry."""
        why = dict(outcome.faults)
        errors: dict[int, LockstepError] = {}
        for entry in np.nonzero(booked.ends)[0].tolist():
            slot = int(booked.slots[entry])
            choice = self._slots.choice[slot]
            assert choice is not None
            rank = self._ranks[choice.rank]
            if entry in booked.faulty:
                self._stats.nonfinite_rows += 1
                message = why.get(int(self._slots.row[slot]), "the model's output was not a number")
                errors[entry] = choice.error = LockstepError(f"choice {choice.index} failed: {message}")
                if choice.phase is Phase.DECODE:
                    own = choice.blocks[choice.request.cached // rank.pool.block_size :]
                    rank.pool.withdraw(own)
            self._requests.retire(choice, End(int(booked.ends[entry])))
        return errors

    def _record(self, seq: int, booked: Booked) -> None:
        if not self._ledger.wanted:
            self._ledger.append(seq, ())
            return
        entries = []
        for slot, offset, start, count in zip(
            booked.slots.tolist(), booked.offsets.tolist(), booked.starts.tolist(), booked.counts.tolist(), strict=True
        ):
            choice = self._slots.choice[slot]
            assert choice is not None
            entries.append((choice, offset, booked.tokens[start : start + count]))
        self._ledger.append(seq, entries)
