"""The engine of a real worker: applies plans to rows, runs their steps, and hands out what they sampled.

The order of a plan, written once: removes, adds, table writes, zeroes, copies; then each step: inputs, forward, sample, post-update,
copy out. Real steps, placeholders (no live row) and warm-up take this same path. Whatever shapes a step comes from the plan's
header; the runner decides nothing. On CUDA a decode step is a replay (see graphs), and results are read as the device gets there.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from lockstep_common.errors import Conflict
from lockstep_common.steps import (
    NULL_BLOCK,
    U32,
    AddRow,
    Body,
    GroupConfig,
    Header,
    Kind,
    Plan,
    PrefillPass,
    Sampling,
    WorkerFacts,
)
from lockstep_worker import collectives
from lockstep_worker.collectives import Group, Membership, Place
from lockstep_worker.exchange.layer import LoadsOnTheWay
from lockstep_worker.graphs import DecodeGraphs
from lockstep_worker.kv import KvCache
from lockstep_worker.loaded import Loaded, Mark
from lockstep_worker.prefill_graphs import PrefillGraphs, bucket_sizes
from lockstep_worker.profile import APPLIED, LAUNCHED, Timeline
from lockstep_worker.protocol import END_BITS, StepResult
from lockstep_worker.results import InFlight
from lockstep_worker.rows import FAULT_BIT, I64, NO_CHUNKS, Batch, ChunkPass, Rows, row_numbers
from lockstep_worker.sampling import Sampled, Variant
from lockstep_worker.scoring import Scores, score
from lockstep_worker.staging import Staging

log = logging.getLogger(__name__)

NOT_FINITE: Final = "the model's logits were not finite (NaN or infinity)"
_WARM_UP_TOKENS: Final = 32
_LEAST_REPLAYED: Final = 64  # tokens of a pass on CUDA; or as many as there are rows, whose steps take as much memory
_RESULTS: Final = "a step's results"
_LAG: Final = 1  # results of an asynchronous device are read so many steps late, so that it never waits for the host


class Runner:
    """An `Engine` (see protocol) over a model."""

    def __init__(
        self,
        load: Callable[[Callable[[float, str], None]], Loaded],
        *,
        report: Callable[[str], None] = log.error,
        collective_deadline_s: float = 10.0,
        reform_timeout_s: float = 60.0,
        debug_collectives: bool = False,
    ) -> None:
        """`load` takes a progress callback; `report` takes messages about collectives that missed their deadline.

        `debug_collectives`: after each plan all ranks compare which collectives they have been through.
        """
        self._load = load
        self.report = report
        self.timeline = Timeline()
        self._deadline_s = collective_deadline_s
        self._timeout_s = reform_timeout_s
        self._debug_collectives = debug_collectives
        self._group = Group()
        self._in_flight: deque[InFlight] = deque()
        self._came_s = 0.0  # when the last result came, or the first step after it began, on time.monotonic
        self._regroup = False  # a row of the current batch has ended
        self._scores: Scores | None = None  # of the current step
        self._now = 0  # the step of the plan that runs
        self._expert_rows = 0  # that any rank has at most in the current step; 0: unknown
        self._dual = False  # passes are computed as two halves
        self._graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self._cache_of: Place | None = None  # that the KV cache was made for
        self._written = 0  # epoch of the last plan that ran over it
        self._sizes: tuple[int, ...] = ()  # of rows, contexts and prompts that all else was made for
        self._nothing = InFlight(torch.zeros(0, dtype=torch.int64), np.zeros(0, np.int64), None)

    def load(self, progress: Callable[[float, str], None]) -> WorkerFacts:
        with torch.inference_mode():
            self._loaded = self._load(progress)
        self._lag = 0 if self._loaded.mark is None else _LAG
        return self._loaded.facts(self._group.place, self._loaded.num_blocks, self._written)

    def configure(self, group: GroupConfig) -> WorkerFacts:
        loaded = self._loaded
        if group.max_rows > loaded.max_rows or group.max_model_len > loaded.max_model_len:
            raise Conflict(
                f"the group wants {group.max_rows} rows of {group.max_model_len} tokens; this worker was started for "
                f"{loaded.max_rows} (max_num_seqs) of {loaded.max_model_len} (max_model_len)"
            )
        if group.max_batched_tokens > loaded.max_batched_tokens:
            raise Conflict(
                f"the group wants prefill passes of {group.max_batched_tokens} tokens; this worker was started for "
                f"{loaded.max_batched_tokens} (max_num_batched_tokens)"
            )
        self.leave()
        blocks = min(group.num_blocks or loaded.num_blocks, loaded.num_blocks)
        self._group = collectives.form(
            group,
            Membership(self._loaded.config_hash(), blocks),
            loaded.device,
            deadline_s=self._deadline_s,
            timeout_s=self._timeout_s,
            report=self.report,
            nccl=loaded.nccl,
            debug=self._debug_collectives,
        )
        self._lag = 0 if loaded.mark is None or group.cp > 1 else _LAG  # CP ranks must learn of ends at the same step
        kept = self._cache_of == self._group.place and self._group.num_blocks <= self._kv.num_blocks
        before = self._sizes
        self._sizes = (group.max_rows, group.max_model_len, group.max_batched_tokens)
        if self._sizes == before and kept and not self._group.coupled:
            self._rows.clear()  # what it has captured knows of no other worker
        else:
            self._join(group, kept)
        if loaded.model.experts is not None:
            with torch.inference_mode():
                loaded.model.experts.forget_loads()
        return loaded.facts(self._group.place, self._group.num_blocks, self._written)

    def _join(self, group: GroupConfig, kept: bool) -> None:
        """Makes what a group of this shape needs. A KV cache that is `kept` stays, and nothing here writes to its blocks; all workers
        warm up, as a new one among them needs everybody for that."""
        self._sizes, sizes = (), self._sizes
        with torch.inference_mode():
            self._loaded.model.join(self._group)
            self._graphs = self._prefill_graphs = None  # and their memory
            if self._cache_of is not None and not kept:
                del self._kv
                self._cache_of, self._written = None, 0
            self._allocate(group)
        self._cache_of = self._group.place
        self._warm_up(min(group.max_batched_tokens, group.max_model_len))
        self._sizes = sizes

    def run(self, plan: Plan) -> Iterator[StepResult]:
        """Applies a plan and runs it; up to `lag` steps stay in flight at its end."""
        with torch.inference_mode():  # halves the cost of a small operation
            self._group.begin(plan.header.seq, collectives.PROLOGUE)
            self._written = plan.header.epoch or self._written  # warm-up belongs to none
            if (experts := self._loaded.model.experts) is not None:
                experts.begin(plan.header)
            self._apply(plan.body)
            self.timeline.mark(APPLIED, plan.header.seq)
            graphs, variant, self._dual = self._graphs, Variant.EAGER, plan.header.dual_batch
            if graphs is not None and plan.header.kind == Kind.DECODE:
                variant = self._variant(plan.body.rows)
                if self._group.coupled and not graphs.used(graphs.size(plan.header.row_bucket), dual=self._dual):
                    variant = Variant.EAGER
                elif self._dual:
                    graphs.make_ready(graphs.size(plan.header.row_bucket), dual=True)
            if graphs is not None and variant is not Variant.EAGER:
                yield from self._replay(plan, graphs, variant)
            else:
                if self._group.place.cp > 1:
                    yield from self._read(0)  # the workers of a DP rank must know the same rows to have ended
                yield from self._prefill(plan) if plan.header.kind == Kind.PREFILL else self._decode(plan)
            if self._debug_collectives:
                self._group.compare(plan.header.seq)

    def poll(self, *, wait: bool) -> Iterator[StepResult]:
        """Results of steps in flight: those that are there, or with `wait` all."""
        while self._in_flight and (wait or self._in_flight[0].there):
            yield self._result(self._in_flight.popleft())
        if self._in_flight and self._group.coupled:
            self._group.recorder.stalled(_RESULTS, self._came_s)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def forward_plan(self, data: bytes) -> None:
        self._group.forward_plan(data)

    def next_plan(self) -> bytes:
        return self._group.next_plan()

    def interrupt(self) -> None:
        self._group.abort()

    def leave(self) -> None:
        """Leaves the group, if there is one. Its steps in flight are forgotten."""
        group, self._group = self._group, Group()
        self._in_flight.clear()
        self._scores, self._expert_rows = None, 0  # of a step that was cut
        if group.aborted and self._loaded.device.type == "cuda":
            torch.cuda.synchronize()  # what was queued ends before its communicators do
        group.close()

    def close(self) -> None:
        self.leave()

    def _replay(self, plan: Plan, graphs: DecodeGraphs, variant: Variant) -> Iterator[StepResult]:
        """A window of captured steps, all queued at once. Rows that end on the way are masked by the device."""
        group = self._group
        rows = plan.body.rows.astype(np.int64) if group.place.cp > 1 else self._rows.listed(plan.body.rows)
        size = graphs.size(plan.header.row_bucket if group.coupled else len(rows))
        generations = self._rows.generations[rows]
        for step in range(plan.header.k):
            self._begin(plan.header.seq, step)
            if len(rows) == 0 and not group.coupled:
                self._in_flight.append(self._nothing)
                continue
            words, loads = graphs.launch(rows, variant, size, dual=self._dual), self._expert_loads()
            self._in_flight.append(InFlight(words, generations, self._mark(), loads=loads))
            self.timeline.mark(LAUNCHED, plan.header.seq, step)
            yield from self.poll(wait=False)
        self._rows.host_lengths[rows] += plan.header.k

    def _decode(self, plan: Plan) -> Iterator[StepResult]:
        steps, rows = plan.header.k, plan.body.rows
        if self._graphs is not None and self._group.coupled:  # others may replay the same steps
            self._expert_rows = self._graphs.size(plan.header.row_bucket)
        batch = self._rows.decode(rows, steps)
        for step in range(steps):
            if self._regroup or batch.exhausted:
                yield from self._read(0)  # who is alive must be known before rows are gathered again
                self._rows.commit(batch)
                batch, self._regroup = self._rows.decode(rows, steps - step), False
            self._step(plan.header.seq, step, (batch,), batch)
            yield from self._read(self._lag)
        self._rows.commit(batch)
        self._expert_rows = 0

    def _prefill(self, plan: Plan) -> Iterator[StepResult]:
        passes = plan.body.passes
        for step, most in enumerate(plan.header.micro_chunks):
            if self._group.coupled and self._prefill_graphs is not None and not self._dual:
                self._expert_rows = self._prefill_graphs.size(most)
            chunks, batch = self._rows.prefill(passes[step] if step < len(passes) else PrefillPass())
            self._step(plan.header.seq, step, chunks, batch)
            self._rows.commit(batch)
            yield from self._read(self._lag)
        self._expert_rows = 0

    def _step(self, seq: int, step: int, passes: tuple[Batch | ChunkPass, ...], batch: Batch) -> None:
        """One step of the whole group. Without a live token there is nothing to compute, unless others wait for this rank."""
        group = self._group
        self._begin(seq, step)
        if not any(part.size for part in passes) and not group.coupled:
            self._in_flight.append(self._nothing)
            return
        if group.coupled and self._rows.by_place and batch.kind is Kind.PREFILL:
            # Tokens that are computed again have passes of their own; then nobody replays a captured pass, nor its exchanges.
            alone = len(passes) == 1 and passes[0].kind is Kind.PREFILL
            most = group.meet(2 * len(passes) - alone)
            self._expert_rows = self._expert_rows if most == 1 else 0
            passes = (*passes, *[NO_CHUNKS] * (-(-most // 2) - len(passes)))
        logits = [self._logits(part) for part in passes]
        sampled = None
        words = batch.no_words
        if not group.follows:
            sampled = self._sampler.sample(
                logits[0] if len(logits) == 1 else torch.cat(logits), batch.sampling, batch.sample_positions
            )
            self._rows.sampling.count(batch.sampling, sampled.tokens)
            words = batch.advance(sampled)
        if batch.size:
            words = group.cp.broadcast("words", words)  # only the driver samples
        if group.follows:
            batch.follow(words)
        self._copy_out(batch, words, sampled)
        self.timeline.mark(LAUNCHED, seq, step)

    def _begin(self, seq: int, step: int) -> None:
        """The group's next step. Ranks that share no experts meet before it: nothing else keeps them in step."""
        self._group.begin(seq, step)
        self._now = step
        if self._group.place.dp > 1 and not self._loaded.model.routed_experts:
            self._group.meet(0)

    def _logits(self, part: Batch | ChunkPass) -> torch.Tensor:
        if isinstance(part, Batch):
            inputs = part.inputs()
        elif (logits := self._replayed(part)) is not None:
            return logits
        else:
            inputs = self._rows.inputs(part)
        if self._dual or self._expert_rows:
            inputs = replace(inputs, dual_batch=self._dual, expert_rows=self._expert_rows)
        model = self._loaded.model
        hidden = model.forward(inputs, self._kv)
        if (scored := inputs.scored) is not None:
            hidden, followed = hidden.tensor_split((len(hidden) - len(scored.targets),))
            self._scores = score(model.logits, model.vocab_size, followed, scored)
        return model.logits(hidden)

    def _replayed(self, part: ChunkPass) -> torch.Tensor | None:
        """Logits of a captured pass; None: it must be launched."""
        graphs, agreed = self._prefill_graphs, self._expert_rows
        if graphs is None or self._dual or (self._group.coupled and not agreed) or self._rows.scores(part):
            return None
        return graphs.logits(part, agreed)

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

    def _copy_out(self, batch: Batch, words: torch.Tensor, sampled: Sampled | None) -> None:
        """`sampled` by this rank; None: by its driver."""
        logprobs, tops = (None, ()) if sampled is None else (sampled.logprobs, sampled.tops)
        wanted = None if sampled is None else batch.sampling.wanted
        scores, self._scores = self._scores, None
        if words.device.type == "cuda":
            scores = None if scores is None else scores.to_host()
            words = words.to("cpu", non_blocking=True)
            logprobs = None if logprobs is None else logprobs.to("cpu", non_blocking=True)
            tops = tuple(
                (ids.to("cpu", non_blocking=True), values.to("cpu", non_blocking=True)) for ids, values in tops
            )
        loads = self._expert_loads()
        flight = InFlight(words, batch.generations, self._mark(), wanted, logprobs, tops, scores, loads)
        self._in_flight.append(flight)

    def _expert_loads(self) -> LoadsOnTheWay | None:
        """With the step that the plan's header wants them with."""
        experts = self._loaded.model.experts
        return None if experts is None else experts.report(self._now, self._group.cp)

    def _mark(self) -> Mark | None:
        return None if self._loaded.mark is None else self._loaded.mark()

    def _variant(self, listed: U32) -> Variant:
        return self._rows.sampling.variant(listed.astype(np.int64))

    def _read(self, lag: int) -> Iterator[StepResult]:
        """The results of all steps but the last `lag`."""
        while len(self._in_flight) > lag:
            yield self._result(self._in_flight.popleft())

    def _result(self, step: InFlight) -> StepResult:
        if step.ready is not None:
            if (
                self._group.coupled
            ):  # hosts queue what devices exchange: only here does one notice that another is missing
                self._group.recorder.stalled(_RESULTS, self._came_s)
            step.ready.synchronize()
            self._group.recorder.flows()
            self._came_s = time.monotonic()
        self._group.check()
        result, generations = step.arrived()
        if len(result.words) and int(np.bitwise_or.reduce(result.words)) & int(END_BITS):
            result = self._end_rows(result, generations)
        if step.loads is not None:
            result = replace(result, expert_loads=step.loads.arrived())
        return result if step.scores is None else replace(result, prompts=step.scores.chunks())

    def _end_rows(self, result: StepResult, generations: I64) -> StepResult:
        ends = result.words & END_BITS != 0
        ended = result.words[ends]
        self._rows.end(row_numbers(ended), generations[ends])
        self._regroup = True
        faulty = row_numbers(ended[ended & np.uint64(FAULT_BIT) != 0])
        if len(faulty) == 0:
            return result
        return StepResult(
            result.words, result.logprobs, result.top, tuple((row, NOT_FINITE) for row in faulty.tolist())
        )

    # Configuration

    def _allocate(self, group: GroupConfig) -> None:
        loaded = self._loaded
        specs = loaded.model.kv_specs()
        if self._cache_of is None:
            self._kv = KvCache(
                specs, num_blocks=self._group.num_blocks, block_size=loaded.block_size, device=loaded.device
            )
        self._rows = Rows(
            group.max_rows,
            group.max_model_len,
            loaded.model.vocab_size,
            (loaded.block_size * group.cp,) * len(specs),
            Staging(loaded.device),
            masked=self._lag > 0 or loaded.graphs,
            by_place=not loaded.model.generated_reusable,
            most_replayed=max(group.max_rows, _LEAST_REPLAYED) if loaded.device.type == "cuda" else 0,
            cp=group.cp,
            cp_rank=group.cp_rank,
        )
        self._sampler = loaded.make_sampler(self._rows.sampling)
        if loaded.graphs and (loaded.nccl or loaded.device.type == "cpu" or not self._group.coupled):
            self._graphs = DecodeGraphs(
                loaded.model, self._kv, self._rows, self._group, max_model_len=group.max_model_len
            )
            if group.capture_by_use:
                self._graphs.wait_for_use()
            else:
                self._graphs.capture()
            self._prefill_graphs = self._allocate_prefill_graphs(group, self._graphs.pool)

    def _allocate_prefill_graphs(self, group: GroupConfig, pool: Any) -> PrefillGraphs | None:
        model = self._loaded.model
        sizes = bucket_sizes(model, group.max_batched_tokens, cp=group.cp)
        if not sizes:
            return None
        graphs = PrefillGraphs(
            model, self._kv, self._rows, self._group, sizes=sizes, max_model_len=group.max_model_len, pool=pool
        )
        if group.capture_by_use and self._group.coupled:
            graphs.wait_for_use()
        else:
            graphs.capture()
        return graphs

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
