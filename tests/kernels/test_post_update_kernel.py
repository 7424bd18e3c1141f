"""The end of a step: the kernel against its reference, dead rows that stay as they are, the ring of words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels import post_update
from lockstep_kernels.post_update import NO_WORD, RowState, reference
from tests.kernels.device import DEVICE, ON_GPU

from lockstep_kernels.post_update import kernel  # isort: skip  (after tests.kernels.device)

BITS = {"row_shift": 32, "stop_bit": 2 << 52, "length_bit": 4 << 52, "fault_bit": 8 << 52}
V, LENGTH = 50, 12


def rows_of(seed: int, rows: int, stop_ids: int, *, counts: bool) -> RowState:
    """The last row is never alive; dead rows are full of nonsense."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (rows, *shape), generator=generator).to(DEVICE)

    alive = numbers(0, 4) > 0
    alive[-1] = False
    state = RowState(
        last=numbers(0, V),
        lengths=numbers(1, LENGTH),
        alive=alive,
        limits=numbers(LENGTH - 2, LENGTH + 1),
        history=numbers(0, V, LENGTH),
        stop_ids=numbers(-1, V // 4, stop_ids),
        counts=numbers(0, 5, V).int() if counts else None,
    )
    state.lengths[~alive] = 10**12
    return state


def tensors(state: RowState) -> list[torch.Tensor]:
    return [tensor for field in fields(state) if (tensor := getattr(state, field.name)) is not None]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 31, 33, 257, 600] if ON_GPU else [1, 3, 33, 300]),
    stop_ids=st.sampled_from([1, 4]),
    counts=st.booleans(),
    faults=st.booleans(),
    cursor=st.integers(0, 9),
)
def test_the_kernel_equals_the_reference(
    seed: int, size: int, stop_ids: int, counts: bool, faults: bool, cursor: int
) -> None:
    want = rows_of(seed, size + 2, stop_ids, counts=counts)
    got = RowState(*(tensor.clone() for tensor in tensors(want)))
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(size + 2, generator=generator)[:size].to(DEVICE)
    index[size // 2 :] = torch.where(want.alive[index[size // 2 :]], index[size // 2 :], size + 1)
    tokens = torch.randint(0, V // 2, (size,), generator=generator).to(DEVICE)
    bad = (torch.rand(size, generator=generator) < 0.3).to(DEVICE) if faults else None
    bits = (BITS["row_shift"], BITS["stop_bit"], BITS["length_bit"], BITS["fault_bit"])
    rings = [torch.full((4, size + 3), -5, device=DEVICE) for _ in range(2)]
    cursors = [torch.full((1,), cursor, device=DEVICE) for _ in range(2)]
    reference.finish(index, tokens, bad, want, rings[0], cursors[0], bits)
    kernel.finish(index, tokens, bad, got, rings[1], cursors[1], bits)
    assert torch.equal(*rings) and torch.equal(*cursors)
    for expected, found in zip(tensors(want), tensors(got), strict=True):
        assert torch.equal(expected, found)


def test_a_step_row_by_row() -> None:
    def tensor(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE)

    state = RowState(
        last=tensor([1, 2, 3, 4, 5]),
        lengths=tensor([3, 3, 3, 3, 3]),
        alive=tensor([1, 1, 1, 1, 0]) > 0,
        limits=tensor([9, 4, 4, 4, 9]),
        history=torch.zeros(5, 6, dtype=torch.int64, device=DEVICE),
        stop_ids=tensor([[7], [7], [7], [7], [7]]),
        counts=torch.zeros(5, 10, dtype=torch.int32, device=DEVICE),
    )
    ring, cursor = torch.zeros(2, 6, dtype=torch.int64, device=DEVICE), tensor([5])
    index, tokens = tensor([4, 3, 2, 1, 0, 4]), tensor([7, 7, 7, 6, 5, 7])
    bad = tensor([1, 0, 1, 0, 0, 0]) > 0
    post_update.finish(index, tokens, bad, state, ring, cursor, **BITS)
    ends = (BITS["stop_bit"], BITS["fault_bit"], BITS["length_bit"], 0)
    words = [token | row << 32 | end for token, row, end in zip((7, 7, 6, 5), (3, 2, 1, 0), ends, strict=True)]
    assert ring.tolist() == [[0] * 6, [NO_WORD, *words, NO_WORD]] and cursor.item() == 6
    assert state.alive.tolist() == [True, False, False, False, False]
    assert state.last.tolist() == [5, 6, 7, 7, 5] and state.lengths.tolist() == [4, 4, 4, 4, 3]
    assert state.history[:, 3].tolist() == [5, 6, 7, 7, 0] and state.history.sum() == 25
    assert state.counts is not None and state.counts.sum() == 4 and state.counts[[0, 1, 2, 3], [5, 6, 7, 7]].all()


def test_a_ring_that_is_too_narrow() -> None:
    state = rows_of(0, 4, 1, counts=False)
    index = torch.arange(3, device=DEVICE)
    ring, cursor = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="lines of 2 words"):
        post_update.finish(index, index, None, state, ring, cursor, **BITS)
