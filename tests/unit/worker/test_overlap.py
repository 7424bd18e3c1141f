"""A pass as two halves: what each of them has, and how their stages take turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep_common.steps import Kind
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.overlap import Stages, halve, last_of, take_turns
from tests.unit.worker.toy import Choice, Mode, PlanDriver, ToyModel, make_runner, solo

BLOCK = 4


def drawn(kind: Kind, chunks: list[tuple[int, int]], wanted: torch.Tensor, *, captured: bool = False) -> StepInputs:
    """A pass over (earlier tokens, new tokens) of each sequence; tokens, slots and blocks are numbers that occur once."""
    lens, ends = [new for _, new in chunks], [old + new for old, new in chunks]
    tokens, sequences = sum(lens), len(chunks)
    positions = torch.cat([torch.arange(old, old + new) for old, new in chunks] or [torch.zeros(0)]).long()
    return StepInputs(
        kind=kind,
        token_ids=1000 + torch.arange(tokens),
        positions=positions,
        rows=200 + torch.arange(sequences),
        query_starts=torch.from_numpy(np.cumsum([0, *lens])),
        seq_lens=torch.tensor(ends, dtype=torch.int64),
        block_tables=(torch.arange(sequences * 9).view(sequences, 9),),
        slots=(5000 + torch.arange(tokens),),
        logits_index=wanted,
        query_lens=() if captured else tuple(lens),
        host_seq_lens=() if captured else tuple(ends),
        max_seq_len=max(ends, default=0),
        live=torch.arange(tokens) % 3 > 0,
        dual_batch=True,
    )


@st.composite
def passes(draw: st.DrawFn) -> StepInputs:
    kind = draw(st.sampled_from([Kind.PREFILL, Kind.DECODE]))
    one_each = kind is Kind.DECODE and draw(st.booleans())
    chunk = st.tuples(st.integers(0, 20), st.just(1) if one_each else st.integers(1, 12))
    chunks = draw(st.lists(chunk, max_size=6))
    tokens = sum(new for _, new in chunks)
    if one_each:
        return drawn(kind, chunks, torch.arange(tokens), captured=draw(st.booleans()))
    wanted = draw(st.permutations(range(tokens)))[: draw(st.integers(0, tokens))]
    if kind is Kind.DECODE and len(wanted) == tokens:
        wanted = sorted(wanted)  # where all tokens of such a pass need logits, they come in their order
    return drawn(kind, chunks, torch.tensor(wanted, dtype=torch.int64))


@given(passes())
def test_halves_are_passes_that_together_do_what_one_does(inputs: StepInputs) -> None:
    halves = halve(inputs)
    both = halves.first, halves.second
    tokens = len(inputs.token_ids)
    assert [len(half.token_ids) for half in both] == [-(-tokens // 2), tokens // 2]
    for of in (
        lambda x: x.token_ids,
        lambda x: x.positions,
        lambda x: x.slots[0],
        lambda x: x.live,
    ):
        assert torch.equal(torch.cat([of(half) for half in both]), of(inputs))
    for half in both:
        check_pass(half, inputs)
    found = halves.merged(*(half.token_ids[half.logits_index] for half in both))
    assert torch.equal(found, inputs.token_ids[inputs.logits_index])


def check_pass(half: StepInputs, whole: StepInputs) -> None:
    """What `StepInputs` promises; and every token sees the same as in the whole pass."""
    assert not half.dual_batch and half.kind is whole.kind and half.scored is None
    lens = half.query_starts.diff().tolist()
    count = len(half.rows)
    assert len(half.seq_lens) == len(half.block_tables[0]) == len(lens) == count
    assert half.query_starts[0] == 0 and half.query_starts[-1] == len(half.token_ids) and all(n > 0 for n in lens)
    if whole.query_lens:
        assert list(half.query_lens) == lens and list(half.host_seq_lens) == half.seq_lens.tolist()
    else:
        assert half.query_lens == half.host_seq_lens == ()
    assert bool((half.logits_index < max(1, len(half.token_ids))).all()) and bool((half.logits_index >= 0).all())
    for i in range(count):
        own = slice(int(half.query_starts[i]), int(half.query_starts[i + 1]))
        end = int(half.seq_lens[i])
        assert half.positions[own].tolist() == list(range(end - lens[i], end)) and end <= half.max_seq_len
        sequence = int(half.rows[i]) - 200
        assert torch.equal(half.block_tables[0][i], whole.block_tables[0][sequence])
        first = int(half.token_ids[own][0]) - 1000
        assert whole.query_starts[sequence] <= first < whole.query_starts[sequence + 1]


@given(st.integers(0, 40), st.integers(0, 40))
def test_what_all_ranks_know_of_rows_holds_for_halves(rows: int, more: int) -> None:
    """A rank with any number of rows up to the largest brings no more in either half than all think, and the bound is known."""
    inputs = drawn(Kind.DECODE, [(3, 1)] * rows, torch.arange(rows))
    assert halve(inputs).first.expert_rows == halve(inputs).second.expert_rows == 0
    most = max(1, rows + more)
    for half in (halves := halve(replace(inputs, expert_rows=most))).first, halves.second:
        assert half.expert_rows >= max(1, len(half.token_ids))
    assert halves.first.expert_rows + halves.second.expert_rows <= most + (most == 1)


def test_stages_take_turns_the_first_one_first() -> None:
    seen: list[str] = []

    def work(name: str, stages: int) -> Stages[str]:
        for i in range(stages):
            seen.append(f"{name}{i}")
            yield
        seen.append(f"{name} ends")
        return name

    assert take_turns([work("a", 2), work("b", 2)]) == ["a", "b"]
    assert seen == ["a0", "b0", "a1", "b1", "a ends", "b ends"]
    assert last_of(work("c", 3)) == "c" and last_of(work("d", 0)) == "d"


class Halving(ToyModel):
    """Computes halves one after the other, and counts the passes that are to be computed so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def forward(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        self.asked.append(inputs.dual_batch)
        if not inputs.dual_batch:
            return super().forward(inputs, kv)
        halves = halve(inputs)
        return halves.merged(*[super(Halving, self).forward(half, kv) for half in (halves.first, halves.second)])


@pytest.mark.parametrize("mode", Mode)
def test_a_runner_wants_halves_when_the_header_does(mode: Mode) -> None:
    """In steps of all kinds, on the host's or the device's terms; tokens are those of each row alone."""
    model = Halving()
    runner = make_runner(model, mode=mode)
    rows = {i: Choice(tuple(range(1, 4 + 3 * i)), limit=24 + i) for i in range(3)}
    driver = PlanDriver(runner, dual=True)
    model.asked.clear()
    driver.add(rows, chunk=4)
    driver.finish()
    assert model.asked and all(model.asked)
    for i, row in rows.items():
        assert row.output == solo(ToyModel(), Choice(row.prompt, limit=row.limit), row=i, mode=mode).output
    driver.dual = False
    driver.decode([])
    driver.add({4: Choice((5, 6), limit=9)})
    driver.finish()
    assert not model.asked[-1]
