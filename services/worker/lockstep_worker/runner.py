"""The engine of a real worker: applies plans to rows, runs their steps, and hands out what they sampled.

The order of a plan, written once: removes, adds, table writes, zeroes, copies; then each step: inputs, forward, sample, post-update,
copy out. Real steps, placeholders (no live row) and warm-up take this same path. Whatever shapes a step comes from the plan's
header; the runner decides nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lockstep_common.errors import Conflict, Unsupported
from lockstep_common.steps import (
    NULL_BLOCK,
    U64,
    AddRow,
    Body,
    GroupConfig,
    Header,
    Kind,
    KvGroup,
    Plan,
    PrefillPass,
    Sampling,
    TopLogprobs,
    WorkerFacts,
)
from lockstep_worker import collectives
from lockstep_worker.collectives import Alone, Group, Membership
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model
from lockstep_worker.protocol import END_BITS, StepResult
from lockstep_worker.rows import FAULT_BIT, Batch, Rows, row_numbers
from lockstep_worker.sampling import Sampled, Sampler, SamplingRows, top_logprobs_of

log = logging.getLogger(__name__)

NOT_FINITE: Final = "the model's logits were not finite (NaN or infinity)"
_WARM_UP_TOKENS: Final = 32
_LAG: Final = 1  # results of an asynchronous device are read so many steps late, so that it never waits for the host


class Mark(Protocol):
    """A point in an asynchronous device's work."""

    def synchronize(self) -> None:
        """Returns when the device has come to it."""
        ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


@dataclass(frozen=True)
class Loaded:
    """A model, where it runs, and the room it has.

    `make_sampler` gets the sampling state of the rows. `mark` marks the end of the work queued so far on an asynchronous device;
    None: operations are done when they return.
    """

    model: Model
    make_sampler: Callable[[SamplingRows], Sampler]
    name: str
    dtype: str
    device: torch.device
    deterministic: bool
    max_rows: int
    max_model_len: int
    block_size: int
    num_blocks: int
    mark: Callable[[], Mark] | None = None


def cuda_mark() -> Mark:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step's results on their way to the host."""

    batch: Batch
    words: torch.Tensor
    logprobs: torch.Tensor | None
    tops: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    ready: Mark | None

    @property
    def there(self) -> bool:
        return self.ready is None or self.ready.query()


class Runner:
    """An `Engine` (see protocol) over a model."""

    def __init__(
        self,
        load: Callable[[Callable[[float, str], None]], Loaded],
        *,
        report: Callable[[str], None] = log.error,
        collective_deadline_s: float = 10.0,
        reform_timeout_s: float = 60.0,
    ) -> None:
        """`load` takes a progress callback; `report` takes messages about collectives that missed their deadline."""
        self._load = load
        self.report = report
        self._deadline_s = collective_deadline_s
        self._timeout_s = reform_timeout_s
        self._group: Group = Alone(0)
        self._in_flight: deque[_InFlight] = deque()
        self._regroup = False  # a row of the current batch has ended
        self._no_words = torch.zeros(0, dtype=torch.int64)

    def load(self, progress: Callable[[float, str], None]) -> WorkerFacts:
        with torch.inference_mode():
            self._loaded = self._load(progress)
        self._lag = 0 if self._loaded.mark is None else _LAG
        return self._facts(self._loaded.num_blocks)

    def configure(self, group: GroupConfig) -> WorkerFacts:
        loaded = self._loaded
        if group.cp != 1:
            raise Unsupported(f"cp {group.cp}: a rank of several workers (context parallelism) is not supported")
        if group.max_rows > loaded.max_rows or group.max_model_len > loaded.max_model_len:
            raise Conflict(
                f"the group wants {group.max_rows} rows of {group.max_model_len} tokens; this worker was started for "
                f"{loaded.max_rows} (max_num_seqs) of {loaded.max_model_len} (max_model_len)"
            )
        self.leave()
        self._in_flight.clear()
        blocks = min(group.num_blocks or loaded.num_blocks, loaded.num_blocks)
        self._group = collectives.form(
            group,
            Membership(self._config_hash(), blocks),
            loaded.device,
            deadline_s=self._deadline_s,
            timeout_s=self._timeout_s,
            report=self.report,
        )
        with torch.inference_mode():
            self._allocate(group)
        self._warm_up(min(group.max_batched_tokens, group.max_model_len))
        return self._facts(self._group.num_blocks)

    def run(self, plan: Plan) -> Iterator[StepResult]:
        """Applies a plan and runs it; up to `lag` steps stay in flight at its end."""
        with torch.inference_mode():  # halves the cost of a small operation
            if plan.body.adds or len(plan.body.removes):
                yield from self._read(0)  # results are booked to the rows they were sampled for
            self._apply(plan.body)
            yield from self._prefill(plan) if plan.header.kind == Kind.PREFILL else self._decode(plan)

    def poll(self, *, wait: bool) -> Iterator[StepResult]:
        """Results of steps in flight: those that are there, or with `wait` all."""
        while self._in_flight and (wait or self._in_flight[0].there):
            yield self._result(self._in_flight.popleft())

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def leave(self) -> None:
        """Leaves the group, if there is one."""
        group, self._group = self._group, Alone(0)
        group.close()

    def close(self) -> None:
        self.leave()

    def _decode(self, plan: Plan) -> Iterator[StepResult]:
        steps, rows = plan.header.k, plan.body.rows
        batch = self._rows.decode(rows, steps)
        for step in range(steps):
            if self._regroup or batch.exhausted:
                yield from self._read(0)  # who is alive must be known before rows are gathered again
                self._rows.commit(batch)
                batch, self._regroup = self._rows.decode(rows, steps - step), False
            self._step(plan.header.seq, step, batch.inputs(), batch)
            yield from self._read(self._lag)
        self._rows.commit(batch)

    def _prefill(self, plan: Plan) -> Iterator[StepResult]:
        passes = plan.body.passes
        for step in range(len(plan.header.micro_chunks)):
            inputs, batch = self._rows.prefill(passes[step] if step < len(passes) else PrefillPass())
            self._step(plan.header.seq, step, inputs, batch)
            self._rows.commit(batch)
            yield from self._read(self._lag)

    def _step(self, seq: int, step: int, inputs: StepInputs, batch: Batch) -> None:
        """One step of the whole group. Without a live token there is nothing to compute, unless others wait for this rank."""
        self._group.step(seq, step, batch.size)
        if len(inputs.query_lens) == 0 and not self._group.coupled:
            self._in_flight.append(_InFlight(batch, self._no_words, None, (), None))
            return
        hidden = self._loaded.model.forward(inputs, self._kv)
        sampled = self._sampler.sample(self._loaded.model.logits(hidden), batch.sampling, batch.sample_positions)
        self._rows.sampling.count(batch.sampling.shaped, sampled.tokens)
        self._copy_out(batch, batch.advance(sampled), sampled)

    def _apply(self, body: Body) -> None:
        self._regroup = False
        self._rows.apply(body)
        for group, blocks in enumerate(body.zeroes):
            if len(blocks):
                self._kv.zero(group, self._rows.to_device(blocks.astype(np.int64)))
        for group, (sources, destinations) in enumerate(body.copies):
            if len(sources):
                source, destination = sources.astype(np.int64), destinations.astype(np.int64)
                self._kv.copy(group, self._rows.to_device(source), self._rows.to_device(destination))

    # Copy out

    def _copy_out(self, batch: Batch, words: torch.Tensor, sampled: Sampled) -> None:
        logprobs, tops = sampled.logprobs, sampled.tops
        if words.device.type == "cuda":
            words = words.to("cpu", non_blocking=True)
            logprobs = None if logprobs is None else logprobs.to("cpu", non_blocking=True)
            tops = tuple(
                (ids.to("cpu", non_blocking=True), values.to("cpu", non_blocking=True)) for ids, values in tops
            )
        mark = self._loaded.mark
        self._in_flight.append(_InFlight(batch, words, logprobs, tops, None if mark is None else mark()))

    def _read(self, lag: int) -> Iterator[StepResult]:
        """The results of all steps but the last `lag`."""
        while len(self._in_flight) > lag:
            yield self._result(self._in_flight.popleft())

    def _result(self, step: _InFlight) -> StepResult:
        if step.ready is not None:
            step.ready.synchronize()
        words: U64 = step.words.numpy().view(np.uint64)
        result = StepResult(words)
        if step.logprobs is not None and (wanted := step.batch.sampling.wanted) is not None:
            logprobs = np.full(len(words), np.nan, np.float32)
            logprobs[wanted.rows] = step.logprobs.numpy()
            top = top_logprobs_of(wanted, [(ids.numpy(), values.numpy()) for ids, values in step.tops])
            result = StepResult(words, logprobs, top)
        if self._rows.masked and not (live := self._rows.live(step.batch.host_rows)).all():
            result = select_words(result, live)
        if len(words) and int(np.bitwise_or.reduce(words)) & int(END_BITS):
            result = self._end_rows(result)
        return result

    def _end_rows(self, result: StepResult) -> StepResult:
        ended = result.words[result.words & END_BITS != 0]
        self._rows.end(row_numbers(ended))
        self._regroup = True
        faulty = row_numbers(ended[ended & np.uint64(FAULT_BIT) != 0])
        if len(faulty) == 0:
            return result
        return StepResult(
            result.words, result.logprobs, result.top, tuple((row, NOT_FINITE) for row in faulty.tolist())
        )

    # Configuration and facts

    def _allocate(self, group: GroupConfig) -> None:
        loaded = self._loaded
        specs = loaded.model.kv_specs()
        self._kv = KvCache(specs, num_blocks=self._group.num_blocks, block_size=loaded.block_size, device=loaded.device)
        self._rows = Rows(
            group.max_rows,
            group.max_model_len,
            loaded.model.vocab_size,
            (loaded.block_size,) * len(specs),
            loaded.device,
            masked=self._lag > 0,
        )
        self._sampler = loaded.make_sampler(self._rows.sampling)

    def _warm_up(self, tokens: int) -> None:
        """A prefill and two decode steps of a row whose blocks are all the null block, as two ordinary plans."""
        count = max(1, min(tokens - 2, _WARM_UP_TOKENS))
        prompt = np.zeros(count, np.uint32)
        tables = tuple(np.full(table.shape[1], NULL_BLOCK, np.uint32) for table in self._rows.tables)
        add = AddRow(0, "warm-up", 0, count, prompt, 0, tables, Sampling(), limit=count + 3)
        chunk = PrefillPass(*(np.array([value], np.uint32) for value in (0, 0, count)))
        row = np.zeros(1, np.uint32)
        for plan in (
            Plan(Header(0, 0, Kind.PREFILL, 0, 1, micro_chunks=(count,)), Body(0, 0, adds=(add,), passes=(chunk,))),
            Plan(Header(0, 0, Kind.DECODE, 0, 2), Body(0, 0, rows=row)),
            Plan(Header(0, 0, Kind.DECODE, 0, 1), Body(0, 0, removes=row)),
        ):
            for _ in self.run(plan):
                pass
        for _ in self.poll(wait=True):
            pass
        with torch.inference_mode():
            for group in range(len(tables)):
                self._kv.zero(group, self._rows.to_device(np.array([NULL_BLOCK], np.int64)))

    def _config_hash(self) -> str:
        """Over everything that must be equal on all ranks of a group."""
        loaded = self._loaded
        parts = (loaded.model.config_hash, loaded.dtype, loaded.device.type, loaded.deterministic, loaded.block_size)
        return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]

    def _facts(self, num_blocks: int) -> WorkerFacts:
        loaded = self._loaded
        return WorkerFacts(
            model=loaded.name,
            config_hash=self._config_hash(),
            device=str(loaded.device),
            dtype=loaded.dtype,
            vocab_size=loaded.model.vocab_size,
            max_model_len=loaded.max_model_len,
            max_rows=loaded.max_rows,
            weights_epoch=0,
            groups=tuple(KvGroup(spec.kind, loaded.block_size, num_blocks) for spec in loaded.model.kv_specs()),
            deterministic=loaded.deterministic,
            routed_experts=loaded.model.routed_experts,
        )


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
