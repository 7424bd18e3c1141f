"""Variants of the sum that combines what experts sent back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.gather_sum import kernel
from tests.kernels import launches


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    for hidden, chosen in ((2048, 8), (7168, 8), (4096, 2)):
        rows = torch.empty(64, hidden, dtype=torch.bfloat16)
        for plus in (None, rows):
            call = partial(kernel.gather_sum, rows, torch.empty(64, chosen, dtype=torch.int32), plus, pdl=True)
            yield from launches.variants(
                f"{hidden} wide, {chosen} rows, {'on top' if plus is rows else 'alone'}", call, 1
            )
