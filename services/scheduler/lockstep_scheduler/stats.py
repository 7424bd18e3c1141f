"""What the step loop and the life of requests count."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lockstep_scheduler.request import End

VOTES_KEPT = 4096  # for quantiles


@dataclass(slots=True)
class Stats:
    """Counters since the start of the process, read by Load and by the metrics page."""

    generation_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # of choices that came back, after a preemption or the loss of a group
    overrun_row_steps: int = 0
    placeholder_steps: int = 0
    nonfinite_rows: int = 0
    plans: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    dual_batch_plans: int = 0  # of these, computed as two halves
    requests: int = 0
    refused: int = 0
    ends: dict[str, int] = field(default_factory=lambda: {end.name.lower(): 0 for end in End if end})
    lead_seconds: float = 0.0
    leads: int = 0
    round_trips: int = 0
    round_trip_seconds: float = (
        0.0  # from the last rank's report to the next plan's arrival, less what was held back on purpose
    )
    idle_seconds: float = 0.0
    queue_seconds: float = 0.0
    admitted: int = 0
    votes: int = 0  # rounds in which this shard waited for the header
    vote_seconds: float = 0.0  # from ballot to header, less what the ballots of others kept it back
    last_votes: deque[float] = field(default_factory=lambda: deque(maxlen=VOTES_KEPT))
    resyncs: int = 0  # headers whose step was not the one counted here

    def turned(self, seconds: float) -> None:
        self.round_trips += 1
        self.round_trip_seconds += seconds

    def voted(self, seconds: float) -> None:
        self.votes += 1
        self.vote_seconds += seconds
        self.last_votes.append(seconds)
