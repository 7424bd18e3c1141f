"""Variants of step preparation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.prepare import DecodeInputs, Share, kernel
from tests.kernels import launches


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    for block_size, groups, width in ((64, 1, 2048), (16, 1, 8192), (64, 2, 512), (64, 1, 513)):
        rows = torch.zeros(257, dtype=torch.int64)
        tables = tuple(torch.zeros(257, width, dtype=torch.int64) for _ in range(groups))
        out = DecodeInputs.empty(64, tables, rows.device)
        call = partial(kernel.decode_inputs, rows[:64], rows, rows, rows > 0, tables, (block_size,) * groups, out)
        yield from launches.variants(f"{groups} tables of {width} blocks of {block_size}", call, 1)
        shared = partial(call, Share(4, 1))
        yield from launches.variants(f"{groups} tables of {width} blocks of {block_size}, a quarter here", shared, 1)
