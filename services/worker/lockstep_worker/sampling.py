"""How rows sample: their parameters as permanent device tensors, and the sampler that runs only what a batch asks for.

A batch's features are known on the host. Greedy rows without extras take one argmax; rows that need more are gathered into
a sub-batch ("shaped") whose logits go through bias, suppressed stop ids, penalties, temperature, min-p, top-k and top-p.
Every op treats each row by itself, so a row's tokens do not depend on its batch mates.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lockstep_common.steps import AddRow, Sampling, TopLogprobs
from lockstep_kernels import sampling as ops

GREEDY_BELOW = 1e-5  # temperatures under this are greedy: the noise could not change a token
_NO_TOKEN = -1

I64 = npt.NDArray[np.int64]
Index = torch.Tensor | slice  # [m] int64, or a slice of everything, which selects without a copy


class Feature(enum.IntFlag):
    """What a row's sampling needs beyond an argmax."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    PENALTIES = 16
    BIAS = 32
    MIN_TOKENS = 64
    STOP_IDS = 128
    LOGPROBS = 256
    SHAPED = RANDOM | PENALTIES | BIAS | MIN_TOKENS


class Variant(enum.Enum):
    """Which form of the sampling half of a captured step a batch needs."""

    GREEDY = "greedy"
    SHAPED = "shaped"  # everything but logprobs, row by row on the device
    EAGER = "eager"  # logprobs: not captured


def features_of(sampling: Sampling, vocab_size: int) -> Feature:
    found = Feature(0)
    if sampling.temperature >= GREEDY_BELOW:
        found |= Feature.RANDOM
        found |= Feature.TOP_K if 0 < sampling.top_k < vocab_size else Feature(0)
        found |= Feature.TOP_P if sampling.top_p < 1 else Feature(0)
        found |= Feature.MIN_P if sampling.min_p > 0 else Feature(0)
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
        found |= Feature.PENALTIES
    if sampling.bias:
        found |= Feature.BIAS
    if sampling.stop_ids:
        found |= Feature.STOP_IDS | (Feature.MIN_TOKENS if sampling.min_tokens else Feature(0))
    if sampling.logprobs >= 0:
        found |= Feature.LOGPROBS
    return found


class _Column(enum.IntEnum):
    """Columns of the float parameters of a row."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    PRESENCE = 3
    FREQUENCY = 4
    REPETITION = 5


class _Int(enum.IntEnum):
    """Columns of the integer parameters of a row."""

    SEED = 0
    CHOICE = 1
    TOP_K = 2
    MIN_LENGTH = 3  # length below which stop ids are suppressed


@dataclass(frozen=True, slots=True)
class Shaped:
    """The n rows of a batch whose logits are changed before a token is chosen.

    The fields from `bias` on are indices into these n; None: no row asks for it.
    """

    index: Index  # into the batch
    rows: torch.Tensor  # [n] int64
    bias: Index | None
    min_tokens: Index | None
    penalties: Index | None
    random: Index | None
    min_p: Index | None
    top_k: Index | None
    top_p: Index | None
    max_top_k: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows of a batch want logprobs; indices into the batch, on the host, ascending."""

    rows: I64  # the sampled token's
    tops: tuple[tuple[int, I64], ...]  # (n, rows that want the n best)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the B rows of a batch sample; None: no row asks for it."""

    size: int
    stop_ids: torch.Tensor | None = None  # [B, s] int64
    shaped: Shaped | None = None
    wanted: Wanted | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled for the B rows of its batch; on the device."""

    tokens: torch.Tensor  # [B] int64
    bad: torch.Tensor | None = None  # [B] bool: the logits were not finite, the token is void
    logprobs: torch.Tensor | None = None  # [m] float32, of Wanted.rows
    tops: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # (ids, values), one a group of Wanted.tops


class Sampler(Protocol):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor) -> Sampled:
        """The next token of each row; logits [B, V] float32; positions [B] int64: index in its sequence of the token to draw."""
        ...


class SamplingRows:
    """The sampling state of all rows: parameters, stop ids, biases, and (once a row asks) counts of tokens seen."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.floats = torch.zeros(max_rows, len(_Column), dtype=torch.float32, device=device)
        self.ints = torch.zeros(max_rows, len(_Int), dtype=torch.int64, device=device)
        self.stop_ids = torch.full((max_rows, 1), _NO_TOKEN, dtype=torch.int64, device=device)
        self.bias_ids = torch.zeros(max_rows, 1, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(max_rows, 1, dtype=torch.float32, device=device)
        self.counts = torch.zeros(0, dtype=torch.int32, device=device)  # [R, V] once a row asks: times in the output
        self.in_prompt = torch.zeros(0, dtype=torch.bool, device=device)  # [R, V] once a row asks
        self._features = np.zeros(max_rows, np.int64)
        self._top_k = np.zeros(max_rows, np.int64)
        self._tops = np.zeros(max_rows, np.int64)

    def add(self, adds: Sequence[AddRow]) -> None:
        """Stages the parameters of all new rows and writes them at once."""
        rows = np.array([add.row for add in adds], np.int64)
        self._features[rows] = [int(features_of(add.sampling, self.vocab_size)) for add in adds]
        self._top_k[rows] = [add.sampling.top_k for add in adds]
        self._tops[rows] = [min(add.sampling.logprobs, self.vocab_size) for add in adds]
        index = self._to_device(rows)
        self.floats[index] = self._to_device(np.array([_floats(add.sampling) for add in adds], np.float32))
        self.ints[index] = self._to_device(np.array([_ints(add) for add in adds], np.int64))
        width = max(len(add.sampling.stop_ids) for add in adds)
        self.stop_ids = _widened(self.stop_ids, width, repeat_last=True)
        stop_ids = [_padded(add.sampling.stop_ids, self.stop_ids.shape[1], _NO_TOKEN) for add in adds]
        self.stop_ids[index] = self._to_device(np.array(stop_ids, np.int64))
        for add in adds:
            if add.sampling.bias:
                self._add_bias(add.row, add.sampling.bias)
            if self._features[add.row] & Feature.PENALTIES:
                self._add_counts(add)

    def select(self, rows: I64, index: torch.Tensor) -> SamplingBatch:
        """The batch of `rows` (host), in order; `index` is the same on the device."""
        features = self._features[rows]
        union = int(np.bitwise_or.reduce(features, initial=0))
        stop_ids = self.stop_ids[index] if union & Feature.STOP_IDS else None
        return SamplingBatch(
            len(rows),
            stop_ids,
            shaped=self._shaped(rows, features) if union & Feature.SHAPED else None,
            wanted=self._wanted(rows, features) if union & Feature.LOGPROBS else None,
        )

    def variant(self, rows: I64) -> Variant:
        """What the batch of `rows` (host) needs."""
        union = int(np.bitwise_or.reduce(self._features[rows], initial=0))
        if union & Feature.LOGPROBS:
            return Variant.EAGER
        return Variant.SHAPED if union & Feature.SHAPED else Variant.GREEDY

    def count(self, shaped: Shaped | None, tokens: torch.Tensor) -> None:
        """Counts the tokens just sampled [B], for rows with penalties."""
        if shaped is not None and (i := shaped.penalties) is not None:
            self.counts[shaped.rows[i], tokens[shaped.index][i]] += 1

    def _shaped(self, rows: I64, features: I64) -> Shaped:
        shaped = np.flatnonzero(features & int(Feature.SHAPED))
        index = self._index(shaped, len(rows))
        rows, features = rows[shaped], features[shaped]

        def having(feature: Feature) -> Index | None:
            found = np.flatnonzero(features & int(feature))
            return self._index(found, len(rows)) if len(found) else None

        return Shaped(
            index=index,
            rows=self._to_device(rows),
            bias=having(Feature.BIAS),
            min_tokens=having(Feature.MIN_TOKENS),
            penalties=having(Feature.PENALTIES),
            random=having(Feature.RANDOM),
            min_p=having(Feature.MIN_P),
            top_k=having(Feature.TOP_K),
            top_p=having(Feature.TOP_P),
            max_top_k=int(self._top_k[rows[features & int(Feature.TOP_K) != 0]].max(initial=0)),
        )

    def _index(self, found: I64, count: int) -> Index:
        return slice(None) if len(found) == count else self._to_device(found)

    def _wanted(self, rows: I64, features: I64) -> Wanted:
        wanted = np.flatnonzero(features & int(Feature.LOGPROBS))
        tops = np.where(features & int(Feature.LOGPROBS), self._tops[rows], 0)
        return Wanted(wanted, tuple((int(n), np.flatnonzero(tops == n)) for n in np.unique(tops) if n > 0))

    def _add_bias(self, row: int, bias: tuple[tuple[int, float], ...]) -> None:
        self.bias_ids = _widened(self.bias_ids, len(bias))
        self.bias_values = _widened(self.bias_values, len(bias))
        self.bias_values[row] = 0
        ids = np.array([i for i, _ in bias], np.int64)
        self.bias_ids[row, : len(bias)] = self._to_device(ids)
        self.bias_values[row, : len(bias)] = self._to_device(np.array([v for _, v in bias], np.float32))

    def _add_counts(self, add: AddRow) -> None:
        if self.counts.dim() == 1:
            shape = (len(self._features), self.vocab_size)
            self.counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        output = np.bincount(add.tokens[add.prompt_len :], minlength=self.vocab_size).astype(np.int32)
        self.counts[add.row] = self._to_device(output)
        self.in_prompt[add.row] = False
        self.in_prompt[add.row, self._to_device(add.tokens[: add.prompt_len].astype(np.int64))] = True

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


class TokenSampler:
    """The sampler of real models."""

    def __init__(self, rows: SamplingRows) -> None:
        self._rows = rows

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor) -> Sampled:
        tokens, best = ops.greedy(logits)
        if (shaped := batch.shaped) is not None:
            tokens[shaped.index] = self._choose(_copy(logits, shaped.index), shaped, positions[shaped.index])
        bad = ~torch.isfinite(best)
        if (wanted := batch.wanted) is None:
            return Sampled(tokens, bad)
        index = torch.from_numpy(wanted.rows).to(logits.device)
        logprobs = logits[index].log_softmax(-1)
        tops = tuple(
            ops.top_logprobs(logprobs[torch.from_numpy(np.searchsorted(wanted.rows, rows)).to(logits.device)], n)
            for n, rows in wanted.tops
        )
        return Sampled(tokens, bad, ops.token_logprobs(logprobs, tokens[index]), tops)

    def _choose(self, x: torch.Tensor, batch: Shaped, positions: torch.Tensor) -> torch.Tensor:
        """Tokens [n] of the shaped rows; x [n, V] is a copy of their logits and is changed; positions [n] as in `sample`."""
        state, rows = self._rows, batch.rows
        if (i := batch.bias) is not None:
            x[i] = ops.add_bias(x[i], state.bias_ids[rows[i]], state.bias_values[rows[i]])
        if (i := batch.min_tokens) is not None:
            x[i] = ops.suppress(x[i], state.stop_ids[rows[i]], positions[i] < state.ints[rows[i], _Int.MIN_LENGTH])
        if (i := batch.penalties) is not None:
            factors = state.floats[rows[i]]
            x[i] = ops.penalise(
                x[i],
                state.counts[rows[i]],
                state.in_prompt[rows[i]],
                factors[:, _Column.PRESENCE],
                factors[:, _Column.FREQUENCY],
                factors[:, _Column.REPETITION],
            )
        if batch.random is None:
            return ops.greedy(x)[0]
        tokens = torch.empty_like(rows) if isinstance(batch.random, slice) else ops.greedy(x)[0]
        x[batch.random] = ops.temper(x[batch.random], state.floats[rows[batch.random], _Column.TEMPERATURE])
        if (i := batch.min_p) is not None:
            x[i] = ops.keep_min_p(x[i], state.floats[rows[i], _Column.MIN_P])
        if (i := batch.top_k) is not None:
            x[i] = ops.keep_top_k(x[i], state.ints[rows[i], _Int.TOP_K], batch.max_top_k)
        if (i := batch.top_p) is not None:
            x[i] = ops.keep_top_p(x[i], state.floats[rows[i], _Column.TOP_P])
        i = batch.random
        keys = state.ints[rows[i]]
        noise = ops.gumbel(keys[:, _Int.SEED], keys[:, _Int.CHOICE], positions[i], x.shape[1])
        tokens[i] = ops.draw(x[i], noise)
        return tokens


def _copy(x: torch.Tensor, index: Index) -> torch.Tensor:
    return x.clone() if isinstance(index, slice) else x[index]


def top_logprobs_of(
    wanted: Wanted, tops: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]
) -> TopLogprobs | None:
    """The n best of all groups (ids, values on the host), in the order of the batch's rows."""
    if not tops:
        return None
    index = np.concatenate([rows for _, rows in wanted.tops])
    order = np.argsort(index, kind="stable")
    pairs = [pair for ids, values in tops for pair in zip(ids, values, strict=True)]
    return TopLogprobs(
        index=index[order].astype(np.uint32),
        counts=np.concatenate([np.full(len(rows), n, np.uint32) for n, rows in wanted.tops])[order],
        ids=np.concatenate([pairs[i][0] for i in order]).astype(np.uint32),
        values=np.concatenate([pairs[i][1] for i in order]),
    )


def _floats(sampling: Sampling) -> list[float]:
    return [
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    ]


def _ints(add: AddRow) -> list[int]:
    sampling = add.sampling
    seed = sampling.seed - (1 << 64) if sampling.seed >= 1 << 63 else sampling.seed
    return [seed, add.choice, max(1, sampling.top_k), add.prompt_len + sampling.min_tokens]


def _padded(ids: Sequence[int], width: int, empty: int) -> list[int]:
    """`ids` with the last one repeated; `empty` if there is none."""
    return [*ids, *[ids[-1] if ids else empty] * (width - len(ids))]


def _widened(table: torch.Tensor, width: int, *, repeat_last: bool = False) -> torch.Tensor:
    """The table with at least `width` columns (a power of two); new ones repeat the last column or are zero."""
    have = table.shape[1]
    if width <= have:
        return table
    want = 1 << (width - 1).bit_length()
    filler = table[:, -1:].expand(-1, want - have) if repeat_last else table.new_zeros(len(table), want - have)
    return torch.cat((table, filler), 1)
