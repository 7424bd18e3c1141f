"""Drives a model through passes as a runner would, for any number of sequences."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lockstep_bench.worker_alone import step_inputs
from lockstep_common.steps import Kind
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model

Chunk = tuple[int, int, int]  # sequence, first position, end
LAST, EVERY, NONE = "last", "every", "none"  # of which positions of its chunks a pass wants logits


class Sequences:
    """Token sequences, each with its own blocks in a cache that starts as NaN everywhere.

    prompts[i]: how many tokens of sequence i are its prompt, the others were generated; without it all are.
    """

    def __init__(
        self,
        model: Model,
        tokens: Sequence[Sequence[int]],
        prompts: Sequence[int] = (),
        *,
        block_size: int = 16,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model = model
        self.device = device
        self.tokens = [list(t) for t in tokens]
        self.prompts = list(prompts) or [len(t) for t in tokens]
        widths = [-(-model.max_model_len // block_size)] * len(tokens)
        self._free = list(range(1, 2 * sum(widths) + 1))
        random.Random(seed).shuffle(self._free)
        self.tables = [[self._free.pop() for _ in range(width)] for width in widths]
        self.kv = KvCache(model.kv_specs(), num_blocks=2 * sum(widths) + 1, block_size=block_size, device=device)
        for layer in range(model.kv_specs()[0].layers):
            self.kv.layer(0, layer).fill_(torch.nan)

    def run(self, kind: Kind, chunks: Sequence[Chunk], *, wanted: str = LAST) -> torch.Tensor:
        """One pass; logits of the wanted positions, in the order of the chunks."""
        return self.step(self.inputs(kind, chunks, wanted=wanted))

    def step(self, inputs: StepInputs) -> torch.Tensor:
        return self.model.logits(self.model.forward(inputs, self.kv))

    def inputs(self, kind: Kind, chunks: Sequence[Chunk], *, wanted: str = LAST) -> StepInputs:
        """What `run` steps with."""
        inputs = step_inputs(
            kind,
            [(self.tokens[i][start:end], start) for i, start, end in chunks],
            [self.tables[i] for i, _, _ in chunks],
            self.kv.block_size,
        )
        if wanted != LAST:
            count = len(inputs.token_ids) if wanted == EVERY else 0
            inputs = dataclasses.replace(inputs, logits_index=torch.arange(count))
        return dataclasses.replace(inputs, **{name: _moved(value, self.device) for name, value in _fields(inputs)})

    def captured(self, chunks: Sequence[Chunk], *, padding: int) -> StepInputs:
        """A prefill pass as a CUDA graph has it: no lengths on the host, `padding` tokens and one sequence more than it needs."""
        inputs = self.inputs(Kind.PREFILL, chunks, wanted=EVERY)
        count = len(inputs.token_ids)
        tables = torch.tensor([*(self.tables[i] for i, _, _ in chunks), [0] * len(self.tables[0])], device=self.device)
        return dataclasses.replace(
            inputs,
            token_ids=_padded(inputs.token_ids, padding),
            positions=_padded(inputs.positions, padding),
            rows=_padded(inputs.rows, 1),
            query_starts=torch.cat((inputs.query_starts, inputs.query_starts[-1:])),
            seq_lens=_padded(inputs.seq_lens, 1),
            block_tables=(tables,),
            slots=(_padded(inputs.slots[0], padding),),
            query_lens=(),
            host_seq_lens=(),
            max_seq_len=self.model.max_model_len,
            live=torch.arange(count + padding, device=self.device) < count,
        )

    def fill(self, chunks: Sequence[Chunk], *, wanted: str = LAST) -> torch.Tensor:
        """A step of a prefill plan: generated tokens are a pass of their own where their bits are not a prompt's."""
        if self.model.generated_reusable:
            return self.run(Kind.PREFILL, chunks, wanted=wanted)
        prompt = [(i, start, min(end, self.prompts[i])) for i, start, end in chunks]
        generated = [(i, max(start, self.prompts[i]), end) for i, start, end in chunks]
        parts = {Kind.PREFILL: prompt, Kind.DECODE: generated}
        found: dict[int, torch.Tensor] = {}
        for kind, part in parts.items():
            part = [(i, start, end) for i, start, end in part if start < end]
            if not part:
                continue
            logits = self.run(kind, part, wanted=wanted)
            counts = [end - start if wanted == EVERY else 1 for _, start, end in part]
            for (i, _, _), rows in zip(part, torch.split(logits, counts), strict=True):
                found[i] = torch.cat((found[i], rows)) if wanted == EVERY and i in found else rows
        return torch.cat([found[i] for i, _, _ in chunks])

    def move(self, i: int) -> None:
        """Gives sequence `i` other blocks: what was computed of it is lost, as in a preemption."""
        table = self.tables[i]
        self.tables[i] = [self._free.pop(0) for _ in table]
        self._free += table


def _padded(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat((x, x.new_zeros(count)))


def _fields(inputs: StepInputs) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(inputs):
        yield field.name, getattr(inputs, field.name)


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return value
