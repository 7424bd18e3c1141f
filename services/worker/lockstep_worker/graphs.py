"""The decode window on the device: one CUDA graph a batch bucket holds a whole step, a window is k replays.

A captured step gathers its inputs from the rows, runs the model, samples and writes the rows back, all on the device; the host
gives row numbers once a window and reads outcome words from a ring in page-locked memory that the step itself writes. Rows that
ended are masked on the device, so nothing waits for the host between the steps of a window.

In a group of several workers all of them replay the step of the same bucket, a rank without a row too: the collectives of a step are in
its graph. The workers of a DP rank have the same rows; the first one samples, and the others get its tokens, 8 bytes a row.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from lockstep_common.steps import ROW_SHIFT, Kind
from lockstep_kernels import post_update, prepare
from lockstep_kernels import sampling as ops
from lockstep_worker.collectives import Group
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model
from lockstep_worker.rows import FAULT_BIT, I64, LENGTH_BIT, NO_WORD, STOP_BIT, TOKEN_MASK, Rows
from lockstep_worker.sampling import Variant

log = logging.getLogger(__name__)

RING_STEPS: Final = 256  # steps whose words the ring holds; far more than two plans of the longest window
CAPTURED: Final = (Variant.GREEDY, Variant.SHAPED)
EAGER_PLANS: Final = 4  # of one size, before its steps are captured by use: about as long as it takes to capture them

Replay = Callable[[], None]


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Batch sizes that are captured: dense where a step is cheap and padding would show, ascending, the last is max_rows."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, max_rows, 64)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def captures(max_rows: int, *, halved: bool) -> int:
    """How many steps are captured; halved: each also as two halves."""
    return len(bucket_sizes(max_rows)) * len(CAPTURED) * (2 if halved else 1)


class DecodeGraphs:
    """Captured decode steps over the rows and the KV cache of a configured group. Used by the step thread only."""

    def __init__(self, model: Model, kv: KvCache, rows: Rows, group: Group, *, max_model_len: int) -> None:
        device, most = rows.device, len(rows.states)
        self.sizes = bucket_sizes(most)
        self._model, self._kv, self._rows, self._group = model, kv, rows, group
        self._max_model_len = max_model_len
        self._index = torch.full((most,), rows.scratch, dtype=torch.int64, device=device)
        self._inputs = prepare.DecodeInputs.empty(most, rows.tables, device)
        self._ring = torch.full((RING_STEPS, most), NO_WORD, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)  # counts steps; the device moves it
        self._steps = 0  # the same count on the host
        self._listed = np.zeros(0, np.int64)
        self._replays: dict[tuple[int, Variant, bool], Replay] = {}  # by rows, sampling, and whether in two halves
        self._uses: Counter[tuple[int, bool]] | None = None  # plans of a size, while steps are captured by use
        # Of memory that all graphs share, those of prefill passes too.
        self.pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def capture(self) -> None:
        """Captures all buckets and variants, the largest first, so that the smaller ones share its memory. Steps in two halves wait
        until they are asked for."""
        started, before = time.perf_counter(), _reserved(self._rows.device)
        gc.collect()
        gc.freeze()  # collecting while a graph is captured would free memory that it must keep
        try:
            for size in reversed(self.sizes):
                for variant in CAPTURED:
                    self._replays[size, variant, False] = self._capture(size, variant, dual=False)
        finally:
            gc.unfreeze()
        log.info(
            "captured decode graphs of %s rows in %.1f s, %.2f GiB",
            ", ".join(map(str, self.sizes)),
            time.perf_counter() - started,
            (_reserved(self._rows.device) - before) / 2**30,
        )

    def wait_for_use(self) -> None:
        """Instead of `capture`: nothing is captured until `used` says so."""
        self._uses = Counter()

    def used(self, size: int, *, dual: bool) -> bool:
        """Whether the steps of a plan of this size are replayed; to be asked once a plan. With `wait_for_use` the first
        EAGER_PLANS of a size are not, and then they are captured. Nothing counts but the sizes of plans: all workers of a group
        come to the same answer, and capture together."""
        if self._uses is not None:
            self._uses[size, dual] += 1
            if self._uses[size, dual] <= EAGER_PLANS:
                return False
            self.make_ready(size, dual=dual)
        return True

    def size(self, rows: int) -> int:
        """The bucket for so many rows; a group's bucket may be rounded up beyond the rows that there are."""
        return next(size for size in self.sizes if size >= min(rows, self.sizes[-1]))

    def make_ready(self, size: int, *, dual: bool) -> None:
        """Captures what was not of the steps of this size. All workers of a group do this together, whichever variant each of
        them replays: before a step is captured it runs, with all its exchanges."""
        for variant in CAPTURED:
            self._captured(size, variant, dual)

    def launch(self, rows: I64, variant: Variant, size: int, *, dual: bool = False) -> torch.Tensor:
        """Queues one decode step of these rows in the bucket of this size; returns where its words [len(rows)] int64 will be, on
        the host. The words are there once the work queued so far is done, and stay for RING_STEPS steps.
        """
        if not np.array_equal(rows, self._listed):
            self._list(rows)
        self._captured(size, variant, dual)()
        words = self._ring[self._steps % RING_STEPS, : len(rows)]
        self._steps += 1
        return words

    def _list(self, rows: I64) -> None:
        index = np.full(len(self._index), self._rows.scratch, np.int64)
        index[: len(rows)] = rows
        self._index.copy_(self._rows.to_device(index), non_blocking=True)
        self._listed = rows

    def _captured(self, size: int, variant: Variant, dual: bool) -> Replay:
        if (replay := self._replays.get((size, variant, dual))) is None:
            replay = self._replays[size, variant, dual] = self._capture(size, variant, dual=dual)
        return replay

    def _capture(self, size: int, variant: Variant, *, dual: bool) -> Replay:
        """The step as one call. Elsewhere than on CUDA it is not captured, only called."""
        inputs = self._inputs.narrow(size)

        def step() -> None:
            self._step(size, variant, inputs, dual)

        if self._rows.device.type != "cuda":
            return step
        listed, counted = self._index.clone(), self._cursor.clone()
        self._index.fill_(self._rows.scratch)  # warming up changes no row
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # compiles kernels and makes workspaces, which a capture must not
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            step()
        self._index.copy_(listed)
        self._cursor.copy_(counted)
        return graph.replay

    def _step(self, size: int, variant: Variant, inputs: prepare.DecodeInputs, dual: bool) -> None:
        rows, index = self._rows, self._index[:size]
        prepare.decode_inputs(
            index, rows.last, rows.lengths, rows.alive, rows.tables, rows.block_sizes, inputs, rows.share
        )
        hidden = self._model.forward(self._step_inputs(size, inputs, dual), self._kv)
        tokens, bad = self._sample(self._model.logits(hidden), index, variant)
        post_update.finish(
            index,
            tokens,
            bad,
            rows.state(),
            self._ring,
            self._cursor,
            row_shift=ROW_SHIFT,
            stop_bit=STOP_BIT,
            length_bit=LENGTH_BIT,
            fault_bit=FAULT_BIT,
        )

    def _sample(
        self, logits: torch.Tensor, index: torch.Tensor, variant: Variant
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens [size] int64 and which rows have no finite logit, as the first worker of the DP rank samples them."""
        cp, sampled = self._group.cp, index
        if cp.rank == 0:
            if variant is Variant.GREEDY:
                tokens, bad = ops.sample_greedy(logits)
            else:
                tokens, bad = ops.sample_rows(logits, index, self._rows.sampling.tables(self._rows.lengths))
            if cp.size == 1:
                return tokens, bad
            sampled = tokens | bad.long() << ROW_SHIFT
        sampled = cp.broadcast("sampled", sampled if cp.rank == 0 else torch.empty_like(index))
        return sampled & TOKEN_MASK, sampled >> ROW_SHIFT != 0

    def _step_inputs(self, size: int, inputs: prepare.DecodeInputs, dual: bool) -> StepInputs:
        return StepInputs(
            kind=Kind.DECODE,
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            rows=self._index[:size],
            query_starts=self._rows.counter[: size + 1],
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            slots=inputs.slots,
            logits_index=self._rows.counter[:size],
            query_lens=(),
            host_seq_lens=(),
            max_seq_len=self._max_model_len,
            live=inputs.live,
            expert_rows=size if self._group.coupled else 0,
            dual_batch=dual,
        )


def _reserved(device: torch.device) -> int:
    """Bytes of device memory that torch holds."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
