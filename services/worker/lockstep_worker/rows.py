"""Permanent rows: one slot a choice, as device tensors that plans change and steps gather.

`Rows.apply` stages a plan's removes, adds and table writes and writes each tensor once. `Rows.decode` gathers the rows that
step together into a `Batch`, which prepares all steps of a window at once (positions and slots are known in advance, one token
a step) and is written back by `commit` at its end. The host keeps what it must know without asking the device: states, lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from lockstep_common.errors import LockstepError
from lockstep_common.steps import (
    FLAG_SHIFT,
    NULL_BLOCK,
    ROW_SHIFT,
    U32,
    U64,
    AddRow,
    Body,
    Flag,
    Kind,
    PrefillPass,
    TableWrite,
)
from lockstep_kernels import post_update, prepare
from lockstep_worker.inputs import StepInputs
from lockstep_worker.protocol import spans
from lockstep_worker.sampling import Sampled, SamplingBatch, SamplingRows
from lockstep_worker.scoring import Scored
from lockstep_worker.staging import Staging

I64 = npt.NDArray[np.int64]

FREE: Final = 0
FILLING: Final = 1  # added, its prompt is not in the KV cache yet
ALIVE: Final = 2  # decodes
ENDED: Final = 3  # ended on the device; listed rows of this state are passed over

STOP_BIT: Final = int(Flag.STOP) << FLAG_SHIFT
LENGTH_BIT: Final = int(Flag.LENGTH) << FLAG_SHIFT
FAULT_BIT: Final = int(Flag.FAULT) << FLAG_SHIFT
FIRST_BIT: Final = int(Flag.FIRST) << FLAG_SHIFT
END_BITS: Final = STOP_BIT | LENGTH_BIT | FAULT_BIT
NO_WORD: Final = post_update.NO_WORD
TOKEN_MASK: Final = (1 << ROW_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class ChunkPass:
    """Tokens [starts[i], ends[i]) of rows[i] that are computed together; `samples`: which of them end their row's tokens."""

    kind: Kind
    rows: I64
    starts: I64
    ends: I64
    samples: I64  # indices into rows

    @property
    def size(self) -> int:
        return len(self.rows)


NO_ROWS: Final = np.zeros(0, np.int64)
NO_CHUNKS: Final = ChunkPass(Kind.PREFILL, NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS)


class Batch:
    """Rows that sample together, gathered once and stepped until one of them ends or the plan does."""

    def __init__(
        self,
        rows: Rows,
        host_rows: I64,
        index: torch.Tensor,
        *,
        kind: Kind,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: tuple[torch.Tensor, ...],
        tables: tuple[torch.Tensor, ...],
        first_bit: int = 0,
    ) -> None:
        """index [B] int64; tokens [B] int64 to feed next; positions [steps + 1, B]; slots [steps, B] and tables a KV group."""
        self.kind = kind
        self.size = len(host_rows)
        self.host_rows = host_rows
        self.generations = rows.generations[host_rows]
        self.index = index
        self.sampling: SamplingBatch = rows.sampling.select(host_rows, index)
        self.done = 0
        self.sampled: list[torch.Tensor] = []  # tokens of each step done
        self._tokens = tokens
        self._positions = positions.unbind(0)
        self._slots = [group.unbind(0) for group in slots]
        self._tables = tables
        self._host_lengths = rows.host_lengths[host_rows]
        self._max_length = int(self._host_lengths.max(initial=0))
        self._counter = rows.counter
        self._row_bits = (index << ROW_SHIFT) | first_bit
        near_limit = bool((self._host_lengths + len(self._positions) - 1 >= rows.host_limits[host_rows]).any())
        self._limits = rows.limits[index] if near_limit else None
        self.alive = rows.alive[index] if rows.masked else None

    @property
    def exhausted(self) -> bool:
        """All steps that were prepared are done."""
        return self.done == len(self._positions) - 1

    @property
    def sample_positions(self) -> torch.Tensor:
        """[B] int64: index in its sequence of the token that this step samples."""
        return self._positions[self.done + 1]

    def inputs(self) -> StepInputs:
        """The inputs of the next decode step."""
        step = self.done
        return StepInputs(
            kind=self.kind,
            token_ids=self._tokens,
            positions=self._positions[step],
            rows=self.index,
            query_starts=self._counter[: self.size + 1],
            seq_lens=self._positions[step + 1],
            block_tables=self._tables,
            slots=tuple(self._mask(slots[step]) for slots in self._slots),
            logits_index=self._counter[: self.size],
            query_lens=(1,) * self.size,
            host_seq_lens=tuple((self._host_lengths + step).tolist()),
            max_seq_len=self._max_length + step,
        )

    def advance(self, sampled: Sampled) -> torch.Tensor:
        """Appends the sampled tokens; returns the step's outcome words [B] int64, NO_WORD where a row is not alive."""
        self._tokens = sampled.tokens
        self.sampled.append(sampled.tokens)
        self.done += 1
        words = post_update.outcome_words(
            sampled.tokens,
            self._row_bits,
            stop_ids=self.sampling.stop_ids,
            lengths=self._positions[self.done] + 1,
            limits=self._limits,
            bad=sampled.bad,
            stop_bit=STOP_BIT,
            length_bit=LENGTH_BIT,
            fault_bit=FAULT_BIT,
        )
        if self.alive is None:
            return words
        masked = torch.where(self.alive, words, NO_WORD)
        self.alive &= (words & END_BITS) == 0
        return masked

    @property
    def no_words(self) -> torch.Tensor:
        """Room for a step's words [B] int64."""
        return self.index.new_full((self.size,), NO_WORD)

    def follow(self, words: torch.Tensor) -> None:
        """Appends the tokens that another rank has sampled for the same rows: [B] int64, as `advance` returned them there."""
        self._tokens = torch.where(words == NO_WORD, 0, words & TOKEN_MASK)
        self.sampled.append(self._tokens)
        self.done += 1
        if self.alive is not None:
            self.alive &= (words & END_BITS) == 0

    def _mask(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows that ended write to the null block."""
        return slots if self.alive is None else torch.where(self.alive, slots, NULL_BLOCK)


class Rows:
    """All rows of a worker. Device tensors have one entry a row, and a last one for the scratch row, which is never alive."""

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        vocab_size: int,
        block_sizes: tuple[int, ...],
        staging: Staging,
        *,
        masked: bool = False,
        by_place: bool = False,
        most_replayed: int = 0,
        cp: int = 1,
        cp_rank: int = 0,
    ) -> None:
        """`block_sizes`: tokens of a block, on all `cp` ranks that keep a sequence together; a token's slot is 0 (the null block) on
        all of them but its own.

        `masked`: the host learns late which rows ended, so the device keeps them from writing.
        `by_place`: tokens that were generated once are never computed in a prompt's pass, also when a row is added again;
        `most_replayed` of them in a pass of theirs, 0: any number.
        """
        device = staging.device

        def of_rows(*shape: int) -> torch.Tensor:
            return torch.zeros(max_rows + 1, *shape, dtype=torch.int64, device=device)

        self.device = device
        self.masked = masked
        self.by_place = by_place
        self.most_replayed = most_replayed
        self.share = prepare.Share(cp, cp_rank)
        self.scratch = max_rows
        self.to_device = staging.put
        self.block_sizes = block_sizes
        self.last = of_rows()  # last token, whose KV is not computed yet
        self.lengths = of_rows()  # tokens known
        self.limits = of_rows()  # length at which the row ends
        self.alive = torch.zeros(max_rows + 1, dtype=torch.bool, device=device)  # kept only if `masked`
        self.history = of_rows(max_model_len + 1)  # all tokens known
        self.tables = tuple(of_rows(-(-max_model_len // size)) for size in block_sizes)
        self.sampling = SamplingRows(max_rows, vocab_size, device, staging.put)
        self.counter = torch.arange(max_rows + 1, device=device)
        self.host_lengths = np.zeros(max_rows, np.int64)
        self.host_limits = np.zeros(max_rows, np.int64)
        self.host_prompts = np.zeros(max_rows, np.int64)  # prompt tokens
        self.host_scored = np.zeros(
            max_rows + 1, np.int64
        )  # of these, those that are scored: all but the first, or none
        self.host_widths = np.zeros(max_rows, np.int64)  # best tokens that come with a score
        self.states = np.zeros(max_rows, np.uint8)
        self.generations = np.zeros(max_rows, np.int64)  # counts the choices that left the row

    def apply(self, body: Body) -> None:
        """Removes, adds and table writes of a plan, in this order."""
        if len(body.removes):
            self.states[body.removes] = FREE
            self.generations[body.removes] += 1
        if body.adds:
            self._add(body.adds)
        for write in body.table_writes:
            self._write_table(write)

    def clear(self) -> None:
        """Removes all rows."""
        self.apply(Body(0, 0, removes=np.flatnonzero(self.states != FREE).astype(np.uint32)))

    def listed(self, listed: U32) -> I64:
        """Those of the listed rows that are not known to have ended."""
        states = self.states[listed]
        if (states < ALIVE).any():
            raise LockstepError(f"rows {listed[states < ALIVE].tolist()} decode without a prefill")
        rows: I64 = listed[states == ALIVE].astype(np.int64)
        return rows

    def decode(self, listed: U32, steps: int) -> Batch:
        """Gathers the listed rows that are alive, for up to `steps` decode steps."""
        rows = self.listed(listed)
        index = self.to_device(rows)
        steps = min(steps, int((self.host_limits - self.host_lengths)[rows].max(initial=1)))
        positions = prepare.window(self.lengths[index], steps)
        longest = int(self.host_lengths[rows].max(initial=0)) + steps
        tables = tuple(
            table[index, : _blocks(longest, s)] for table, s in zip(self.tables, self.block_sizes, strict=True)
        )
        return Batch(
            self,
            rows,
            index,
            kind=Kind.DECODE,
            tokens=self.last[index],
            positions=positions,
            slots=self._slots(tables, self.counter[: len(rows)], positions[:steps]),
            tables=tables,
        )

    def prefill(self, chunks: PrefillPass) -> tuple[tuple[ChunkPass, ...], Batch]:
        """What a prefill pass computes, and the batch of the rows whose chunk ends their tokens: those sample.

        It is one pass; with `by_place`, tokens behind their row's prompt are further ones, of kind DECODE, that run after it. The
        batch has the rows that sample in the order of the passes.
        """
        rows, starts = chunks.rows.astype(np.int64), chunks.starts.astype(np.int64)
        ends = starts + chunks.counts
        if (self.states[rows] != FILLING).any() or (ends > self.host_lengths[rows]).any():
            raise LockstepError(
                f"prefill of rows {rows.tolist()} up to {ends.tolist()}: not rows that are being filled"
            )
        if not self.by_place or not (ends > self.host_prompts[rows]).any():
            passes: tuple[ChunkPass, ...] = (self._pass(Kind.PREFILL, rows, starts, ends),)
        else:
            cuts = self.host_prompts[rows].clip(starts, ends)
            prompt, generated = cuts > starts, ends > cuts
            parts = [self._pass(Kind.PREFILL, rows[prompt], starts[prompt], cuts[prompt])] if prompt.any() else []
            passes = (*parts, *self._replays(rows[generated], cuts[generated], ends[generated]))
        return passes, self._first_batch(np.concatenate([part.rows[part.samples] for part in passes]))

    def inputs(self, chunks: ChunkPass) -> StepInputs:
        """Gathers what the pass reads."""
        counts = chunks.ends - chunks.starts
        owner, positions = spans(chunks.starts, counts)
        index, sequences, where = self.to_device(chunks.rows), self.to_device(owner), self.to_device(positions)
        first = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        longest = int(chunks.ends.max(initial=0))
        tables = tuple(
            table[index, : _blocks(longest, s)] for table, s in zip(self.tables, self.block_sizes, strict=True)
        )
        wanted, scored = first[1:][chunks.samples] - 1, None
        if self.scores(chunks):
            more, scored = self._scored(chunks, first[:-1])
            wanted = np.concatenate((wanted, more))
        return StepInputs(
            kind=chunks.kind,
            token_ids=self.history[index[sequences], where],
            positions=where,
            rows=index,
            query_starts=self.to_device(first),
            seq_lens=self.to_device(chunks.ends),
            block_tables=tables,
            slots=self._slots(tables, sequences, where),
            logits_index=self.to_device(wanted),
            query_lens=tuple(counts.tolist()),
            host_seq_lens=tuple(chunks.ends.tolist()),
            max_seq_len=longest,
            scored=scored,
        )

    def scores(self, chunks: ChunkPass) -> bool:
        """Whether tokens of the pass say something about prompt tokens that are scored: those that follow them."""
        return bool((chunks.starts < self.host_scored[chunks.rows]).any())

    def commit(self, batch: Batch) -> None:
        """Writes a batch's steps back. It must not be stepped afterwards."""
        if batch.size == 0 or batch.done == 0:
            return
        index, done = batch.index, batch.done
        tokens = torch.stack(batch.sampled, 1)
        columns = self.lengths[index][:, None] + torch.arange(done, device=self.device)
        self.history[index[:, None], columns.clamp_(max=self.history.shape[1] - 1)] = tokens
        self.last[index] = tokens[:, -1]
        self.lengths[index] += done
        self.host_lengths[batch.host_rows] += done
        if batch.alive is not None:
            self.alive[index] = batch.alive

    def state(self) -> post_update.RowState:
        """What a captured step changes."""
        return post_update.RowState(
            last=self.last,
            lengths=self.lengths,
            alive=self.alive,
            limits=self.limits,
            history=self.history,
            stop_ids=self.sampling.stop_ids,
            counts=self.sampling.counts,
        )

    def end(self, rows: I64, generations: I64) -> None:
        """The rows have ended on the device, if they still belong to the choices of these generations."""
        self.states[rows[self.generations[rows] == generations]] = ENDED

    def _pass(self, kind: Kind, rows: I64, starts: I64, ends: I64) -> ChunkPass:
        return ChunkPass(kind, rows, starts, ends, np.flatnonzero(ends == self.host_lengths[rows]))

    def _replays(self, rows: I64, starts: I64, ends: I64) -> Iterator[ChunkPass]:
        counts = ends - starts
        before, total = np.cumsum(counts) - counts, int(counts.sum())
        size = self.most_replayed or total
        for first in range(0, total, size):
            begin, end = ((edge - before).clip(0, counts) for edge in (first, first + size))
            some = end > begin
            yield self._pass(Kind.DECODE, rows[some], (starts + begin)[some], (starts + end)[some])

    def _scored(self, chunks: ChunkPass, first: I64) -> tuple[I64, Scored]:
        """Which of the pass's tokens are followed by one that is scored, and these; first [B]: index of each chunk's first."""
        counts = (np.minimum(chunks.ends, self.host_scored[chunks.rows]) - chunks.starts).clip(0)
        some = np.flatnonzero(counts)
        rows, starts, counts = chunks.rows[some], chunks.starts[some] + 1, counts[some]
        owner, positions = spans(starts, counts)
        targets = self.history[self.to_device(rows[owner]), self.to_device(positions)]
        return spans(first[some], counts)[1], Scored(rows, starts, counts, self.host_widths[rows], targets)

    def _first_batch(self, rows: I64) -> Batch:
        self.states[rows] = ALIVE
        index = self.to_device(rows)
        positions = prepare.window(self.lengths[index], 1)
        return Batch(
            self,
            rows,
            index,
            kind=Kind.PREFILL,
            tokens=self.last[index],
            positions=positions,
            slots=(),
            tables=(),
            first_bit=FIRST_BIT,
        )

    def _slots(
        self, tables: tuple[torch.Tensor, ...], sequences: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(
            prepare.slots(table, sequences, positions, size, self.share)
            for table, size in zip(tables, self.block_sizes, strict=True)
        )

    def _add(self, adds: tuple[AddRow, ...]) -> None:
        rows = np.array([add.row for add in adds], np.int64)
        if (self.states[rows] != FREE).any():
            raise LockstepError(f"rows {rows[self.states[rows] != FREE].tolist()} are added, but are in use")
        index = self.to_device(rows)
        lengths = np.array([len(add.tokens) for add in adds], np.int64)
        limits = np.array([add.limit for add in adds], np.int64)
        self.states[rows] = FILLING
        self.host_lengths[rows] = lengths
        self.host_limits[rows] = limits
        self.host_prompts[rows] = [add.prompt_len for add in adds]
        widths = np.array([add.sampling.prompt_logprobs for add in adds], np.int64)
        self.host_scored[rows] = np.where(widths < 0, 0, self.host_prompts[rows] - 1)
        self.host_widths[rows] = widths.clip(0, self.sampling.vocab_size)
        self.lengths[index] = self.to_device(lengths)
        self.limits[index] = self.to_device(limits)
        self.alive.index_fill_(0, index, True)  # a scalar assigned comes from pageable memory: the host waits
        tokens = _stacked([add.tokens for add in adds])
        self.history[index, : tokens.shape[1]] = self.to_device(tokens)
        self.last[index] = self.to_device(tokens[np.arange(len(adds)), lengths - 1])
        for group, table in enumerate(self.tables):
            blocks = _stacked([add.blocks[group] for add in adds], table.shape[1])
            table[index] = self.to_device(blocks)
        self.sampling.add(adds)

    def _write_table(self, write: TableWrite) -> None:
        owner, columns = spans(write.starts, write.counts)
        rows = self.to_device(write.rows.astype(np.int64)[owner])
        self.tables[write.group][rows, self.to_device(columns)] = self.to_device(write.blocks.astype(np.int64))


def row_numbers(words: U64) -> I64:
    """The rows of outcome words."""
    numbers: I64 = ((words >> np.uint64(ROW_SHIFT)) & np.uint64((1 << (FLAG_SHIFT - ROW_SHIFT)) - 1)).astype(np.int64)
    return numbers


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _stacked(arrays: list[U32], width: int = 0) -> I64:
    """[n, width] (default: the longest), padded with 0."""
    stacked = np.zeros((len(arrays), width or max(len(array) for array in arrays)), np.int64)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked
