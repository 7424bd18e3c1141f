"""A timeline of plans and votes: four DP ranks, a few requests that come unevenly, the real step loop.

Steps have fixed times, so that the picture is about who decides what; everything else is what the loop does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from lockstep_bench import shapes
from lockstep_bench.pictures.svg import WIDTH, Drawing
from lockstep_bench.sim.costs import CostModel, Layout, Work, instant
from lockstep_bench.sim.shape import shape
from lockstep_bench.sim.simulation import Case, Engine, Host, Simulation, settings
from lockstep_bench.sim.traces import Asked
from lockstep_common.steps import Body, Header, Kind
from lockstep_scheduler.polls import Alone, Ballot
from lockstep_scheduler.vote import Point, Position, Rules, Vote, point

RANKS: Final = 4
STEP_S, PASS_S = 0.010, 0.030
A, B = 4, 8  # steps between two ALL points, and between two ANY points
ASKED: Final = (
    Asked(0.012, 48, 21),
    Asked(0.054, 64, 8),
    Asked(0.068, 32, 8),
    Asked(0.158, 48, 5),
    Asked(0.159, 40, 5),
    Asked(0.160, 56, 5),
    Asked(0.161, 32, 5),
    Asked(0.368, 40, 5),
)


@dataclass(frozen=True, slots=True)
class Decided:
    """A vote: when, what each rank said, at which kind of point, and what all of them do because of it."""

    at: float  # seconds
    votes: Sequence[Vote]
    point: Point  # as the law has it: ANY too where nothing runs, NONE where a window is owed
    header: Header

    @property
    def wanting(self) -> int:
        return sum(vote.want for vote in self.votes)

    @property
    def parks(self) -> bool:
        return self.header.kind is Kind.PARK


@dataclass(slots=True)
class Ran:
    """A plan at the workers, from `start` to `end` in seconds."""

    header: Header
    bodies: Sequence[Body]
    start: float = 0.0
    end: float = 0.0


class _Poll(Alone):
    """Counts as the one scheduler of a group does, and remembers."""

    def __init__(self) -> None:
        self.decided: list[Decided] = []

    def cast(self, ballot: Ballot, position: Position, rules: Rules | None, now: float) -> Header | None:
        header = super().cast(ballot, position, rules, now)
        assert header is not None and rules is not None
        kind = Point.NONE if position.owed else point(position.step, rules)
        if not any(vote.running for vote in ballot.votes):
            kind = Point.ANY
        self.decided.append(Decided(now, ballot.votes, kind, header))
        return header


class Recording(Simulation):
    """A run whose plans and votes are kept: `plans` in order, `poll.decided` with the votes that decided to sleep."""

    def __init__(self, case: Case, asked: Sequence[Asked]) -> None:
        self.plans: list[Ran] = []
        self.poll = _Poll()
        self._begun: list[tuple[float, Work]] = []
        super().__init__(case, asked, lambda work: self._begun.append((self._now / 1e9, work)), self.poll)

    def send(self, header: Header, bodies: Sequence[Body]) -> None:
        self.plans.append(Ran(header, bodies))
        super().send(header, bodies)

    def run(self) -> None:
        super().run()
        steps = iter(self._begun)
        for plan in self.plans:
            mine = [next(steps) for _ in range(plan.header.k)]
            plan.start = mine[0][0]
            plan.end = plan.start + sum(self.case.costs.step(work).seconds for _, work in mine)


def record() -> Recording:
    rates = replace(instant(), step=STEP_S, prefill_step=PASS_S)
    run = Recording(
        Case(
            engine=Engine(dp=RANKS, max_rows=8, kv_tokens=4096, block_size=16, max_model_len=512),
            settings=settings({"a": A, "b": B, "max_window": A}),
            costs=CostModel(shape(shapes.config("smollm2-135m")), rates, Layout(dp=RANKS)),
            host=Host(0.0, 0.0, 0.0),
            rtt_s=0.001,
        ),
        ASKED,
    )
    run.run()
    return run


_LEFT, _RIGHT, _TOP = 116, 44, 172
_LANE, _GAP = 42, 8
_BOTTOM = _TOP + RANKS * (_LANE + _GAP)
_LABELS: Final = _LEFT - 14  # where the words on the left end
_COUNTED: Final = _TOP - 14  # the line on which votes stand when they are counted


def draw() -> str:
    run = record()
    picture = Drawing(
        _BOTTOM + 82,
        "A vote decides what every rank does next",
        f"Timeline of {RANKS} DP ranks: prefill plans, decode plans and placeholders, the votes between them, and a pause.",
    )
    x = _Axis(run.plans[-1].end)
    picture.text(
        24,
        54,
        f"A run of the step loop with A = {A} and B = {B}: decode steps of {STEP_S * 1e3:.0f} ms, prefill passes of {PASS_S * 1e3:.0f} ms",
        "dim",
    )
    for rank in range(RANKS):
        picture.rect(_LEFT, _lane(rank), WIDTH - _LEFT - _RIGHT, _LANE, "lane")
        picture.text(_LABELS, _lane(rank) + _LANE / 2 + 4, f"rank {rank}", "bold end")
    _draw_votes(picture, x, run)
    _draw_plans(picture, x, run.plans)
    _draw_requests(picture, x, run)
    _draw_sleep(picture, x, run)
    picture.legend(
        _LEFT,
        _BOTTOM + 62,
        [
            ("prefill", "prefill: its prompt tokens"),
            ("decode", "decode: a window of k steps"),
            ("placeholder", "placeholder: the same steps without a row"),
        ],
    )
    return picture.render()


class _Axis:
    """Seconds to the right."""

    def __init__(self, end: float) -> None:
        self._scale = (WIDTH - _LEFT - _RIGHT) / end

    def __call__(self, seconds: float) -> float:
        return _LEFT + seconds * self._scale


def _lane(rank: int) -> float:
    return _TOP + rank * (_LANE + _GAP)


def _draw_plans(picture: Drawing, x: _Axis, plans: Sequence[Ran]) -> None:
    for plan in plans:
        left, width = x(plan.start) + 1, x(plan.end) - x(plan.start) - 2
        middle = left + width / 2
        for rank, body in enumerate(plan.bodies):
            style, words, more = _words(plan.header, body)
            top = _lane(rank) + 2
            picture.rect(left, top, width, _LANE - 4, style, f"plan {plan.header.seq}: {words} {more}".strip())
            if more:
                picture.text(middle, top + 17, words, "on middle bold")
                picture.text(middle, top + 31, more, "on middle small")


def _words(header: Header, body: Body) -> tuple[str, str, str]:
    """Style and two lines of a rank's part of a plan."""
    if header.kind is Kind.PREFILL and body.passes:
        return "prefill", "prefill", f"{sum(int(p.counts.sum()) for p in body.passes)} tokens"
    if header.kind is Kind.DECODE and (rows := len(body.rows)):
        return "decode", f"{header.k} steps", f"{rows} row{'s' if rows > 1 else ''}"
    return "placeholder", "placeholder", ""


def _draw_votes(picture: Drawing, x: _Axis, run: Recording) -> None:
    """Each vote above the plan that it decides, with a dot where it was counted."""
    for y, words in ((86, "vote point"), (106, "step"), (124, "want to prefill"), (142, "so all")):
        picture.text(_LABELS, y, words, "dim end")
    picture.text(_LABELS, _COUNTED + 4, "counted", "dim end")
    ends = {plan.header.seq: plan.end for plan in run.plans}
    starts = {plan.header.seq: plan.start for plan in run.plans}
    for vote in run.poll.decided:
        seq = vote.header.seq
        at, begins = x(vote.at), x(starts[seq] if seq in starts and not vote.parks else ends[seq - 1])
        style, name = {Point.ANY: ("any", "ANY"), Point.ALL: ("all", "ALL"), Point.NONE: ("owed", "none")}[vote.point]
        picture.line([(at, _COUNTED), (begins, _TOP - 3)], "line")
        picture.line([(begins, _TOP - 3), (begins, _BOTTOM - _GAP)], "faint")
        picture.rect(at - 2.5, _COUNTED - 2.5, 5, 5, style, f"counted at {vote.at * 1e3:.1f} ms")
        picture.rect(begins - 19, 73, 38, 17, style)
        picture.text(begins, 85.5, name, "on middle bold small")
        picture.text(begins, 106, f"{vote.header.first_step}", "middle dim")
        picture.text(begins, 124, f"{vote.wanting} of {RANKS}", "middle")
        picture.text(begins, 142, vote.header.kind.name.lower(), "middle bold")


def _draw_requests(picture: Drawing, x: _Axis, run: Recording) -> None:
    """Each request where it came, and a line for as long as it waited."""
    y = _BOTTOM - _GAP + 22
    picture.text(_LABELS, y + 3, "requests wait", "dim end")
    began = {add.request_id: plan.start for plan in run.plans for body in plan.bodies for add in body.adds}
    for handle, came in enumerate(run.seen.submitted.tolist()):
        left, right = x(came), x(began[str(handle)])
        picture.line([(left, y), (right, y)], "waiting")
        picture.polygon([(left, y - 7), (left - 5, y + 6), (left + 5, y + 6)], "arrival")


def _draw_sleep(picture: Drawing, x: _Axis, run: Recording) -> None:
    """Words where nothing runs."""
    for before, behind in itertools.pairwise(run.plans):
        if behind.start - before.end > 2 * STEP_S:
            middle, y = (x(before.end) + x(behind.start)) / 2, (_TOP + _BOTTOM - _GAP) / 2
            picture.text(middle, y - 4, "asleep:", "middle bold dim")
            picture.text(middle, y + 12, "no votes, no steps,", "middle dim small")
            picture.text(middle, y + 26, "until somebody wants", "middle dim small")
