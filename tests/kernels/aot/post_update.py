"""Variants of the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.post_update import RowState, kernel
from tests.kernels import launches


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    rows = torch.zeros(1025, dtype=torch.int64)
    ring, cursor = torch.zeros(4, 1024, dtype=torch.int64), rows[:1]
    bits = (32, 2 << 52, 4 << 52, 8 << 52)
    for size, stop_ids, counted in ((1, 1, False), (64, 4, True), (1024, 16, False)):
        counts = torch.zeros(1025, 16, dtype=torch.int32) if counted else None
        state = RowState(rows, rows, rows > 0, rows, rows[:, None], torch.zeros(1025, stop_ids).long(), counts)
        call = partial(kernel.finish, rows[:size], rows[:size], rows[:size] > 0, state, ring, cursor, bits)
        yield from launches.variants(f"{size} rows, {stop_ids} stop ids{', counts' * counted}", call, 1)
