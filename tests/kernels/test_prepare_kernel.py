"""Step preparation: the kernel against its reference, and the reference against a row at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels import prepare
from lockstep_kernels.prepare import DecodeInputs, Share, reference
from tests.kernels.device import DEVICE, ON_GPU

from lockstep_kernels.prepare import kernel  # isort: skip  (after tests.kernels.device)

STALE = -77  # what buffers hold before: must be overwritten, or left where a row does not reach


def rows_of(seed: int, rows: int, widths: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """last, lengths, alive and tables of `rows` rows, the last of which is never alive and full of nonsense."""
    generator = torch.Generator().manual_seed(seed)
    longest = min(width * size for width, size in zip(widths, sizes, strict=True))
    last = torch.randint(0, 1000, (rows,), generator=generator)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    alive = torch.rand(rows, generator=generator) < 0.7
    alive[-1] = False
    last[~alive], lengths[~alive] = 10**12, -5
    tables = [torch.randint(1, 10**7, (rows, width), generator=generator) for width in widths]
    for table in tables:
        table[~alive] = -(10**12)
    return tuple(tensor.to(DEVICE) for tensor in (last, lengths, alive, *tables))


def stale(size: int, tables: tuple[torch.Tensor, ...]) -> DecodeInputs:
    out = DecodeInputs.empty(size + 2, tables, DEVICE)
    for tensor in (out.token_ids, out.positions, out.seq_lens, *out.slots, *out.block_tables):
        tensor.fill_(STALE)
    return out


def tensors(out: DecodeInputs) -> tuple[torch.Tensor, ...]:
    return (out.token_ids, out.positions, out.seq_lens, out.live, *out.slots, *out.block_tables)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 300 if ON_GPU else 5),
    groups=st.lists(st.tuples(st.sampled_from([1, 7, 1025, 2048]), st.sampled_from([16, 64])), min_size=1, max_size=2),
    share=st.sampled_from([Share(), Share(2, 0), Share(2, 1), Share(4, 3)]),
)
def test_the_kernel_equals_the_reference(seed: int, size: int, groups: list[tuple[int, int]], share: Share) -> None:
    widths, sizes = tuple(w for w, _ in groups), tuple(s for _, s in groups)
    last, lengths, alive, *tables = rows_of(seed, size + 3, widths, sizes)
    index = torch.randperm(size + 3, generator=torch.Generator().manual_seed(seed))[:size].to(DEVICE)
    index[size // 2 :] = torch.where(alive[index[size // 2 :]], index[size // 2 :], size + 2)
    expected, found = stale(size, tuple(tables)), stale(size, tuple(tables))
    reference.decode_inputs(index, last, lengths, alive, tuple(tables), sizes, expected.narrow(size), share)
    kernel.decode_inputs(index, last, lengths, alive, tuple(tables), sizes, found.narrow(size), share)
    for want, got in zip(tensors(expected), tensors(found), strict=True):
        assert torch.equal(want, got)


def test_rows_one_by_one() -> None:
    last = torch.tensor([11, 12, 13], device=DEVICE)
    lengths = torch.tensor([1, 33, 40], device=DEVICE)
    alive = torch.tensor([True, True, False], device=DEVICE)
    table = torch.tensor([[4, 5, 6], [7, 8, 9], [1, 1, 1]], device=DEVICE)
    out = stale(4, (table,))
    prepare.decode_inputs(
        torch.tensor([1, 2, 0, 2], device=DEVICE), last, lengths, alive, (table,), (16,), out.narrow(4)
    )
    assert out.token_ids.tolist() == [12, 0, 11, 0, STALE, STALE]
    assert out.positions.tolist() == [32, 0, 0, 0, STALE, STALE]
    assert out.seq_lens.tolist() == [33, 1, 1, 1, STALE, STALE]
    assert out.live.tolist()[:4] == [True, False, True, False]
    assert out.slots[0].tolist()[:4] == [9 * 16, 0, 4 * 16, 0]
    assert out.block_tables[0].tolist()[:4] == [[7, 8, 9], [0, STALE, STALE], [4, STALE, STALE], [0, STALE, STALE]]


def test_groups_that_do_not_belong_together() -> None:
    table = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    ones = torch.ones(2, dtype=torch.int64, device=DEVICE)
    out = DecodeInputs.empty(2, (table,), DEVICE)
    with pytest.raises(ValueError, match="1 block tables, 2 block sizes"):
        prepare.decode_inputs(ones, ones, ones, ones > 0, (table,), (16, 16), out)
    with pytest.raises(ValueError, match="block table has shape"):
        prepare.decode_inputs(ones, ones, ones, ones > 0, (table[:, :2],), (16,), out)
