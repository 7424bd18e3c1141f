"""What the ranks of a group must agree on before each plan, as pure functions.

The law. `A` = prefill_attempt_interval, `B` = prefill_any_attempt_interval, a multiple of A greater than A. The step counter
counts planned decode steps and starts at 0 with each epoch.

1. If no rank has a running row, the group is at an ANY point: prefill if at least one rank wants to, else park.
2. If a decode window is owed (prefill has used up `max_prefill_tokens_per_point`), decode.
3. step > 0 and step % B == 0 is an ANY point: prefill if at least one rank wants to.
4. step % A == 0 is an ALL point: prefill only if every rank wants to, so that no rank runs a placeholder.
5. Elsewhere decode.

A decode plan covers the window up to the next multiple of A, but no more steps than `max_window` and than the rank with the
fewest KV blocks can write. A prefill plan does not move the counter, so a point repeats while the agreement holds.

As an exchange the kind is one MIN reduction: at an ANY point each rank sends `0 if want else 1`, at an ALL point
`1 if want else 0`; `agree` gives each rank the same header whoever computes it.

What the position asks of the next plan (a layer whose experts move, a report of loads) goes into its header; `park` is no plan.

With `DualBatch` a plan is computed as two halves (`dual_batch`) if the largest rank has at least `rows` rows that decode, or
`tokens` tokens to prefill: smaller halves would read the same weights twice for less than they hide.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep_common.steps import Header, Kind
from lockstep_scheduler.eplb import Move


class Point(enum.Enum):
    ANY = "any"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's view when plan `seq` is composed."""

    rank: int
    want: bool  # has something to prefill: an unfinished chunk, or a waiting request that fits
    running: int  # rows that would decode
    rows_after: int  # rows that a prefill plan would leave running
    chunk_tokens: int  # tokens that it would prefill now
    max_k: int  # decode steps for which it has blocks (at least 1); 0 without rows
    draining: bool = False


@dataclass(frozen=True, slots=True)
class DualBatch:
    """From which size on a plan is computed as two halves, see the law."""

    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Rules:
    """Intervals in steps, and what else the coordinator decides by."""

    a: int
    b: int
    max_window: int
    dual: DualBatch | None = None  # None: never

    def __post_init__(self) -> None:
        if not (self.a >= 1 and self.b > self.a and self.b % self.a == 0 and self.max_window >= 1):
            raise ValueError(f"B must be a multiple of A and greater than A, the window at least 1: {self}")


@dataclass(frozen=True, slots=True)
class Position:
    """Where the group stands before the vote on plan `seq`."""

    epoch: int
    seq: int
    step: int
    owed: bool = False  # a decode window is owed to the running rows
    placement_version: int = 0  # layers of experts that have moved in this epoch
    move: Move | None = None  # for the next plan's prologue
    report_loads: bool = False  # the next plan asks for expert loads
    point_tokens: int = 0  # that prefill plans have taken at this vote point


def point(step: int, rules: Rules) -> Point:
    """Which kind of vote point a step is while rows run."""
    if step > 0 and step % rules.b == 0:
        return Point.ANY
    return Point.ALL if step % rules.a == 0 else Point.NONE


def rules_for(
    step_seconds: float, interval_seconds: float, max_window: int, dp: int = 1, dual: DualBatch | None = None
) -> Rules:
    """Intervals by time: A is the largest power of two of steps within the interval, but at least `least_interval(dp)` and at most
    1024; B is 4 A.

    Powers of two nest, so that a changed step time moves no vote point further away than the new A.
    """
    steps = max(1, int(interval_seconds / step_seconds)) if step_seconds > 0 else 1
    a = max(least_interval(dp), 1 << min(steps.bit_length() - 1, 10))
    return Rules(a=a, b=4 * a, max_window=max_window, dual=dual)


def least_interval(dp: int) -> int:
    """The smallest A by time, for steps longer than the interval. Where several ranks step together a prompt of one of them costs
    all others a pass, so decode gets two steps between ALL points and eight between ANY points; a rank alone votes each step."""
    return 1 if dp == 1 else 2


def agree(position: Position, rules: Rules, votes: Sequence[Vote]) -> Header:
    """The header of plan `position.seq`: the law above. The same for every order of `votes`."""
    running = sum(v.running for v in votes)
    wants = [v.want for v in votes]
    if running == 0:
        kind = Kind.PREFILL if any(wants) else Kind.PARK
    elif position.owed:
        kind = Kind.DECODE
    else:
        match point(position.step, rules):
            case Point.ANY:
                kind = Kind.PREFILL if any(wants) else Kind.DECODE
            case Point.ALL:
                kind = Kind.PREFILL if all(wants) else Kind.DECODE
            case Point.NONE:
                kind = Kind.DECODE
    rows = max((v.rows_after if kind is Kind.PREFILL else v.running for v in votes), default=0)
    tokens = max((v.chunk_tokens for v in votes), default=0)
    move = position.move if kind is not Kind.PARK else None
    return Header(
        epoch=position.epoch,
        seq=position.seq,
        kind=kind,
        first_step=position.step,
        k=_window(position.step, rules, votes) if kind is Kind.DECODE else 1,
        row_bucket=bucket(rows),
        micro_chunks=(tokens,) if kind is Kind.PREFILL else (),
        placement_version=position.placement_version + (move is not None),
        moved_layer=move.layer if move else -1,
        report_loads=position.report_loads and kind is not Kind.PARK,
        moved_experts=move.experts if move else (),
        dual_batch=_dual(rules.dual, kind, rows, tokens),
    )


def after(position: Position, header: Header, point_bound: int) -> Position:
    """Where the group stands once `header` is agreed. Its own values count, whatever was thought before: who lags catches up.

    A point repeats until its prefill plans have taken `point_bound` tokens; then a decode window is owed. `park` moves nothing.
    """
    if header.kind is Kind.PARK:
        return position
    step, tokens = header.first_step + header.k, 0
    if header.kind is Kind.PREFILL:
        step, tokens = header.first_step, position.point_tokens + max(header.micro_chunks)
    return Position(
        epoch=header.epoch,
        seq=header.seq + 1,
        step=step,
        owed=header.kind is Kind.PREFILL and tokens >= point_bound,
        placement_version=header.placement_version,
        point_tokens=tokens,
    )


def bucket(rows: int) -> int:
    """Rows rounded up to a size worth a graph: 0, 1, 2, 4, then multiples of 8 up to 64, of 16 up to 256, of 64 beyond."""
    if rows <= 2:
        return rows
    if rows <= 4:
        return 4
    step = 8 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // step) * step


def _dual(dual: DualBatch | None, kind: Kind, rows: int, tokens: int) -> bool:
    if dual is None or kind is Kind.PARK:
        return False
    return tokens >= dual.tokens if kind is Kind.PREFILL else rows >= dual.rows


def _window(step: int, rules: Rules, votes: Sequence[Vote]) -> int:
    to_point = rules.a - step % rules.a
    return max(1, min([to_point, rules.max_window, *(v.max_k for v in votes if v.running)]))
