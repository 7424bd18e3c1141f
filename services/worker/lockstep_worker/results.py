"""A step's results on their way from the device to the host, and what they are there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lockstep_common.steps import U64, TopLogprobs
from lockstep_worker.exchange.layer import LoadsOnTheWay
from lockstep_worker.loaded import Mark
from lockstep_worker.protocol import StepResult
from lockstep_worker.rows import I64, NO_WORD
from lockstep_worker.sampling import Wanted, top_logprobs_of
from lockstep_worker.scoring import Scores


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step's results on their way to the host."""

    words: torch.Tensor  # [rows] int64, NO_WORD where a row is not alive
    generations: I64  # of the rows
    ready: Mark | None
    wanted: Wanted | None = None
    logprobs: torch.Tensor | None = None
    tops: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    scores: Scores | None = None
    loads: LoadsOnTheWay | None = None

    @property
    def there(self) -> bool:
        return self.ready is None or self.ready.query()

    def arrived(self) -> tuple[StepResult, I64]:
        """The words of rows that were alive, with what belongs to them, and those rows' generations. Once it is there."""
        words: U64 = self.words.numpy().view(np.uint64).copy()  # the ring they lie in comes round
        result, generations = StepResult(words), self.generations
        if self.logprobs is not None and (wanted := self.wanted) is not None:
            logprobs = np.full(len(words), np.nan, np.float32)
            logprobs[wanted.rows] = self.logprobs.numpy()
            top = top_logprobs_of(wanted, [(ids.numpy(), values.numpy()) for ids, values in self.tops])
            result = StepResult(words, logprobs, top)
        live = self.words.numpy() != NO_WORD
        if not live.all():
            result, generations = select_words(result, live), generations[live]
        return result, generations


def select_words(result: StepResult, keep: npt.NDArray[np.bool_]) -> StepResult:
    """The result without the words where `keep` [words] is False."""
    top = result.top
    if top is not None:
        kept = keep[top.index]
        values = np.repeat(kept, top.counts)
        new_index = (np.cumsum(keep) - 1).astype(np.uint32)
        top = TopLogprobs(new_index[top.index[kept]], top.counts[kept], top.ids[values], top.values[values])
    return StepResult(
        result.words[keep],
        None if result.logprobs is None else result.logprobs[keep],
        top,
        result.faults,
    )
