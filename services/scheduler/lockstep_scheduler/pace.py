"""How fast the group goes, and so how late the next plan may be composed (P2). Pure arithmetic over what workers report.

L = ceil((turnaround + margin) / step time): at so many steps before a plan's end the next one is due at the earliest. Within
that step it is held back further, as long as it will still arrive in time; what comes meanwhile goes into it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep_common.steps import Header, Kind

TURNAROUND_GUESS = 0.002
LONGEST_TURNAROUND = 0.050
LATENESS_STEP = 0.001
SHORTEST_STEP = 1e-6
SMALLEST_IDLE = 0.0001  # a worker's own pause between two plans


@dataclass(slots=True)
class Pace:
    """Moving means, in seconds. `turnaround` is the time from a worker's report to the arrival of the plan that it caused."""

    step: float = 0.0
    prefill_token: float = 0.0
    turnaround: float = TURNAROUND_GUESS
    others: float = 0.0  # the longest turnaround of the shards that wait for this one's header
    lead_steps: int = 1

    def decoded(self, step: float) -> None:
        self.step += (0.2 if self.step else 1.0) * (step - self.step)
        self._set_lead()

    def prefilled(self, duration: float, tokens: int) -> None:
        """Rather too short than too long: prefill is not as even as decode."""
        a_token = duration / max(1, tokens)
        self.prefill_token = min(a_token, self.prefill_token * 1.05) if self.prefill_token else a_token

    def turned(self, turnaround: float) -> None:
        """What a worker measured. Be early rather than late: a longer turnaround counts at once, a shorter one by and by."""
        self._set_turnaround(
            self.turnaround + (0.5 if turnaround > self.turnaround else 0.05) * (turnaround - self.turnaround)
        )

    def came(self, idle: float) -> None:
        """A plan without a notice says only whether it came in time: each one that was late makes the next ones earlier by
        as much (one stall by no more than LATENESS_STEP), each one in time lets them be a little later again."""
        late = idle > SMALLEST_IDLE
        self._set_turnaround(
            self.turnaround + (min(idle, LATENESS_STEP) if late else 0.004 * (TURNAROUND_GUESS - self.turnaround))
        )

    def notice(self, header: Header) -> int:
        """The step of a plan after which its worker reports, so that the next plan comes in time; 0: none."""
        return max(0, header.k - self.lead_steps) if header.kind is Kind.DECODE else 0

    def compose_at(self, header: Header, remaining: int, reported: float) -> float:
        """When the plan behind `header` must be composed, if `remaining` of its steps were left at `reported`."""
        prefill = header.kind is Kind.PREFILL
        left = self.prefill_token * sum(header.micro_chunks) if prefill else self.step * remaining
        return reported + left - self._needed - self._margin

    @property
    def _needed(self) -> float:
        return max(self.turnaround, self.others)

    @property
    def _margin(self) -> float:
        return 0.0005 + 0.25 * self._needed

    def _set_turnaround(self, seconds: float) -> None:
        self.turnaround = min(max(seconds, 0.0), LONGEST_TURNAROUND)
        self._set_lead()

    def _set_lead(self) -> None:
        if self.step > 0:
            self.lead_steps = max(1, math.ceil((self._needed + self._margin) / max(self.step, SHORTEST_STEP)))
