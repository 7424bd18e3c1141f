"""Prefill passes as CUDA graphs, where launching their kernels one by one would cost more than running them.

A pass is padded to a bucket of tokens. Everything that tells passes apart (which tokens of which rows) is one array of integers,
uploaded before the replay; tokens, slots and block tables are gathered from the rows on the device. What pads a pass belongs to
no sequence: it writes to the null block, is routed to no expert, and nothing reads what is computed for it.

In a group that shares out its experts, tokens reach them in buffers of a capacity: the bucket, which all ranks find in the header
(`PrefillGraphs.size`). Whether a rank replays is its own business then: one whose pass does not fit (many short sequences, a
long prefix, scores) launches it with the same exchanges. Buffers grow with ranks x tokens, so that only buckets whose exchange
takes EXCHANGED_BYTES at most are captured; larger passes tell each other their counts, and so does a plan in two halves.

Passes that several workers share (context parallelism) are not captured: their chunks, and the pieces of the prefixes that they
gather, have sizes that follow from every sequence's length.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from lockstep_common.steps import Kind
from lockstep_kernels import prepare
from lockstep_worker.collectives import Group
from lockstep_worker.graphs import EAGER_PLANS
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model
from lockstep_worker.protocol import spans
from lockstep_worker.rows import ChunkPass, Rows

log = logging.getLogger(__name__)

EXCHANGED_BYTES: Final = 128 << 20  # that tokens on their way to experts and back may take in a captured pass
_SIZES: Final = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_TOKENS_A_SEQUENCE: Final = (
    8  # a bucket has room for so many sequences of this length; for more and shorter ones it has not
)
_MOST_SEQUENCES: Final = 64
_TRIES: Final = 3  # the least time of so many counts
_LAUNCHING_COSTS: Final = 2  # times what it takes alone: it keeps the host from all else, and all else keeps it


def bucket_sizes(model: Model, max_tokens: int, *, cp: int) -> tuple[int, ...]:
    """Tokens of the passes that may be captured, ascending; the same on all ranks."""
    if not model.captures_prefill or cp > 1:
        return ()
    sizes, experts = (*(size for size in _SIZES if size < max_tokens), max_tokens), model.experts
    if experts is None:
        return sizes
    return tuple(size for size in sizes if experts.exchange_bytes(size, captured=True) <= EXCHANGED_BYTES)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the integers of a pass of T tokens and B sequences lie in the array that is uploaded."""

    tokens: int
    sequences: int

    @property
    def size(self) -> int:
        return 2 * self.tokens + 4 * self.sequences + 3

    def split(self, array: Any) -> tuple[Any, ...]:
        """positions [T], owners [T], rows [B], lens [B], logits_index [B], query_starts [B + 1], counts [2] of tokens
        and of rows of logits_index: views."""
        t, b = self.tokens, self.sequences
        bounds = np.cumsum([0, t, t, b, b, b, b + 1, 2]).tolist()
        return tuple(array[start:end] for start, end in itertools.pairwise(bounds))


@dataclass(frozen=True, slots=True)
class _Captured:
    layout: _Layout
    upload: torch.Tensor  # [layout.size] int64, on the device
    replay: Callable[[], torch.Tensor]  # gives logits [B, V] float32


class PrefillGraphs:
    """Captured prefill passes over the rows and the KV cache of a configured group. Used by the step thread only.

    Elsewhere than on CUDA passes are padded in the same way, but called instead of replayed.
    """

    def __init__(
        self,
        model: Model,
        kv: KvCache,
        rows: Rows,
        group: Group,
        *,
        sizes: tuple[int, ...],
        max_model_len: int,
        pool: Any = None,
    ) -> None:
        """sizes: see `bucket_sizes`; pool: of memory, that of `DecodeGraphs`."""
        self.sizes = sizes
        self._model, self._kv, self._rows, self._group = model, kv, rows, group
        self._max_model_len = max_model_len
        self._pool = pool
        self._captured: dict[int, _Captured] = {}  # by tokens, ascending
        self._too_large: float = math.inf  # tokens of the smallest bucket that is not worth it
        self._launching_s = 0.0  # what it takes to launch a pass, once that is known
        self._uses: Counter[int] | None = None  # passes of a bucket, while they are captured by use

    def capture(self) -> None:
        """Captures buckets, the smallest first, for as long as a replay takes less than launching a pass costs: on all workers of
        a group, which do this together."""
        started = time.perf_counter()
        for size in self.sizes:
            if not self._keep(size):
                break
        log.info(
            "captured prefill passes of %s tokens in %.1f s; launching a pass takes %.1f ms",
            ", ".join(map(str, self._captured)) or "no",
            time.perf_counter() - started,
            self._launching_s * 1e3,
        )

    def wait_for_use(self) -> None:
        """Instead of `capture`, in a group: a bucket is captured once EAGER_PLANS passes of its size were launched."""
        self._uses = Counter()

    def size(self, tokens: int) -> int:
        """The bucket that a group's pass takes in which no rank has more tokens, 0: it is not captured. To be asked once a pass;
        nothing counts but the numbers asked for, so that all workers come to the same answer, and capture together."""
        size = next((size for size in self.sizes if size >= tokens), 0)
        if self._uses is not None and size and size not in self._captured and size < self._too_large:
            self._uses[size] += 1
            if self._uses[size] > EAGER_PLANS:
                self._keep(size)
        return size if size in self._captured else 0

    def logits(self, chunks: ChunkPass, size: int = 0) -> torch.Tensor | None:
        """Queues a pass; the logits [n, V] float32 of its n rows that sample, or None: no bucket fits it. `size`: the bucket, if
        a group has agreed on one; then a pass without a token is a pass too.

        They stay until the next replay of any graph.
        """
        tokens, sequences = int((chunks.ends - chunks.starts).sum()), len(chunks.rows)
        if chunks.kind is not Kind.PREFILL or not (tokens or size):
            return None
        most = self._model.captured_prefix
        if most is not None and int(chunks.starts.sum()) > most:
            return None
        for captured in [self._captured[size]] if size else self._captured.values():
            if tokens <= captured.layout.tokens and sequences <= captured.layout.sequences:
                captured.upload.copy_(self._rows.to_device(self._described(chunks, captured.layout)))
                return captured.replay()[: len(chunks.samples)]
        return None

    def _keep(self, size: int) -> bool:
        """Captures a bucket and keeps it if that pays, on every rank."""
        experts = self._model.experts
        with nullcontext() if experts is None else experts.uncounted():
            if not self._launching_s:
                self._launching_s = min(self._seconds(self._launch_pass) for _ in range(_TRIES))
            captured = self._capture(_Layout(size, max(1, min(_MOST_SEQUENCES, size // _TOKENS_A_SEQUENCE))))
            replaying_s = min(self._seconds(captured.replay) for _ in range(_TRIES))
        slow = self._rows.device.type == "cuda" and replaying_s > _LAUNCHING_COSTS * self._launching_s
        if self._group.coupled:
            slow = bool(self._group.meet(int(slow)))
        if slow:
            self._too_large = size
        else:
            self._captured[size] = captured
        return not slow

    def _described(self, chunks: ChunkPass, layout: _Layout) -> np.ndarray[Any, np.dtype[np.int64]]:
        array = np.zeros(layout.size, np.int64)
        positions, owners, rows, lens, logits_index, query_starts, real = layout.split(array)
        counts = chunks.ends - chunks.starts
        owner, where = spans(chunks.starts, counts)
        tokens, sequences = len(owner), len(counts)
        positions[:tokens], owners[:tokens], owners[tokens:] = where, owner, layout.sequences - 1
        rows[:sequences], rows[sequences:] = chunks.rows, self._rows.scratch
        lens[:sequences] = chunks.ends
        query_starts[1 : sequences + 1], query_starts[sequences + 1 :] = np.cumsum(counts), tokens
        logits_index[: len(chunks.samples)] = query_starts[1:][chunks.samples] - 1
        real[:] = tokens, len(chunks.samples)
        return array

    def _capture(self, layout: _Layout) -> _Captured:
        device = self._rows.device
        upload = torch.zeros(layout.size, dtype=torch.int64, device=device)
        longest = min(layout.tokens, self._max_model_len)
        rehearsal = ChunkPass(Kind.PREFILL, *(np.array([n]) for n in (self._rows.scratch, 0, longest, 0)))
        upload.copy_(self._rows.to_device(self._described(rehearsal, layout)))
        if device.type != "cuda":
            return _Captured(layout, upload, lambda: self._pass(layout, upload))
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._pass(layout, upload)  # compiles kernels and makes workspaces, which a capture must not
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._pass(layout, upload)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return _Captured(layout, upload, replay)

    def _pass(self, layout: _Layout, upload: torch.Tensor) -> torch.Tensor:
        rows = self._rows
        positions, owners, index, lens, logits_index, query_starts, real = layout.split(upload)
        live = torch.arange(layout.tokens, device=upload.device) < real[:1]
        tables = tuple(table[index] for table in rows.tables)
        slots = (
            prepare.slots(table, owners, positions, size) for table, size in zip(tables, rows.block_sizes, strict=True)
        )
        inputs = StepInputs(
            kind=Kind.PREFILL,
            token_ids=rows.history[index[owners], positions],
            positions=positions,
            rows=index,
            query_starts=query_starts,
            seq_lens=lens,
            block_tables=tables,
            slots=tuple(slot.where(live, 0) for slot in slots),
            logits_index=logits_index,
            query_lens=(),
            host_seq_lens=(),
            max_seq_len=self._max_model_len,
            live=live,
            logits_live=torch.arange(layout.sequences, device=upload.device) < real[1:],
            expert_rows=layout.tokens if self._group.coupled else 0,
        )
        return self._model.logits(self._model.forward(inputs, self._kv))

    def _launch_pass(self) -> torch.Tensor:
        """An eager pass of so few tokens that the device runs it in less time than the host takes to launch it."""
        chunks = ChunkPass(Kind.PREFILL, *(np.array([n]) for n in (self._rows.scratch, 0, self.sizes[0], 0)))
        return self._model.logits(self._model.forward(self._rows.inputs(chunks), self._kv))

    def _seconds(self, run: Callable[[], Any]) -> float:
        """From the call until the device has done what it queued."""
        self._synchronize()
        started = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self._rows.device.type == "cuda":
            torch.cuda.synchronize(self._rows.device)
