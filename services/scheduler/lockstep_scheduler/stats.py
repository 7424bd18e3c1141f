"""What the step loop and the life of requests count."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep_scheduler.request import End


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
