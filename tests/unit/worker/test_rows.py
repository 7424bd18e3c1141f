"""Rows and their staged writes against a naive model of Python dicts and lists."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lockstep_common.steps import NO_U32, AddRow, Body, Flag, Kind, PrefillPass, Sampling, unpack_words
from lockstep_worker.rows import ALIVE, ENDED, FILLING, FREE, Rows, row_numbers
from lockstep_worker.sampling import Sampled
from lockstep_worker.staging import Staging
from tests.unit.worker.toy import CPU, table_write, u32

R, LEN, BLOCK, V = 4, 24, 4, 30
WIDTH = LEN // BLOCK


@dataclass
class Naive:
    tokens: list[int]
    limit: int
    table: list[int]
    stop_ids: tuple[int, ...]
    state: int = FILLING


class RowsMachine(RuleBasedStateMachine):
    """Random plans: adds, removes, table writes, prefills and windows, each checked step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows(R, LEN, V, (BLOCK,), Staging(CPU))
        self.naive: dict[int, Naive] = {}
        self.next_block = 1

    def blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    @precondition(lambda self: len(self.naive) < R)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        free = [row for row in range(R) if row not in self.naive]
        adds = []
        for row in data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True)):
            tokens = data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=LEN - 2))
            limit = data.draw(st.integers(len(tokens) + 1, LEN))
            stop_ids = tuple(data.draw(st.lists(st.integers(0, V - 1), max_size=3)))
            table = self.blocks(-(-len(tokens) // BLOCK))
            sampling = Sampling(stop_ids=stop_ids)
            adds.append(AddRow(row, f"r{row}", 0, 1, u32(tokens), 0, (u32(table),), sampling, limit))
            self.naive[row] = Naive(tokens, limit, table, stop_ids)
        self.rows.apply(Body(1, 0, adds=tuple(adds)))

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def remove_and_add_in_one_plan(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.naive)))
        table = self.blocks(1)
        add = AddRow(row, "again", 0, 2, u32([5, 6]), 0, (u32(table),), Sampling(), 9)
        self.rows.apply(Body(1, 0, removes=u32([row]), adds=(add,)))
        self.naive[row] = Naive([5, 6], 9, table, ())

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.naive)), min_size=1, unique=True))
        self.rows.apply(Body(1, 0, removes=u32(rows)))
        for row in rows:
            del self.naive[row]

    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        filling = sorted(row for row, naive in self.naive.items() if naive.state == FILLING)
        rows = data.draw(st.lists(st.sampled_from(filling), unique=True)) if filling else []
        starts = [data.draw(st.integers(0, len(self.naive[row].tokens) - 1)) for row in rows]
        counts = [data.draw(st.integers(1, len(self.naive[r].tokens) - s)) for r, s in zip(rows, starts, strict=True)]
        (chunks,), batch = self.rows.prefill(PrefillPass(u32(rows), u32(starts), u32(counts)))
        inputs = self.rows.inputs(chunks)
        spans = [
            (row, position)
            for row, start, count in zip(rows, starts, counts, strict=True)
            for position in range(start, start + count)
        ]
        assert inputs.token_ids.tolist() == [self.naive[row].tokens[position] for row, position in spans]
        assert inputs.positions.tolist() == [position for _, position in spans]
        assert inputs.slots[0].tolist() == [self.slot(row, position) for row, position in spans]
        assert inputs.query_starts.tolist() == [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        assert inputs.seq_lens.tolist() == [s + c for s, c in zip(starts, counts, strict=True)]
        ends = np.cumsum(counts, dtype=np.int64).tolist()
        finished = [i for i, r in enumerate(rows) if starts[i] + counts[i] == len(self.naive[r].tokens)]
        assert inputs.logits_index.tolist() == [ends[i] - 1 for i in finished]
        assert batch.host_rows.tolist() == [rows[i] for i in finished]
        for i in finished:
            self.naive[rows[i]].state = ALIVE
        self.step(data, batch, first=True)
        self.rows.commit(batch)

    @rule(data=st.data(), k=st.integers(1, 5))
    def decode(self, data: st.DataObject, k: int) -> None:
        listed = sorted(row for row, naive in self.naive.items() if naive.state >= ALIVE)
        alive = [row for row in listed if self.naive[row].state == ALIVE]
        writes = []
        for row in alive:
            naive = self.naive[row]
            need = min(-(-(len(naive.tokens) + k) // BLOCK), WIDTH) - len(naive.table)
            if need > 0:
                writes.append((row, len(naive.table), need))
                naive.table += self.blocks(need)
        if writes:
            blocks = [block for row, start, _ in writes for block in self.naive[row].table[start:]]
            self.rows.apply(Body(1, 0, table_writes=(table_write(writes, blocks),)))
        batch = self.rows.decode(u32(listed), k)
        assert batch.host_rows.tolist() == alive
        for _ in range(k):
            if batch.exhausted:
                break
            inputs = batch.inputs()
            lengths = [len(self.naive[row].tokens) for row in alive]
            assert inputs.token_ids.tolist() == [self.naive[row].tokens[-1] for row in alive]
            assert inputs.positions.tolist() == [length - 1 for length in lengths]
            assert inputs.seq_lens.tolist() == list(inputs.host_seq_lens) == lengths
            assert inputs.slots[0].tolist() == [self.slot(row, len(self.naive[row].tokens) - 1) for row in alive]
            assert inputs.max_seq_len == max(lengths, default=0)
            self.step(data, batch, first=False)
            if any(self.naive[row].state != ALIVE for row in alive):
                break
        self.rows.commit(batch)

    def step(self, data: st.DataObject, batch: object, *, first: bool) -> None:
        rows = batch.host_rows.tolist()  # type: ignore[attr-defined]
        assert batch.sample_positions.tolist() == [len(self.naive[row].tokens) for row in rows]  # type: ignore[attr-defined]
        tokens = [data.draw(st.integers(0, V - 1)) for _ in rows]
        bad = [data.draw(st.integers(0, 9)) == 0 for _ in rows]
        words = batch.advance(Sampled(torch.tensor(tokens, dtype=torch.int64), torch.tensor(bad, dtype=torch.bool)))  # type: ignore[attr-defined]
        got_tokens, got_rows, flags = unpack_words(words.numpy().view(np.uint64))
        assert got_tokens.tolist() == tokens and got_rows.tolist() == rows
        ended = []
        for row, token, fault, flag in zip(rows, tokens, bad, flags.tolist(), strict=True):
            naive = self.naive[row]
            naive.tokens.append(token)
            full = Flag.LENGTH if len(naive.tokens) >= naive.limit else Flag(0)
            end = Flag.FAULT if fault else Flag.STOP if token in naive.stop_ids else full
            assert Flag(flag) == end | (Flag.FIRST if first else Flag(0))
            if end:
                naive.state = ENDED
                ended.append(row)
        assert row_numbers(words.numpy().view(np.uint64)).tolist() == rows
        numbers = np.array(ended, np.int64)
        self.rows.end(numbers, self.rows.generations[numbers])

    def slot(self, row: int, position: int) -> int:
        return self.naive[row].table[position // BLOCK] * BLOCK + position % BLOCK

    @invariant()
    def rows_equal_the_naive_model(self) -> None:
        for row in range(R):
            if row not in self.naive:
                assert self.rows.states[row] == FREE
                continue
            naive = self.naive[row]
            assert self.rows.states[row] == naive.state
            assert self.rows.tables[0][row, : len(naive.table)].tolist() == naive.table
            assert not self.rows.tables[0][row, len(naive.table) :].any()
            if naive.state != ENDED:
                assert self.rows.lengths[row] == self.rows.host_lengths[row] == len(naive.tokens)
                assert self.rows.history[row, : len(naive.tokens)].tolist() == naive.tokens
                assert self.rows.last[row] == naive.tokens[-1]


TestRows = RowsMachine.TestCase
TestRows.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_rows_that_the_host_does_not_know_to_have_ended_write_to_the_null_block() -> None:
    rows = Rows(2, LEN, V, (BLOCK,), Staging(CPU), masked=True)
    adds = tuple(
        AddRow(i, "", 0, 1, u32([1]), 0, (u32([2 * i + 1, 2 * i + 2]),), Sampling(stop_ids=(7,)), 9) for i in range(2)
    )
    rows.apply(Body(1, 0, adds=adds))
    _, first = rows.prefill(PrefillPass(u32([0, 1]), u32([0, 0]), u32([1, 1])))
    first.advance(Sampled(torch.tensor([3, 3])))
    rows.commit(first)
    batch = rows.decode(u32([0, 1]), 3)
    assert batch.inputs().slots[0].tolist() == [5, 13]
    batch.advance(Sampled(torch.tensor([7, 3])))
    assert batch.inputs().slots[0].tolist() == [0, 14]


@pytest.mark.parametrize("most", [0, 1, 3, 4, 7, 50])
def test_replayed_tokens_come_in_passes_of_at_most_so_many(most: int) -> None:
    """Prompts first, then what was generated, each token once and a row's tokens in their order."""
    rows = Rows(3, LEN, V, (BLOCK,), Staging(CPU), by_place=True, most_replayed=most)
    lengths, prompts, starts = (12, 9, 5), (2, 8, 5), (0, 3, 1)
    tokens = [u32(range(length)) for length in lengths]
    adds = tuple(
        AddRow(i, "", 0, prompts[i], tokens[i], 0, (u32(range(1, 4)),), Sampling(), lengths[i] + 1) for i in range(3)
    )
    rows.apply(Body(1, 0, adds=adds))
    counts = [length - start for length, start in zip(lengths, starts, strict=True)]
    (prompt, *replays), batch = rows.prefill(PrefillPass(u32(range(3)), u32(starts), u32(counts)))
    assert prompt.kind is Kind.PREFILL and prompt.ends.tolist() == list(prompts)
    done = dict(enumerate(prompts))
    for chunks in replays:
        assert chunks.kind is Kind.DECODE and 0 < (chunks.ends - chunks.starts).sum() <= (most or 11)
        for row, start, end in zip(chunks.rows.tolist(), chunks.starts.tolist(), chunks.ends.tolist(), strict=True):
            assert done[row] == start < end
            done[row] = end
    assert done == dict(enumerate(lengths))
    assert batch.host_rows.tolist() == [2, 0, 1], "in the order of the passes that end their tokens"


def test_an_empty_plan_body_changes_nothing() -> None:
    rows = Rows(2, LEN, V, (BLOCK,), Staging(CPU))
    rows.apply(Body(1, 0))
    assert rows.decode(NO_U32, 4).size == 0
