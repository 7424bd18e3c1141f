"""Prefill passes as CUDA graphs, where launching their kernels one by one would cost more than running them.

A pass is padded to a bucket of tokens. Everything that tells passes apart (which tokens of which rows) is one array of integers,
uploaded before the replay; tokens, slots and block tables are gathered from the rows on the device. What pads a pass belongs to
no sequence: it writes to the null block, is routed to no expert, and nothing reads what is computed for it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from lockstep_common.steps import Kind
from lockstep_kernels import prepare
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model
from lockstep_worker.protocol import spans
from lockstep_worker.rows import ChunkPass, Rows

log = logging.getLogger(__name__)

_SIZES: Final = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_TOKENS_A_SEQUENCE: Final = (
    8  # a bucket has room for so many sequences of this length; for more and shorter ones it has not
)
_MOST_SEQUENCES: Final = 64
_TRIES: Final = 3  # the least time of so many counts
_LAUNCHING_COSTS: Final = 2  # times what it takes alone: it keeps the host from all else, and all else keeps it


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the integers of a pass of T tokens and B sequences lie in the array that is uploaded."""

    tokens: int
    sequences: int

    @property
    def size(self) -> int:
        return 2 * self.tokens + 4 * self.sequences + 2

    def split(self, array: Any) -> tuple[Any, ...]:
        """positions [T], owners [T], rows [B], lens [B], logits_index [B], query_starts [B + 1], count [1]: views."""
        t, b = self.tokens, self.sequences
        bounds = np.cumsum([0, t, t, b, b, b, b + 1, 1]).tolist()
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

    def __init__(self, model: Model, kv: KvCache, rows: Rows, *, max_tokens: int, max_model_len: int) -> None:
        self._model, self._kv, self._rows = model, kv, rows
        self._max_model_len = max_model_len
        self._sizes = (*(size for size in _SIZES if size < max_tokens), max_tokens)
        self._captured: list[_Captured] = []

    def capture(self, pool: Any) -> None:
        """Captures buckets, the smallest first, for as long as a replay takes less than launching a pass costs."""
        started = time.perf_counter()
        launching_s = min(self._seconds(self._launch_pass) for _ in range(_TRIES))
        for size in self._sizes:
            captured = self._capture(_Layout(size, max(1, min(_MOST_SEQUENCES, size // _TOKENS_A_SEQUENCE))), pool)
            replaying_s = min(self._seconds(captured.replay) for _ in range(_TRIES))
            if self._rows.device.type == "cuda" and replaying_s > _LAUNCHING_COSTS * launching_s:
                break
            self._captured.append(captured)
        log.info(
            "captured prefill passes of %s tokens in %.1f s; launching a pass takes %.1f ms",
            ", ".join(str(captured.layout.tokens) for captured in self._captured) or "no",
            time.perf_counter() - started,
            launching_s * 1e3,
        )

    def logits(self, chunks: ChunkPass) -> torch.Tensor | None:
        """Queues a pass; the logits [n, V] float32 of its n rows that sample, or None: no bucket fits it.

        They stay until the next replay of any graph.
        """
        tokens, sequences = int((chunks.ends - chunks.starts).sum()), len(chunks.rows)
        if chunks.kind is not Kind.PREFILL or tokens == 0:
            return None
        most = self._model.captured_prefix
        if most is not None and int(chunks.starts.sum()) > most:
            return None
        for captured in self._captured:
            if tokens <= captured.layout.tokens and sequences <= captured.layout.sequences:
                captured.upload.copy_(self._rows.to_device(self._described(chunks, captured.layout)))
                return captured.replay()[: len(chunks.samples)]
        return None

    def _described(self, chunks: ChunkPass, layout: _Layout) -> np.ndarray[Any, np.dtype[np.int64]]:
        array = np.zeros(layout.size, np.int64)
        positions, owners, rows, lens, logits_index, query_starts, count = layout.split(array)
        counts = chunks.ends - chunks.starts
        owner, where = spans(chunks.starts, counts)
        tokens, sequences = len(owner), len(counts)
        positions[:tokens], owners[:tokens], owners[tokens:] = where, owner, layout.sequences - 1
        rows[:sequences], rows[sequences:] = chunks.rows, self._rows.scratch
        lens[:sequences] = chunks.ends
        query_starts[1 : sequences + 1], query_starts[sequences + 1 :] = np.cumsum(counts), tokens
        logits_index[: len(chunks.samples)] = query_starts[1:][chunks.samples] - 1
        count[0] = tokens
        return array

    def _capture(self, layout: _Layout, pool: Any) -> _Captured:
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
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = self._pass(layout, upload)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return _Captured(layout, upload, replay)

    def _pass(self, layout: _Layout, upload: torch.Tensor) -> torch.Tensor:
        rows = self._rows
        positions, owners, index, lens, logits_index, query_starts, count = layout.split(upload)
        live = torch.arange(layout.tokens, device=upload.device) < count
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
        )
        return self._model.logits(self._model.forward(inputs, self._kv))

    def _launch_pass(self) -> torch.Tensor:
        """An eager pass of so few tokens that the device runs it in less time than the host takes to launch it."""
        chunks = ChunkPass(Kind.PREFILL, *(np.array([n]) for n in (self._rows.scratch, 0, self._sizes[0], 0)))
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
