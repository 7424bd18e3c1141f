"""The project's one fake: a worker without torch whose tokens are scripted or a hash of the history, behind the real server.

    python -m tests.scripted_worker --port 7001 --script script.json

By default the next token of a row is a hash of its whole token history (with temperature > 0 also of seed and choice), so
batching, windows, preemption and prefix hits must not change any output. The engine keeps a shadow KV cache: each slot holds
the hash of the history up to its token. At every step it checks that the slots below the position hold what the row's history
says, so a wrong prefix hit, a freed block or a table that is too short is an error that says so, as are rows added twice,
unknown rows, and a block that two rows share without sharing the prefix.

A script is a JSON list; the first entry whose `match` equals the prompt's ids (or is "*") drives a row:

    {"match": [1, 2, 3], "tokens": [7, 8], "logprobs": [-0.1, -0.2], "end": "stop", "delay_ms": 5}

`end`: "stop" and "length" end the row with its last scripted token, "fault" ends it one step after it; without `end` the toy
model goes on. `delay_ms` slows every step the row takes part in. `crash_after: n` exits the process when the row has n tokens,
`hang_after: n` stops the engine there for good.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep_common import config, logs
from lockstep_common.config import setting
from lockstep_common.errors import Conflict, LockstepError
from lockstep_common.steps import (
    NULL_BLOCK,
    U32,
    U64,
    AddRow,
    Body,
    Flag,
    GroupConfig,
    Kind,
    KvGroup,
    Plan,
    PrefillPass,
    PromptChunk,
    PromptScores,
    TopLogprobs,
    WorkerFacts,
    pack_words,
)
from lockstep_worker.driver import Driver
from lockstep_worker.protocol import PlanLog, StepResult, spans, steps_of
from lockstep_worker.server import serve

_MASK = (1 << 64) - 1
_EMPTY_HISTORY = 0x243F6A8885A308D3
_GENERATED = 0x13198A2E03707344  # tells the KV of a generated token from that of the same token in a prompt


def mix(a: int, b: int) -> int:
    """A 64-bit hash of two numbers; never 0, which is an empty KV slot."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x7F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) or 1


def history_hash(tokens: Sequence[int]) -> int:
    """The hash of a token history; the toy model's only state."""
    state = _EMPTY_HISTORY
    for token in tokens:
        state = mix(state, token)
    return state


def toy_token(history: int, add: AddRow, generated: int, vocab_size: int) -> int:
    """The toy model: the token that follows a history."""
    sampling = add.sampling
    if sampling.temperature > 0:
        history = mix(mix(history, sampling.seed), add.choice)
    token = mix(history, 1) % vocab_size
    while generated < sampling.min_tokens and token in sampling.stop_ids:
        history = mix(history, 2)
        token = mix(history, 1) % vocab_size
    return token


def toy_output(prompt: Sequence[int], *, sampling: Any, choice: int = 0, vocab_size: int, limit: int) -> list[int]:
    """What the toy model generates for a prompt, up to its stop token or `limit` tokens in all: the oracle of tests."""
    add = AddRow(0, "", choice, len(prompt), np.array(prompt, np.uint32), 0, (), sampling, limit)
    history, output = history_hash(prompt), list[int]()
    while len(prompt) + len(output) < limit:
        token = toy_token(history, add, len(output), vocab_size)
        output.append(token)
        history = mix(history, token)
        if token in sampling.stop_ids and len(output) > sampling.min_tokens:
            break
    return output


def toy_scores(prompt: Sequence[int], width: int, vocab_size: int) -> PromptScores:
    """The scores of a prompt's tokens from the second on, made up like those of sampled tokens (see `ScriptedEngine`)."""
    hashes = [history_hash(prompt[: i + 1]) for i in range(1, len(prompt))]
    logprobs = np.array([-(h % 1000) / 250 for h in hashes], np.float32)
    best = np.arange(min(width, vocab_size))
    return PromptScores(
        logprobs,
        np.array([h % 7 + 1 for h in hashes], np.uint32),
        ((np.array(prompt[1:], np.int64)[:, None] + best) % vocab_size).astype(np.uint32),
        (logprobs[:, None] - 0.6931472 * best).astype(np.float32),
    )


@dataclass(frozen=True)
class Script:
    """What happens to the rows of one prompt."""

    match: tuple[int, ...] | None  # None: every prompt
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    end: str = ""
    delay_ms: float = 0.0
    crash_after: int = -1
    hang_after: int = -1

    def __post_init__(self) -> None:
        if self.end not in ("", "stop", "length", "fault"):
            raise ValueError(f"end must be stop, length or fault, not {self.end!r}")
        if self.end in ("stop", "length") and not self.tokens:
            raise ValueError(f"a script that ends with {self.end!r} needs a token to end with")

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Script:
        match = entry["match"]
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        values["match"] = None if match == "*" else tuple(match)
        return cls(**values)


@dataclass
class _Row:
    add: AddRow
    script: Script
    tokens: list[int]
    hashes: U64  # [limit + 1]: hash of the first i tokens
    mark: int  # what the KV of a generated token is marked with
    computed: int  # leading tokens whose KV was written
    alive: bool = True
    tables: list[list[int]] = field(default_factory=list)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.add.prompt_len

    def kv(self, start: int, end: int) -> U64:
        """What the KV of positions [start, end) is."""
        values = self.hashes[start + 1 : end + 1].copy()
        values[max(0, self.add.prompt_len - start) :] ^= np.uint64(self.mark)
        return values


class ScriptedEngine:
    """An `Engine` without a model. Usable in process; every violation of the plan protocol raises LockstepError."""

    def __init__(
        self,
        scripts: Sequence[Script] = (),
        *,
        step_ms: float = 0.0,
        vocab_size: int = 32000,
        max_model_len: int = 4096,
        num_blocks: int = 1024,
        block_size: int = 16,
        max_rows: int = 256,
        max_batched_tokens: int = 2048,
        model: str = "scripted",
        generated_reusable: bool = True,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._scripts = tuple(scripts)
        self._step_ms = step_ms
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_rows = max_rows
        self._max_batched_tokens = max_batched_tokens
        self._model = model
        self._generated_reusable = generated_reusable
        self._wait = wait
        self._written = 0  # epoch of the last plan
        self._rows: dict[int, _Row] = {}
        self._kv: U64 = np.zeros((num_blocks, block_size), np.uint64)
        self._owners: dict[int, set[int]] = {}  # block -> rows whose table has it
        self._prompts: list[PromptChunk] = []  # scored in the current step

    # The engine protocol

    def load(self, progress: Callable[[float, str], None]) -> WorkerFacts:
        progress(1.0, "scripted")
        return self._facts()

    def configure(self, group: GroupConfig) -> WorkerFacts:
        if group.max_rows > self._max_rows or group.max_model_len > self._max_model_len:
            raise Conflict(
                f"the group wants {group.max_rows} rows of {group.max_model_len} tokens; "
                f"this worker has {self._max_rows} of {self._max_model_len}"
            )
        self._num_blocks = min(group.num_blocks or len(self._kv), len(self._kv))
        self._rows.clear()
        self._owners.clear()
        return self._facts()

    def run(self, plan: Plan) -> Iterator[StepResult]:
        self._written = plan.header.epoch
        self._apply(plan.body)
        for step in range(steps_of(plan.header)):
            delay_ms = self._step_ms
            if plan.header.kind == Kind.PREFILL:
                chunks = plan.body.passes[step] if step < len(plan.body.passes) else PrefillPass()
                stepped = self._prefill(chunks)
                delay_ms += max((self._rows[row].script.delay_ms for row in chunks.rows.tolist()), default=0.0)
            else:
                stepped = self._decode(plan.body.rows)
                delay_ms += max((row.script.delay_ms for row, _, _ in stepped), default=0.0)
            if delay_ms:
                self._wait(delay_ms / 1000)
            prompts, self._prompts = tuple(self._prompts), []
            yield replace(self._result(stepped), prompts=prompts)

    def poll(self, *, wait: bool) -> Iterator[StepResult]:
        return iter(())

    @property
    def in_flight(self) -> int:
        return 0

    def forward_plan(self, data: bytes) -> None:
        raise AssertionError("a scripted worker has no followers")

    def next_plan(self) -> bytes:
        raise AssertionError("a scripted worker follows nobody")

    def interrupt(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        self._rows.clear()

    # Applying a body

    def _apply(self, body: Body) -> None:
        for number in body.removes.tolist():
            row = self._row(number, "remove")
            del self._rows[number]
            self._disown(number, row.tables[0])
        for add in body.adds:
            self._add(add)
        for write in body.table_writes:
            owner, columns = spans(write.starts, write.counts)
            entries = zip(write.rows[owner].tolist(), columns.tolist(), write.blocks.tolist(), strict=True)
            for number, column, block in entries:
                self._set_block(number, column, block)
        for blocks in body.zeroes:
            self._check_blocks(blocks)
            self._kv[blocks] = 0
        for sources, destinations in body.copies:
            self._check_blocks(sources)
            self._check_blocks(destinations)
            self._kv[destinations] = self._kv[sources]

    def _add(self, add: AddRow) -> None:
        if add.row in self._rows:
            raise LockstepError(f"row {add.row} is added for {add.request_id}, but is in use")
        if add.row >= self._max_rows:
            raise LockstepError(f"row {add.row} is beyond the {self._max_rows} rows of this worker")
        count = len(add.tokens)
        if not 0 < add.prompt_len <= count or not 0 <= add.computed < count or not count < add.limit:
            raise LockstepError(
                f"{add.request_id}: {add.computed} computed of {count} tokens, prompt {add.prompt_len}, limit {add.limit}"
            )
        if add.limit > self._max_model_len:
            raise LockstepError(f"{add.request_id}: limit {add.limit} is above {self._max_model_len}")
        hashes = np.zeros(add.limit + 1, np.uint64)
        state = _EMPTY_HISTORY
        for i, token in enumerate(add.tokens.tolist()):
            if token >= self._vocab_size:
                raise LockstepError(f"{add.request_id}: token {token} is not in the vocabulary of {self._vocab_size}")
            state = mix(state, token)
            hashes[i + 1] = state
        prompt = tuple(add.tokens[: add.prompt_len].tolist())
        script = next((s for s in self._scripts if s.match is None or s.match == prompt), Script(None))
        if len(add.blocks) != 1:
            raise LockstepError(f"{add.request_id}: expected the table of one KV group, got {len(add.blocks)}")
        mark = 0 if self._generated_reusable else _GENERATED
        self._rows[add.row] = _Row(add, script, add.tokens.tolist(), hashes, mark, add.computed, tables=[[]])
        for column, block in enumerate(add.blocks[0].tolist()):
            self._set_block(add.row, column, block)

    def _set_block(self, number: int, column: int, block: int) -> None:
        table = self._row(number, "write the table of").tables[0]
        if not 0 < block < self._num_blocks:
            raise LockstepError(f"row {number}: block {block} is not one of 1..{self._num_blocks - 1}")
        if column > len(table):
            raise LockstepError(f"row {number}: table entry {column} leaves a gap after {len(table)} blocks")
        if column < len(table):
            self._disown(number, table[column : column + 1])
            table[column] = block
        else:
            table.append(block)
        self._owners.setdefault(block, set()).add(number)

    def _disown(self, number: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._owners[block].discard(number)

    def _check_blocks(self, blocks: U32) -> None:
        if len(blocks) and (int(blocks.min()) == NULL_BLOCK or int(blocks.max()) >= self._num_blocks):
            raise LockstepError(f"blocks {blocks.tolist()} are not all of 1..{self._num_blocks - 1}")

    def _row(self, number: int, doing: str) -> _Row:
        if number not in self._rows:
            raise LockstepError(f"cannot {doing} row {number}: nobody has it")
        return self._rows[number]

    # Steps

    def _prefill(self, chunks: PrefillPass) -> list[tuple[_Row, int, Flag]]:
        sampled = []
        for number, start, count in zip(
            chunks.rows.tolist(), chunks.starts.tolist(), chunks.counts.tolist(), strict=True
        ):
            row = self._row(number, "prefill")
            if start != row.computed or not 0 < count <= len(row.tokens) - start:
                raise LockstepError(
                    f"row {number}: chunk [{start}, {start + count}) of {len(row.tokens)} tokens, {row.computed} computed"
                )
            self._write(number, row, start, start + count)
            self._score(number, row, start, start + count)
            if row.computed == len(row.tokens):
                sampled.append((row, number, self._sample(row) | Flag.FIRST))
        return sampled

    def _decode(self, numbers: U32) -> list[tuple[_Row, int, Flag]]:
        if len(np.unique(numbers)) != len(numbers):
            raise LockstepError(f"rows are listed twice: {numbers.tolist()}")
        sampled = []
        for number in numbers.tolist():
            row = self._row(number, "decode")
            if not row.alive:
                continue
            if row.computed != len(row.tokens) - 1:
                raise LockstepError(
                    f"row {number} decodes, but {row.computed} of {len(row.tokens)} tokens are computed"
                )
            self._write(number, row, row.computed, len(row.tokens))
            sampled.append((row, number, self._sample(row)))
        return sampled

    def _write(self, number: int, row: _Row, start: int, end: int) -> None:
        """Checks the KV below `start` and writes that of positions [start, end)."""
        table = np.array(row.tables[0], np.int64)
        if len(table) * self._block_size < end:
            raise LockstepError(f"row {number}: {len(table)} blocks are too short for position {end - 1}")
        positions = np.arange(end)
        blocks, offsets = table[positions // self._block_size], positions % self._block_size
        wrong = np.flatnonzero(self._kv[blocks[:start], offsets[:start]] != row.kv(0, start))
        if len(wrong):
            position = int(wrong[0])
            raise LockstepError(
                f"row {number} ({row.add.request_id}): the KV of position {position} in block {blocks[position]} "
                f"is not that of its history"
            )
        for column in range(start // self._block_size, -(-end // self._block_size)):
            self._check_shared(number, row, int(table[column]), column, start, end)
        self._kv[blocks[start:], offsets[start:]] = row.kv(start, end)
        row.computed = end

    def _score(self, number: int, row: _Row, start: int, end: int) -> None:
        end = min(end, row.add.prompt_len - 1)
        if start < end and (width := row.add.sampling.prompt_logprobs) >= 0:
            scores = toy_scores(row.tokens[: end + 1], width, self._vocab_size)[start:]
            self._prompts.append(PromptChunk(number, start + 1, scores))

    def _check_shared(self, number: int, row: _Row, block: int, column: int, start: int, end: int) -> None:
        """A block of two rows may only be written where both have the same history."""
        low, high = max(start, column * self._block_size), min(end, (column + 1) * self._block_size)
        for other_number in self._owners[block] - {number}:
            other = self._rows[other_number]
            same = column < len(other.tables[0]) and other.tables[0][column] == block
            if not same or high > len(other.tokens) or (other.kv(low, high) != row.kv(low, high)).any():
                raise LockstepError(f"block {block} is written by row {number}, but row {other_number} has it too")

    def _sample(self, row: _Row) -> Flag:
        """Appends the next token; a fault appends none."""
        script, sampling, generated = row.script, row.add.sampling, row.generated
        if script.crash_after == generated:
            os._exit(1)
        if script.hang_after == generated:
            threading.Event().wait()
        scripted = generated < len(script.tokens)
        if script.end == "fault" and not scripted:
            row.alive = False
            return Flag.FAULT
        history = int(row.hashes[len(row.tokens)])
        token = script.tokens[generated] if scripted else toy_token(history, row.add, generated, self._vocab_size)
        while generated < sampling.min_tokens and token in sampling.stop_ids:
            token = (token + 1) % self._vocab_size
        row.tokens.append(token)
        row.hashes[len(row.tokens)] = mix(history, token)
        flag = self._end_of(row, token)
        row.alive = not flag
        return flag

    def _end_of(self, row: _Row, token: int) -> Flag:
        script_over = row.script.tokens and row.generated == len(row.script.tokens)
        if token in row.add.sampling.stop_ids and row.generated > row.add.sampling.min_tokens:
            return Flag.STOP
        if script_over and row.script.end == "stop":
            return Flag.STOP
        if len(row.tokens) == row.add.limit or (script_over and row.script.end == "length"):
            return Flag.LENGTH
        return Flag(0)

    # Reporting

    def _result(self, sampled: list[tuple[_Row, int, Flag]]) -> StepResult:
        if not sampled:
            return StepResult()
        words = pack_words(
            [0 if flag & Flag.FAULT else row.tokens[-1] for row, _, flag in sampled],
            [number for _, number, _ in sampled],
            [int(flag) for _, _, flag in sampled],
        )
        faults = tuple((number, "scripted fault") for _, number, flag in sampled if flag & Flag.FAULT)
        if all(row.add.sampling.logprobs < 0 for row, _, _ in sampled):
            return StepResult(words, faults=faults)
        logprobs = np.full(len(sampled), np.nan, np.float32)
        tops = []
        for i, (row, _, flag) in enumerate(sampled):
            if row.add.sampling.logprobs >= 0 and not flag & Flag.FAULT:
                logprobs[i] = self._logprob(row)
                if row.add.sampling.logprobs > 0:
                    tops.append((i, *self._top(row, float(logprobs[i]))))
        return StepResult(words, logprobs, _top_logprobs(tops), faults)

    def _logprob(self, row: _Row) -> float:
        index = row.generated - 1
        if index < len(row.script.logprobs):
            return row.script.logprobs[index]
        return -(int(row.hashes[len(row.tokens)]) % 1000) / 250

    def _top(self, row: _Row, best: float) -> tuple[list[int], list[float]]:
        """Made up: the sampled token is the best one, the next ids follow, each half as likely."""
        count = min(row.add.sampling.logprobs, self._vocab_size)
        ids = [(row.tokens[-1] + i) % self._vocab_size for i in range(count)]
        return ids, [best - 0.6931472 * i for i in range(count)]

    def _facts(self) -> WorkerFacts:
        return WorkerFacts(
            model=self._model,
            config_hash=f"scripted-{self._vocab_size}-{self._max_model_len}-{self._block_size}",
            device="none",
            dtype="none",
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            max_rows=self._max_rows,
            weights_epoch=0,
            groups=(KvGroup("full", self._block_size, self._num_blocks),),
            deterministic=True,
            kept_epoch=self._written,
            max_batched_tokens=self._max_batched_tokens,
            routed_experts=False,
            generated_reusable=self._generated_reusable,
        )


def _top_logprobs(tops: list[tuple[int, list[int], list[float]]]) -> TopLogprobs | None:
    if not tops:
        return None
    return TopLogprobs(
        index=np.array([index for index, _, _ in tops], np.uint32),
        counts=np.array([len(ids) for _, ids, _ in tops], np.uint32),
        ids=np.array([i for _, ids, _ in tops for i in ids], np.uint32),
        values=np.array([v for _, _, values in tops for v in values], np.float32),
    )


@dataclass(frozen=True)
class ScriptedConfig:
    """A worker without a model, for tests."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(7001, "port to listen on; 0: any (it is in the log)")
    script: str = setting("", "JSON file with scripts", metavar="FILE")
    step_ms: float = setting(0.0, "duration of a step")
    vocab_size: int = setting(32000, "tokens of the vocabulary")
    max_model_len: int = setting(4096, "tokens of a sequence")
    num_blocks: int = setting(1024, "KV blocks")
    block_size: int = setting(16, "tokens of a KV block")
    max_num_seqs: int = setting(64, "rows")
    max_num_batched_tokens: int = setting(2048, "tokens of a prefill pass")
    served_model_name: str = setting("scripted", "name of the model")
    log_level: str = setting("INFO", "least severe level to log")


def main() -> None:
    settings = config.load(ScriptedConfig, prog="tests.scripted_worker", env_prefix="SCRIPTED_WORKER_")
    logs.setup("scripted-worker", settings.log_level)
    entries = json.loads(Path(settings.script).read_text()) if settings.script else []
    engine = ScriptedEngine(
        [Script.from_json(entry) for entry in entries],
        step_ms=settings.step_ms,
        vocab_size=settings.vocab_size,
        max_model_len=settings.max_model_len,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        max_rows=settings.max_num_seqs,
        max_batched_tokens=settings.max_num_batched_tokens,
        model=settings.served_model_name,
    )
    sys.exit(asyncio.run(serve(Driver(engine, PlanLog()), f"{settings.host}:{settings.port}")))


if __name__ == "__main__":
    main()
