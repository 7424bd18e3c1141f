"""A captured prefill pass reads what an eager one does, and padding that harms nothing."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.steps import AddRow, Body, Kind, Sampling
from lockstep_worker.collectives import Group, Place
from lockstep_worker.graphs import EAGER_PLANS
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.prefill_graphs import PrefillGraphs, _Layout, bucket_sizes
from lockstep_worker.rows import ChunkPass, Rows
from lockstep_worker.staging import Staging
from tests.unit.worker.toy import BLOCK, BLOCKS_A_ROW, CPU, MAX_LEN, ROWS, VOCAB, PlanDriver, ToyModel, u32


class Recorder(ToyModel):
    """Keeps the inputs of its last pass."""

    def forward(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        self.inputs = inputs
        return torch.zeros(len(inputs.logits_index), VOCAB)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_padded_pass_reads_what_an_eager_one_does(data: st.DataObject) -> None:
    rows = Rows(ROWS, MAX_LEN, VOCAB, (BLOCK,), Staging(CPU), masked=True)
    model = Recorder()
    kv = KvCache(model.kv_specs(), num_blocks=1 + ROWS * BLOCKS_A_ROW, block_size=BLOCK)
    lengths = [data.draw(st.integers(1, 20)) for _ in range(data.draw(st.integers(1, ROWS)))]
    rows.apply(Body(1, 0, adds=tuple(add(row, length) for row, length in enumerate(lengths))))
    starts = np.array([data.draw(st.integers(0, length - 1)) for length in lengths])
    ends = np.array([data.draw(st.integers(s + 1, length)) for s, length in zip(starts, lengths, strict=True)])
    chunks = ChunkPass(Kind.PREFILL, np.arange(len(lengths)), starts, ends, np.flatnonzero(ends == lengths))
    count = int((ends - starts).sum())
    layout = _Layout(count + data.draw(st.integers(0, 9)), len(lengths) + data.draw(st.integers(0, 3)))

    graphs = PrefillGraphs(model, kv, rows, Group(), sizes=(128,), max_model_len=MAX_LEN)
    graphs._pass(layout, torch.from_numpy(graphs._described(chunks, layout)))
    padded, eager = model.inputs, rows.inputs(chunks)

    for name in ("token_ids", "positions"):
        assert torch.equal(getattr(padded, name)[:count], getattr(eager, name)), name
    assert torch.equal(padded.slots[0][:count], eager.slots[0])
    assert not padded.slots[0][count:].any(), "padding writes to the null block"
    assert padded.live is not None and padded.live.tolist() == [i < count for i in range(layout.tokens)]
    samples = len(chunks.samples)
    assert torch.equal(padded.logits_index[:samples], eager.logits_index)
    assert padded.logits_live is not None and padded.logits_live.tolist() == [
        i < samples for i in range(layout.sequences)
    ]
    sequences = len(lengths)
    assert torch.equal(padded.query_starts[: sequences + 1], eager.query_starts)
    assert (padded.query_starts[sequences:] == count).all(), "sequences that pad have no token"
    assert torch.equal(padded.seq_lens[:sequences], eager.seq_lens)
    assert not padded.seq_lens[sequences:].any()
    width = eager.block_tables[0].shape[1]
    assert torch.equal(padded.block_tables[0][:sequences, :width], eager.block_tables[0])


def add(row: int, length: int) -> AddRow:
    tokens = u32((7 * row + i) % VOCAB for i in range(length))
    blocks = u32(PlanDriver.blocks_of(row, 0, -(-length // BLOCK)))
    return AddRow(row, f"r{row}", 0, length, tokens, 0, (blocks,), Sampling(), limit=MAX_LEN)


def test_the_scratch_row_can_be_rehearsed_with() -> None:
    """Warming up runs passes of a row that nobody has, which leaves the others alone."""
    rows = Rows(ROWS, MAX_LEN, VOCAB, (BLOCK,), Staging(CPU), masked=True)
    inputs = rows.inputs(ChunkPass(Kind.PREFILL, *(np.array([n]) for n in (rows.scratch, 0, 16, 0))))
    assert not inputs.slots[0].div(BLOCK, rounding_mode="floor").any(), "it writes to the null block"
    assert inputs.logits_index.tolist() == [15]


def make_graphs(group: Group, sizes: tuple[int, ...]) -> PrefillGraphs:
    model = ToyModel()
    rows = Rows(ROWS, MAX_LEN, VOCAB, (BLOCK,), Staging(CPU), masked=True)
    kv = KvCache(model.kv_specs(), num_blocks=1 + ROWS * BLOCKS_A_ROW, block_size=BLOCK)
    return PrefillGraphs(model, kv, rows, group, sizes=sizes, max_model_len=MAX_LEN)


class WithSlowPeer(Group):
    """Of two workers, of which the other one does not want any bucket beyond the first few."""

    def __init__(self, wanted: int) -> None:
        super().__init__(Place(2, 1))
        self._wanted = wanted

    def meet(self, mine: int) -> int:
        self._wanted -= 1
        return max(mine, int(self._wanted < 0))


def test_a_group_keeps_the_buckets_that_pay_on_all_ranks_and_finds_them_by_the_header() -> None:
    graphs = make_graphs(WithSlowPeer(2), (16, 32, 48, 64))
    graphs.capture()
    assert [graphs.size(tokens) for tokens in (1, 16, 17, 32, 33, 64, 65)] == [16, 16, 32, 32, 0, 0, 0]


def test_buckets_by_use_are_captured_after_some_passes_and_not_again_once_too_large() -> None:
    graphs = make_graphs(WithSlowPeer(1), (16, 32, 48))
    graphs.wait_for_use()
    assert [graphs.size(10) for _ in range(EAGER_PLANS + 2)] == [0] * EAGER_PLANS + [16] * 2
    passes = graphs._model.passes  # type: ignore[attr-defined]
    assert [graphs.size(20) for _ in range(EAGER_PLANS + 1)] == [0] * (EAGER_PLANS + 1)
    before = len(passes)
    assert [graphs.size(tokens) for tokens in (20, 40) * EAGER_PLANS * 2] == [0] * EAGER_PLANS * 4
    assert len(passes) == before, "what was too large is not tried again, nor what is larger"


def test_passes_that_may_be_captured() -> None:
    model = ToyModel()
    assert bucket_sizes(model, 100, cp=1) == (16, 32, 64, 100)
    assert bucket_sizes(model, 100, cp=2) == (), "mirrored passes have sizes of their own"
    model.captures_prefill = False
    assert bucket_sizes(model, 100, cp=1) == ()
