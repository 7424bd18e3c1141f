"""Dual-batch overlap: a pass as two halves whose layers take turns, so that rows of one travel while the other computes.

    half A   attention, gate | rows travel ... | experts         | results travel ... | attention, gate
    half B                   | attention, gate | rows travel ... | experts            | results travel ...

What waits for other workers is written as `Stages`, a generator that pauses where it would wait. A pass on its own runs through
its pauses at once. Two halves take turns at them, the first one first: so all ranks, whatever their halves hold, begin the same
exchanges in the same order; and the second half finds what the first has written to the cache in the layer before it, even
where both have tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from lockstep_common.steps import Kind
from lockstep_worker.inputs import StepInputs

T = TypeVar("T")
Stages = Generator[None, None, T]  # work in stages: between them it would wait; then its result


def last_of(stages: Stages[T]) -> T:
    """Without pauses."""
    (result,) = take_turns([stages])
    return result


def take_turns(works: Sequence[Stages[T]]) -> list[T]:
    """A part of each in their order, until all are done; their results."""
    results: dict[int, T] = {}
    while len(results) < len(works):
        for i, stages in enumerate(works):
            if i in results:
                continue
            try:
                next(stages)
            except StopIteration as end:
                results[i] = end.value
    return [results[i] for i in range(len(works))]


@dataclass(frozen=True, slots=True)
class Halves:
    """Two passes that do what one does. Either may be without a token."""

    first: StepInputs
    second: StepInputs
    order: torch.Tensor | None  # int64 [S]: where the one pass's rows are among both halves'; None: as they come

    def merged(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """[S, ...] in the order of the one pass, of what the halves give for their logits_index."""
        both = torch.cat((first, second))
        return both if self.order is None else both[self.order]


def halve(inputs: StepInputs) -> Halves:
    """The first half has ceil(T / 2) of the tokens. A sequence that is cut goes on in the second half, and has the tokens in the
    first one before it.

    A rank that brings at most n rows to its experts has at most ceil(n / 2) in its first half and floor(n / 2) in its second:
    `expert_rows` follow that rule too, but are at least 1, as 0 means that nobody knows. Prompts (and tokens that are replayed
    several a sequence) wait for the device, which alone knows the tokens that need logits; decode steps do not.
    """
    tokens = len(inputs.token_ids)
    cut = -(-tokens // 2)
    whole, within = _place(inputs.query_lens, cut)  # sequences, and tokens of the next one, before the cut
    of_first, of_second, order = _logits(inputs, cut)
    rows, touched = inputs.expert_rows, whole + (within > 0)
    common = replace(inputs, dual_batch=False, scored=None)
    later = inputs.query_lens[whole] - within if within else 0  # tokens of the sequence that is cut, behind it
    lens, seq_lens, host_lens = inputs.query_lens, inputs.seq_lens[:touched], inputs.host_seq_lens[:touched]
    if within:
        seq_lens = torch.cat((seq_lens[:whole], seq_lens[whole:] - later))
        host_lens = (*host_lens[:whole], host_lens[whole] - later)
    first = replace(
        _part(common, slice(cut), slice(touched)),
        query_starts=inputs.query_starts[: touched + 1].clamp(max=cut),
        seq_lens=seq_lens,
        query_lens=(*lens[:whole], within) if within else lens[:whole],
        host_seq_lens=host_lens,
        logits_index=of_first,
        expert_rows=-(-rows // 2),
    )
    second = replace(
        _part(common, slice(cut, None), slice(whole, None)),
        query_starts=(inputs.query_starts[whole:] - cut).clamp(min=0),
        query_lens=(later, *lens[whole + 1 :]) if within else lens[whole:],
        logits_index=of_second,
        expert_rows=max(1, rows // 2) if rows else 0,
    )
    return Halves(first, second, order)


def _place(query_lens: tuple[int, ...], cut: int) -> tuple[int, int]:
    """Where token `cut` is: its sequence, and the tokens of that one before it. Without lengths each has one token."""
    if not query_lens:
        return cut, 0
    ends = np.cumsum(query_lens)
    sequence = int(np.searchsorted(ends, cut, side="right"))
    return sequence, cut - (int(ends[sequence - 1]) if sequence else 0)


def _part(inputs: StepInputs, tokens: slice, sequences: slice) -> StepInputs:
    return replace(
        inputs,
        token_ids=inputs.token_ids[tokens],
        positions=inputs.positions[tokens],
        slots=tuple(slots[tokens] for slots in inputs.slots),
        live=None if inputs.live is None else inputs.live[tokens],
        rows=inputs.rows[sequences],
        seq_lens=inputs.seq_lens[sequences],
        block_tables=tuple(table[sequences] for table in inputs.block_tables),
        host_seq_lens=inputs.host_seq_lens[sequences],
    )


def _logits(inputs: StepInputs, cut: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Which tokens of each half need logits, and the order of both halves' rows."""
    index = inputs.logits_index
    if inputs.kind is Kind.DECODE and len(index) == len(inputs.token_ids):  # each in its place
        return index[:cut], index[cut:] - cut, None
    before = index < cut
    places = torch.cat((before.nonzero(), (~before).nonzero())).squeeze(1)
    return index[before], index[~before] - cut, places.argsort()
