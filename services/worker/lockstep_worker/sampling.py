"""How rows sample: their parameters as permanent device tensors, and the sampler that runs only what a batch asks for.

A batch's features are known on the host. Greedy rows without extras take one argmax. On the CPU, rows that need more are gathered
into a sub-batch ("shaped") whose logits go through bias, suppressed stop ids, penalties, temperature, min-p, top-k and top-p; on
CUDA every row finds on the device what it asks for, so that a captured step serves any mixture.
Every op treats each row by itself, so a row's tokens do not depend on its batch mates.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lockstep_common.errors import LockstepError
from lockstep_common.steps import MAX_BIASES, MAX_STOP_IDS, AddRow, Sampling, TopLogprobs
from lockstep_kernels import sampling as ops
from lockstep_kernels.sampling import Feature, Float, Int, RowTables

GREEDY_BELOW: Final = 1e-5  # temperatures under this are greedy: the noise could not change a token
_NO_TOKEN: Final = -1
_STOP_ID_BYTES: Final = 8
_BIAS_BYTES: Final = 12  # int64 id, float32 value
_COUNT_BYTES: Final = 5  # int32 times in the output, bool in the prompt

I64 = npt.NDArray[np.int64]
Index = torch.Tensor | slice  # [m] int64, or a slice of everything, which selects without a copy
ToDevice = Callable[[npt.NDArray[np.generic]], torch.Tensor]
Choose = Callable[[torch.Tensor, "SamplingBatch", torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # (tokens, bad)


class Variant(enum.Enum):
    """Which form of the sampling half of a captured step a batch needs."""

    GREEDY = "greedy"
    SHAPED = "shaped"  # everything but logprobs, row by row on the device
    EAGER = "eager"  # logprobs: not captured


class LogprobsMode(enum.Enum):
    """Of which distribution logprobs are."""

    RAW = "raw_logprobs"  # the model's
    PROCESSED = (
        "processed_logprobs"  # the one that tokens are drawn from: after bias, penalties, temperature, top-k and so on
    )


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows of a batch want logprobs."""

    rows: I64  # into the batch, on the host, ascending
    index: Index  # the same on the device
    groups: tuple[tuple[int, I64, Index], ...]  # (n best tokens that are wanted too, rows, their places in `rows`)

    @property
    def tops(self) -> tuple[tuple[int, I64], ...]:
        """(n, rows that want the n best) for each n > 0."""
        return tuple((n, rows) for n, rows, _ in self.groups if n > 0)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the B rows of a batch sample; None: no row asks for it."""

    size: int
    rows: I64  # on the host
    index: torch.Tensor  # [B] int64: the rows
    features: Feature  # of all rows together
    stop_ids: torch.Tensor | None = None  # [B, s] int64
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
        """The next token of each row; logits [B, V] may be overwritten; positions [B] int64: index in its sequence of the
        token to draw."""
        ...


def bytes_a_row(vocab_size: int) -> int:
    """Of the tables of `SamplingRows`; what it has beside them is small."""
    return MAX_STOP_IDS * _STOP_ID_BYTES + MAX_BIASES * _BIAS_BYTES + vocab_size * _COUNT_BYTES


class SamplingRows:
    """The sampling state of all rows: parameters, stop ids, biases, and counts of tokens seen, for rows with penalties.

    Tensors have an entry for each of max_rows rows and a last one for the scratch row, which asks for nothing. They have room for
    whatever requests may ask for and stay where they are: captured steps hold their addresses, and no step allocates any.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, to_device: ToDevice) -> None:
        """`to_device` copies an array to `device` without waiting for it."""
        entries = max_rows + 1
        self.vocab_size = vocab_size
        self.device = device
        self.floats = torch.zeros(entries, len(Float), dtype=torch.float32, device=device)
        self.ints = torch.zeros(entries, len(Int), dtype=torch.int64, device=device)
        self.stop_ids = torch.full((entries, MAX_STOP_IDS), _NO_TOKEN, dtype=torch.int64, device=device)
        self.bias_ids = torch.zeros(entries, MAX_BIASES, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(entries, MAX_BIASES, dtype=torch.float32, device=device)
        self.counts = _zeros((entries, vocab_size), torch.int32, device)  # times in the output
        self.in_prompt = _zeros((entries, vocab_size), torch.bool, device)
        self._to_device = to_device
        self._features = np.zeros(entries, np.int64)
        self._top_k = np.zeros(entries, np.int64)
        self._tops = np.zeros(entries, np.int64)
        self._stops = np.zeros(entries, np.int64)  # stop ids of a row

    def add(self, adds: Sequence[AddRow]) -> None:
        """Stages the parameters of all new rows and writes them at once. LockstepError if one asks for more than requests may."""
        for add in adds:
            _check_room(add)
        rows = np.array([add.row for add in adds], np.int64)
        features = [features_of(add.sampling, self.vocab_size) for add in adds]
        self._features[rows] = [int(found) for found in features]
        self._top_k[rows] = [add.sampling.top_k for add in adds]
        self._tops[rows] = [min(add.sampling.logprobs, self.vocab_size) for add in adds]
        self._stops[rows] = [len(add.sampling.stop_ids) for add in adds]
        index = self._to_device(rows)
        self.floats[index] = self._to_device(np.array([_floats(add.sampling) for add in adds], np.float32))
        ints = [_ints(add, found) for add, found in zip(adds, features, strict=True)]
        self.ints[index] = self._to_device(np.array(ints, np.int64))
        stop_ids = [_padded(add.sampling.stop_ids, MAX_STOP_IDS, _NO_TOKEN) for add in adds]
        self.stop_ids[index] = self._to_device(np.array(stop_ids, np.int64))
        self._add_bias([add for add in adds if add.sampling.bias])
        for add, found in zip(adds, features, strict=True):
            if found & Feature.PENALTIES:
                self._add_counts(add)

    def select(self, rows: I64, index: torch.Tensor) -> SamplingBatch:
        """The batch of `rows` (host), in order; `index` is the same on the device."""
        features = self._features[rows]
        union = Feature(int(np.bitwise_or.reduce(features, initial=0)))
        return SamplingBatch(
            len(rows),
            rows,
            index,
            union,
            stop_ids=self.stop_ids[index, : self._stops[rows].max()] if union & Feature.STOP_IDS else None,
            wanted=self._wanted(rows, features) if union & Feature.LOGPROBS else None,
        )

    def variant(self, rows: I64) -> Variant:
        """What the batch of `rows` (host) needs."""
        union = int(np.bitwise_or.reduce(self._features[rows], initial=0))
        if union & Feature.LOGPROBS:
            return Variant.EAGER
        return Variant.SHAPED if union & Feature.SHAPED else Variant.GREEDY

    def tables(self, lengths: torch.Tensor) -> RowTables:
        """The state as `ops.sample_rows` reads it; lengths [R] int64: tokens of each row."""
        return RowTables(
            floats=self.floats,
            ints=self.ints,
            stop_ids=self.stop_ids,
            bias_ids=self.bias_ids,
            bias_values=self.bias_values,
            lengths=lengths,
            counts=self.counts,
            in_prompt=self.in_prompt,
        )

    def count(self, batch: SamplingBatch, tokens: torch.Tensor) -> None:
        """Counts the tokens just sampled [B], if a row of the batch has penalties."""
        if batch.features & Feature.PENALTIES:
            self.counts[batch.index, tokens] += 1

    def having(self, rows: I64, feature: Feature) -> Index | None:
        """Which of `rows` have one of the features, as an index into them; None: no row."""
        found = np.flatnonzero(self._features[rows] & int(feature))
        return self._index(found, len(rows)) if len(found) else None

    def largest_top_k(self, rows: I64) -> int:
        having = self._features[rows] & int(Feature.TOP_K) != 0
        return int(self._top_k[rows[having]].max(initial=0))

    def _index(self, found: I64, count: int) -> Index:
        return slice(None) if len(found) == count else self._to_device(found)

    def _wanted(self, rows: I64, features: I64) -> Wanted:
        wanted = np.flatnonzero(features & int(Feature.LOGPROBS))
        tops = self._tops[rows[wanted]]
        groups = []
        for n in np.unique(tops):
            places = np.flatnonzero(tops == n)
            groups.append((int(n), wanted[places], self._index(places, len(wanted))))
        return Wanted(wanted, self._index(wanted, len(rows)), tuple(groups))

    def _add_bias(self, adds: Sequence[AddRow]) -> None:
        if not adds:
            return
        ids = np.zeros((len(adds), MAX_BIASES), np.int64)
        values = np.zeros(ids.shape, np.float32)
        for add, row_ids, row_values in zip(adds, ids, values, strict=True):
            bias = add.sampling.bias
            row_ids[: len(bias)], row_values[: len(bias)] = [i for i, _ in bias], [value for _, value in bias]
        index = self._to_device(np.array([add.row for add in adds], np.int64))
        self.bias_ids[index], self.bias_values[index] = self._to_device(ids), self._to_device(values)

    def _add_counts(self, add: AddRow) -> None:
        tokens = self._to_device(add.tokens.astype(np.int64))
        prompt, output = tokens[: add.prompt_len], tokens[add.prompt_len :]
        self.counts[add.row].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self.in_prompt[add.row].zero_().index_fill_(0, prompt, True)


def _zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, pages of a table that no row has touched take no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape[0] * shape[1] * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _check_room(add: AddRow) -> None:
    sampling = add.sampling
    for name, count, most in (
        ("stop ids", len(sampling.stop_ids), MAX_STOP_IDS),
        ("biases", len(sampling.bias), MAX_BIASES),
    ):
        if count > most:
            raise LockstepError(f"row {add.row} has {count} {name}, there is room for {most}")


class TokenSampler:
    """The sampler of real models."""

    def __init__(self, rows: SamplingRows, *, logprobs_mode: LogprobsMode = LogprobsMode.RAW) -> None:
        self._rows = rows
        self._mode = logprobs_mode
        self._choose: Choose = _GroupedChoice(rows) if rows.device.type == "cpu" else _RowChoice(rows)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor) -> Sampled:
        if (wanted := batch.wanted) is None:
            return Sampled(*self._choose(logits, batch, positions))
        basis = self._logprobs_basis(logits, batch, wanted, positions)
        tokens, bad = self._choose(logits, batch, positions)
        logprobs = torch.empty(len(wanted.rows), dtype=torch.float32, device=logits.device)
        tops = []
        for n, _, places in wanted.groups:
            logprobs[places], ids, values = ops.logprobs(basis[places], tokens[wanted.index][places], n)
            if n > 0:
                tops.append((ids, values))
        return Sampled(tokens, bad, logprobs, tuple(tops))

    def _logprobs_basis(
        self, logits: torch.Tensor, batch: SamplingBatch, wanted: Wanted, positions: torch.Tensor
    ) -> torch.Tensor:
        """A copy of the logits that logprobs are of [m, V]."""
        i = wanted.index
        if self._mode is LogprobsMode.RAW:
            return _copy(logits, i)
        return ops.processed(logits[i], batch.index[i], self._rows.tables(positions), positions[i])


class _RowChoice:
    """Tokens of a batch whose rows find on the device what they ask for."""

    def __init__(self, rows: SamplingRows) -> None:
        self._rows = rows

    def __call__(
        self, logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if batch.features & Feature.SHAPED:
            return ops.sample_rows(logits, batch.index, self._rows.tables(positions), positions=positions)
        return ops.sample_greedy(logits)


@dataclass(frozen=True, slots=True)
class _Shaped:
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


class _GroupedChoice:
    """Tokens of a batch by ops over just those rows that ask for them."""

    def __init__(self, rows: SamplingRows) -> None:
        self._rows = rows
        self._batch: SamplingBatch | None = None  # the last one, which mostly has more steps
        self._shaped: _Shaped | None = None

    def __call__(
        self, logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if batch is not self._batch:
            self._batch, self._shaped = batch, self._group(batch)
        tokens, bad = ops.sample_greedy(logits)
        if (shaped := self._shaped) is not None:
            tokens[shaped.index] = self._choose(_copy(logits, shaped.index), shaped, positions[shaped.index])
        return tokens, bad

    def _group(self, batch: SamplingBatch) -> _Shaped | None:
        index = self._rows.having(batch.rows, Feature.SHAPED)
        if index is None:
            return None
        rows = batch.rows if isinstance(index, slice) else batch.rows[index.numpy()]
        return _Shaped(
            index=index,
            rows=batch.index[index],
            bias=self._rows.having(rows, Feature.BIAS),
            min_tokens=self._rows.having(rows, Feature.MIN_TOKENS),
            penalties=self._rows.having(rows, Feature.PENALTIES),
            random=self._rows.having(rows, Feature.RANDOM),
            min_p=self._rows.having(rows, Feature.MIN_P),
            top_k=self._rows.having(rows, Feature.TOP_K),
            top_p=self._rows.having(rows, Feature.TOP_P),
            max_top_k=self._rows.largest_top_k(rows),
        )

    def _choose(self, x: torch.Tensor, batch: _Shaped, positions: torch.Tensor) -> torch.Tensor:
        """Tokens [n] of the shaped rows; x [n, V] is a copy of their logits and is changed; positions [n] as in `sample`."""
        state, rows = self._rows, batch.rows
        if (i := batch.bias) is not None:
            x[i] = ops.add_bias(x[i], state.bias_ids[rows[i]], state.bias_values[rows[i]])
        if (i := batch.min_tokens) is not None:
            x[i] = ops.suppress(x[i], state.stop_ids[rows[i]], positions[i] < state.ints[rows[i], Int.MIN_LENGTH])
        if (i := batch.penalties) is not None:
            factors = state.floats[rows[i]]
            x[i] = ops.penalise(
                x[i],
                state.counts[rows[i]],
                state.in_prompt[rows[i]],
                factors[:, Float.PRESENCE],
                factors[:, Float.FREQUENCY],
                factors[:, Float.REPETITION],
            )
        if batch.random is None:
            return ops.greedy(x)[0]
        tokens = torch.empty_like(rows) if isinstance(batch.random, slice) else ops.greedy(x)[0]
        x[batch.random] = ops.temper(x[batch.random], state.floats[rows[batch.random], Float.TEMPERATURE])
        if (i := batch.min_p) is not None:
            x[i] = ops.keep_min_p(x[i], state.floats[rows[i], Float.MIN_P])
        if (i := batch.top_k) is not None:
            x[i] = ops.keep_top_k(x[i], state.ints[rows[i], Int.TOP_K], batch.max_top_k)
        if (i := batch.top_p) is not None:
            x[i] = ops.keep_top_p(x[i], state.floats[rows[i], Float.TOP_P])
        i = batch.random
        keys = state.ints[rows[i]]
        noise = ops.gumbel(keys[:, Int.SEED], keys[:, Int.CHOICE], positions[i], x.shape[1])
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


def _ints(add: AddRow, features: Feature) -> list[int]:
    sampling = add.sampling
    seed = sampling.seed - (1 << 64) if sampling.seed >= 1 << 63 else sampling.seed
    return [seed, add.choice, max(1, sampling.top_k), add.prompt_len + sampling.min_tokens, int(features)]


def _padded(ids: Sequence[int], width: int, empty: int) -> list[int]:
    """`ids` with the last one repeated; `empty` if there is none."""
    return [*ids, *[ids[-1] if ids else empty] * (width - len(ids))]
