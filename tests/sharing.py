"""Token sequences on ranks that share them: a thread a rank over real gloo, each with a model, a cache and its slots."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep_bench.worker_alone import step_inputs
from lockstep_common.steps import Kind
from lockstep_kernels import prepare
from lockstep_kernels.prepare import Share
from lockstep_worker.collectives import Group
from lockstep_worker.exchange.placement import WHOLE, Sharding
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model, load_model
from tests.ranks import run_ranks

CPU = torch.device("cpu")
OWN = 4  # tokens of a block on one rank
LONGEST = 160
TOLERANCE = 1e-5
Chunk = tuple[int, int, int]  # sequence, first position, end


@dataclass(frozen=True)
class Pass:
    kind: Kind
    chunks: tuple[Chunk, ...]
    every: bool = False  # logits of all tokens are wanted, not only of the last of each chunk
    expert_rows: int = 0  # see StepInputs

    @property
    def tokens(self) -> list[tuple[int, int]]:
        return [(i, p) for i, start, end in self.chunks for p in range(start, end)]


def prefill(*chunks: Chunk, every: bool = False) -> Pass:
    return Pass(Kind.PREFILL, chunks, every)


def decode(*chunks: Chunk, expert_rows: int = 0) -> Pass:
    return Pass(Kind.DECODE, chunks, expert_rows=expert_rows)


@dataclass
class Outcome:
    """What a rank saw."""

    logits: list[torch.Tensor]
    caches: list[torch.Tensor]  # of each layer
    names: list[str]
    share: Share
    tables: list[list[int]]

    def kept(self, layer: int, sequence: int, position: int) -> torch.Tensor:
        """Keys and values of a token that this rank keeps: [planes, heads, d]."""
        block, offset = divmod(position, OWN * self.share.ranks)
        return self.caches[layer][self.tables[sequence][block], :, :, offset % OWN]

    def holds(self, position: int) -> bool:
        return position // OWN % self.share.ranks == self.share.rank


@dataclass
class Setting:
    """A model, and token sequences that begin alike on all ranks."""

    directory: Path
    tokens: list[list[int]] = field(default_factory=list)
    hits: dict[int, tuple[int, int]] = field(default_factory=dict)  # of a sequence: whose first tokens it reuses
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    own: int = OWN

    def model(self, sharding: Sharding = WHOLE) -> Model:
        deterministic = self.device.type == "cpu"
        return load_model(
            self.directory, dtype=self.dtype, device=self.device, deterministic=deterministic, sharding=sharding
        )

    def run(self, ranks: int, passes: Sequence[Pass], *, over: Callable[[Group], Group] = lambda g: g) -> list[Outcome]:
        """By rank."""

        def work(group: Group) -> Outcome:
            return self.steps(self.model(), over(group), passes)

        return run_ranks(1, ranks, work)

    def steps(self, model: Model, group: Group, passes: Sequence[Pass]) -> Outcome:
        model.join(group)
        share = Share(group.cp.size, group.cp.rank)
        size = self.own * share.ranks
        width = -(-LONGEST // size)
        blocks = list(range(1, 1 + width * len(self.tokens)))
        random.Random(1).shuffle(blocks)
        tables = [blocks[i * width : (i + 1) * width] for i in range(len(self.tokens))]
        for i, (other, count) in self.hits.items():
            assert count % size == 0
            tables[i][: count // size] = tables[other][: count // size]
        kv = KvCache(model.kv_specs(), num_blocks=1 + len(blocks), block_size=self.own, device=self.device)
        layers = range(model.kv_specs()[0].layers)
        for layer in layers:
            kv.layer(0, layer).fill_(torch.nan)
        logits = [model.logits(model.forward(self.inputs(p, tables, share), kv)) for p in passes]
        names = [record.id.name for record in group.recorder.history()]
        return Outcome(logits, [kv.layer(0, layer) for layer in layers], names, share, tables)

    def inputs(self, p: Pass, tables: list[list[int]], share: Share) -> StepInputs:
        if not p.chunks:
            return dataclasses.replace(nothing(p.kind), expert_rows=p.expert_rows)
        chunks = [(self.tokens[i][start:end], start) for i, start, end in p.chunks]
        size = self.own * share.ranks
        inputs = step_inputs(p.kind, chunks, [tables[i] for i, _, _ in p.chunks], size)
        owner = torch.repeat_interleave(torch.arange(len(chunks)), inputs.query_starts.diff())
        slots = prepare.slots(inputs.block_tables[0], owner, inputs.positions, size, share)
        wanted = torch.arange(len(inputs.token_ids)) if p.every else inputs.logits_index
        inputs = dataclasses.replace(inputs, slots=(slots,), logits_index=wanted, expert_rows=p.expert_rows)
        return dataclasses.replace(
            inputs, **{f.name: _moved(getattr(inputs, f.name), self.device) for f in dataclasses.fields(inputs)}
        )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return tuple(_moved(item, device) for item in value) if isinstance(value, tuple) else value


def nothing(kind: Kind) -> StepInputs:
    """A placeholder."""
    none, table = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int64)
    starts = torch.zeros(1, dtype=torch.int64)
    return StepInputs(kind, none, none, none, starts, none, (table,), (none,), none, (), (), 0)


def setting(directory: Path, lens: Sequence[int]) -> Setting:
    draw = random.Random(7)
    return Setting(directory, [[draw.randrange(2, 300) for _ in range(n)] for n in lens])


def check_same(one: Outcome, many: list[Outcome], passes: Sequence[Pass]) -> None:
    """All ranks have the logits of one rank, keep what is theirs of its keys and values, and nothing else."""
    close = TOLERANCE * float(torch.cat(one.logits).std())
    for outcome in many:
        for got, want in zip(outcome.logits, one.logits, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=close)
            assert torch.equal(got.argmax(1), want.argmax(1))
        assert outcome.names == many[0].names
        stored = {token for p in passes for token in p.tokens if outcome.holds(token[1])}
        for layer, cache in enumerate(outcome.caches):
            for sequence, position in stored:
                got, want = outcome.kept(layer, sequence, position), one.kept(layer, sequence, position)
                if layer == 0:
                    assert torch.equal(got, want)
                torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
            written = (~cache[1:].isnan()).any(4).any(2).any(1).sum()
            assert written == len(stored)
