"""How a sequence's tokens are dealt out among ranks that keep it together."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep_common.steps import AddRow, Body, PrefillPass, Sampling
from lockstep_kernels import prepare
from lockstep_kernels.prepare import DecodeInputs, Share
from lockstep_worker.rows import Rows
from lockstep_worker.staging import Staging
from tests.unit.worker.toy import CPU, u32

rank_counts = st.sampled_from([1, 2, 3, 4])
own_sizes = st.sampled_from([1, 2, 4])


@given(ranks=rank_counts, own=own_sizes, length=st.integers(0, 60))
def test_every_token_has_one_rank_and_lies_there_in_order(ranks: int, own: int, length: int) -> None:
    block_size = own * ranks
    positions = np.arange(length)
    expected = positions // own % ranks
    for rank in range(ranks):
        share = Share(ranks, rank)
        assert share.holds(positions, block_size).tolist() == (expected == rank).tolist()
        assert share.holds(torch.from_numpy(positions), block_size).tolist() == (expected == rank).tolist()
        lens = np.array([length, 0])
        assert share.held(lens, block_size).tolist() == [(expected == rank).sum(), 0]
        assert share.held(torch.from_numpy(lens), block_size).tolist() == [(expected == rank).sum(), 0]


@given(ranks=rank_counts, own=own_sizes, length=st.integers(1, 60))
def test_what_a_rank_keeps_is_a_paged_sequence_of_the_same_blocks(ranks: int, own: int, length: int) -> None:
    block_size, positions = own * ranks, torch.arange(length)
    table = (7 + 3 * torch.arange(-(-length // block_size))).view(1, -1)
    for rank in range(ranks):
        share = Share(ranks, rank)
        slots = prepare.slots(table, torch.zeros(length, dtype=torch.int64), positions, block_size, share)
        kept = slots[share.holds(positions, block_size)]
        local = torch.arange(len(kept))
        assert torch.equal(kept, table[0, local // own] * own + local % own)
        assert int(slots.sum()) == int(kept.sum())


def test_rows_prepare_the_slots_of_their_rank_in_passes_and_in_windows() -> None:
    slots = []
    for rank in (0, 1):
        rows = Rows(2, 24, 30, (4,), Staging(CPU), cp=2, cp_rank=rank)
        add = AddRow(1, "r", 0, 7, u32(range(7)), 0, (u32([5, 9]),), Sampling(), 20)
        rows.apply(Body(1, 0, adds=(add,)))
        (chunks,), _ = rows.prefill(PrefillPass(u32([1]), u32([0]), u32([7])))
        inputs = rows.inputs(chunks)
        assert inputs.block_tables[0].tolist() == [[5, 9]]
        window = rows.decode(u32([1]), 2)
        assert window.inputs().block_tables[0].tolist() == [[5, 9, 0][: window.inputs().block_tables[0].shape[1]]]
        slots.append((inputs.slots[0].tolist(), window.inputs().slots[0].tolist()))
    assert slots == [([10, 11, 0, 0, 18, 19, 0], [0]), ([0, 0, 10, 11, 0, 0, 18], [18])]


@given(ranks=rank_counts, own=own_sizes, lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4), data=st.data())
def test_a_captured_step_prepares_the_same_slots(ranks: int, own: int, lengths: list[int], data: st.DataObject) -> None:
    size, count = own * ranks, len(lengths)
    alive = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    table = 1 + torch.arange(count * -(-24 // size)).view(count, -1)
    index, lens = torch.arange(count), torch.tensor(lengths)
    for rank in range(ranks):
        out = DecodeInputs.empty(count, (table,), CPU)
        prepare.decode_inputs(index, index + 40, lens, alive, (table,), (size,), out, Share(ranks, rank))
        expected = prepare.slots(table, index, lens - 1, size, Share(ranks, rank))
        assert torch.equal(out.slots[0], expected.where(alive, 0))
        assert torch.equal(out.seq_lens, lens.where(alive, 1))
