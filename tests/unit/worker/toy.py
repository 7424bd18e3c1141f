"""A model for tests whose logits are a function of what it finds in the KV cache, and a driver of runners over it."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from lockstep_common.steps import (
    AddRow,
    Body,
    Flag,
    GroupConfig,
    Header,
    Kind,
    Plan,
    PrefillPass,
    PromptChunk,
    Sampling,
    TableWrite,
    unpack_words,
)
from lockstep_worker.collectives import Group
from lockstep_worker.exchange.layer import ShardedLayers
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache, KvSpec
from lockstep_worker.loaded import Loaded, Mark
from lockstep_worker.protocol import StepResult
from lockstep_worker.runner import Runner
from lockstep_worker.sampling import TokenSampler

torch.set_num_threads(1)  # tiny operations

VOCAB = 50
BLOCK = 4
MAX_LEN = 64
ROWS = 6
BLOCKS_A_ROW = MAX_LEN // BLOCK
BLOCKS = 1 + ROWS * BLOCKS_A_ROW
CPU = torch.device("cpu")

Logits = Callable[[tuple[int, ...]], np.ndarray]


def hashed_logits(history: tuple[int, ...]) -> np.ndarray:
    """Well separated logits that depend on every token of the history."""
    seed = zlib.crc32(np.array(history, np.int64).tobytes())
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 4


class ToyModel:
    """Keeps token + 1 as key and the position as value; its logits are a function of the tokens read back."""

    name = "toy"
    vocab_size = VOCAB
    max_model_len = MAX_LEN
    routed_experts = False
    experts: ShardedLayers | None = None
    deterministic = True
    generated_reusable = True
    captures_prefill = True
    captured_prefix: int | None = None
    config_hash = "toy"

    def __init__(self, logits_of: Logits = hashed_logits) -> None:
        self.logits_of = logits_of
        self.passes: list[tuple[Kind, int]] = []  # kind and tokens of each forward pass

    def join(self, group: Group) -> None:
        pass

    def kv_specs(self) -> tuple[KvSpec, ...]:
        return (KvSpec(kind="full", layers=1, kv_heads=1, head_dim=1, dtype=torch.float32),)

    def keep_kv_in(self, dtype: torch.dtype) -> None:
        raise NotImplementedError

    def forward(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        self.passes.append((inputs.kind, len(inputs.token_ids)))
        layer = kv.layer(0, 0)
        blocks, offsets = inputs.slots[0] // kv.block_size, inputs.slots[0] % kv.block_size
        layer[blocks, 0, 0, offsets, 0] = (inputs.token_ids + 1).float()
        layer[blocks, 1, 0, offsets, 0] = inputs.positions.float()
        lens = inputs.seq_lens.tolist()
        assert not inputs.query_lens or list(inputs.host_seq_lens) == lens
        assert max(lens, default=0) <= inputs.max_seq_len
        rows = []
        for token in inputs.logits_index.tolist():
            i = int(torch.searchsorted(inputs.query_starts, token, right=True)) - 1
            last = token == int(inputs.query_starts[i + 1]) - 1
            length = lens[i] if last else int(inputs.positions[token]) + 1
            rows.append(self.logits_of(self._history(layer, inputs.block_tables[0][i], length, kv.block_size)))
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, VOCAB)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    @staticmethod
    def _history(layer: torch.Tensor, table: torch.Tensor, length: int, block_size: int) -> tuple[int, ...]:
        positions = torch.arange(length)
        return tuple((layer[table[positions // block_size], 0, 0, positions % block_size, 0] - 1).int().tolist())


class InstantMark:
    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return False


class SecondLookMark(InstantMark):
    """Of work that is done when it is looked for a second time."""

    def __init__(self) -> None:
        self._looked = False

    def query(self) -> bool:
        looked, self._looked = self._looked, True
        return looked


class Mode(enum.Enum):
    """How the runner meets its device."""

    NOW = "operations are done when they return"
    LATE = "as on an asynchronous device, results are read a step late"
    REPLAYED = "decode windows as on CUDA, each step called instead of replayed"


def make_runner(
    model: ToyModel, *, mode: Mode = Mode.NOW, max_rows: int = ROWS, capture_by_use: bool = False
) -> Runner:
    """A configured runner."""
    marks: dict[Mode, Callable[[], Mark]] = {Mode.LATE: InstantMark, Mode.REPLAYED: SecondLookMark}
    loaded = Loaded(
        model,
        TokenSampler,
        "toy",
        "float32",
        CPU,
        True,
        max_rows,
        2048,
        MAX_LEN,
        BLOCK,
        BLOCKS,
        marks.get(mode),
        graphs=mode is Mode.REPLAYED,
    )
    runner = Runner(lambda progress: loaded)
    runner.load(lambda share, message: None)
    runner.configure(
        GroupConfig(1, 1, 0, 0, 0, 1, 1, "", 0, max_rows, MAX_LEN, 32, 8, BLOCKS, capture_by_use=capture_by_use)
    )
    model.passes.clear()
    return runner


@dataclass
class Choice:
    """A request's choice as the driver sees it."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    limit: int = 0
    choice: int = 0
    output: list[int] = field(default_factory=list)
    end: Flag = field(default_factory=lambda: Flag(0))
    fault: str = ""
    fresh: bool = True  # has not sampled since it was added
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)


class PlanDriver:
    """Feeds a runner plans the way a scheduler does: each row has blocks of its own, appended as needed."""

    def __init__(
        self,
        runner: Runner,
        *,
        window: int = 4,
        block: int = BLOCK,
        dual: bool = False,
        epoch: int = 1,
        micro: int = 0,
    ) -> None:
        """block: tokens of a block, as the scheduler counts them; dual: plans ask for two halves; micro: tokens of the group's
        largest passes, 0: those of this rank."""
        self.runner = runner
        self.micro = micro
        self.epoch = epoch
        self.dual = dual
        self.window = window
        self.block = block
        self.rows: dict[int, Choice] = {}
        self.prompts: list[PromptChunk] = []  # all that came, in order
        self._blocks: dict[int, int] = {}
        self._seq = 0
        self._removes: list[int] = []

    def add(self, choices: dict[int, Choice], *, chunk: int = 1000, computed: int = 0) -> None:
        """Adds rows and prefills them, in passes of at most `chunk` tokens a row. The row's blocks have the first `computed`."""
        adds = []
        for row, choice in choices.items():
            choice.fresh = True
            count = -(-len(choice.tokens) // self.block)
            self._blocks[row] = count
            adds.append(
                AddRow(
                    row=row,
                    request_id=f"r{row}",
                    choice=choice.choice,
                    prompt_len=len(choice.prompt),
                    tokens=u32(choice.tokens),
                    computed=computed,
                    blocks=(u32(self.blocks_of(row, 0, count)),),
                    sampling=choice.sampling,
                    limit=choice.limit or MAX_LEN,
                )
            )
        self.rows.update(choices)
        longest = max((len(choice.tokens) for choice in choices.values()), default=0)
        passes = []
        for start in range(computed, longest, chunk):
            chunks = [
                (r, start, min(chunk, len(c.tokens) - start)) for r, c in choices.items() if len(c.tokens) > start
            ]
            passes.append(PrefillPass(*(u32(column) for column in zip(*chunks, strict=True))))
        removes, self._removes = u32(self._removes), []
        body = Body(1, 0, removes=removes, adds=tuple(adds), passes=tuple(passes))
        micro = tuple(int(p.counts.sum()) for p in passes)
        if self.micro:
            micro = (self.micro,) * max(1, len(passes))
        self._book(self.runner.run(self._plan(Kind.PREFILL, 1, body, micro)))

    def decode(self, rows: Iterable[int] | None = None) -> None:
        """One window over the rows (default: all that run)."""
        listed = sorted(self.running() if rows is None else rows)
        writes: list[tuple[int, int, int]] = []
        for row in listed:
            need = -(-min(len(self.rows[row].tokens) + self.window + self.runner.in_flight, MAX_LEN) // self.block)
            if need > self._blocks[row]:
                writes.append((row, self._blocks[row], need - self._blocks[row]))
                self._blocks[row] = need
        blocks = [b for row, start, count in writes for b in self.blocks_of(row, start, count)]
        tables = (table_write(writes, blocks),) if writes else ()
        removes, self._removes = u32(self._removes), []
        body = Body(1, 0, removes=removes, rows=u32(listed), table_writes=tables, zeroes=(u32(blocks),))
        self._book(self.runner.run(self._plan(Kind.DECODE, self.window, body)))

    def remove(self, row: int) -> Choice:
        """Removes a row with the next plan; the choice has all its tokens, as when a scheduler has booked the plans before."""
        self.settle()
        self._removes.append(row)
        return self.rows.pop(row)

    def running(self) -> list[int]:
        return [row for row, choice in self.rows.items() if not choice.end]

    def finish(self) -> None:
        while self.running():
            self.decode()
        self.settle()

    def settle(self) -> None:
        """Books what is in flight."""
        self._book(self.runner.poll(wait=True))

    @staticmethod
    def blocks_of(row: int, start: int, count: int) -> list[int]:
        return [1 + row * BLOCKS_A_ROW + start + i for i in range(count)]

    @property
    def plans(self) -> int:
        """So far."""
        return self._seq

    def _plan(self, kind: Kind, k: int, body: Body, micro: tuple[int, ...] = ()) -> Plan:
        self._seq += 1
        header = Header(self.epoch, self._seq, kind, 0, k, row_bucket=ROWS, micro_chunks=micro, dual_batch=self.dual)
        return Plan(header, body)

    def _book(self, results: Iterable[StepResult]) -> None:
        for result in results:
            self.prompts += result.prompts
            tokens, rows, flags = unpack_words(result.words)
            faults = dict(result.faults)
            for i, (token, row, flag) in enumerate(zip(tokens.tolist(), rows.tolist(), flags.tolist(), strict=True)):
                choice = self.rows[row]
                assert not choice.end, f"row {row} went on after its end"
                assert bool(flag & Flag.FIRST) == choice.fresh, f"row {row}: flag FIRST"
                choice.fresh = False
                choice.end = Flag(flag) & Flag.END
                if flag & Flag.FAULT:
                    choice.fault = faults[row]
                else:
                    choice.output.append(token)
                    if choice.sampling.logprobs >= 0:
                        assert result.logprobs is not None
                        choice.logprobs.append(float(result.logprobs[i]))
                        choice.tops.append(top_of(result, i))


def top_of(result: StepResult, word: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    if result.top is None:
        return (), ()
    starts = np.cumsum(result.top.counts) - result.top.counts
    for index, start, count in zip(result.top.index, starts, result.top.counts, strict=True):
        if index == word:
            return tuple(result.top.ids[start : start + count].tolist()), tuple(
                result.top.values[start : start + count].tolist()
            )
    return (), ()


def table_write(writes: list[tuple[int, int, int]], blocks: list[int]) -> TableWrite:
    """A write of group 0 from (row, start, count) triples."""
    rows, starts, counts = (u32(column) for column in zip(*writes, strict=True))
    return TableWrite(0, rows, starts, counts, u32(blocks))


def u32(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.uint32)


def solo(model: ToyModel, choice: Choice, *, window: int = 4, row: int = 0, mode: Mode = Mode.NOW) -> Choice:
    """The choice run alone to its end."""
    driver = PlanDriver(make_runner(model, mode=mode), window=window)
    driver.add({row: choice})
    driver.finish()
    return choice
