"""Drives a model through passes as a runner would, for any number of sequences."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch

from lockstep_bench.worker_alone import step_inputs
from lockstep_common.steps import Kind
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model

Chunk = tuple[int, int, int]  # sequence, first position, end
LAST, EVERY, NONE = "last", "every", "none"  # of which positions of its chunks a pass wants logits


class Sequences:
    """Token sequences, each with its own blocks in a cache that starts as NaN everywhere."""

    def __init__(self, model: Model, tokens: Sequence[Sequence[int]], *, block_size: int = 16, seed: int = 0) -> None:
        self.model = model
        self.tokens = [list(t) for t in tokens]
        widths = [-(-model.max_model_len // block_size)] * len(tokens)
        self._free = list(range(1, 2 * sum(widths) + 1))
        random.Random(seed).shuffle(self._free)
        self._tables = [[self._free.pop() for _ in range(width)] for width in widths]
        self.kv = KvCache(model.kv_specs(), num_blocks=2 * sum(widths) + 1, block_size=block_size)
        for layer in range(model.kv_specs()[0].layers):
            self.kv.layer(0, layer).fill_(torch.nan)

    def run(self, kind: Kind, chunks: Sequence[Chunk], *, wanted: str = LAST) -> torch.Tensor:
        """One pass; logits of the wanted positions, in the order of the chunks."""
        inputs = step_inputs(
            kind,
            [(self.tokens[i][start:end], start) for i, start, end in chunks],
            [self._tables[i] for i, _, _ in chunks],
            self.kv.block_size,
        )
        if wanted != LAST:
            count = len(inputs.token_ids) if wanted == EVERY else 0
            inputs = dataclasses.replace(inputs, logits_index=torch.arange(count))
        return self.model.logits(self.model.forward(inputs, self.kv))

    def move(self, i: int) -> None:
        """Gives sequence `i` other blocks: what was computed of it is lost, as in a preemption."""
        table = self._tables[i]
        self._tables[i] = [self._free.pop(0) for _ in table]
        self._free += table
