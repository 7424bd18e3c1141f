"""Variants of zeroing and copying blocks, at the cache shapes of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.blocks import kernel
from tests.kernels import launches


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    one = torch.zeros(1, dtype=torch.int64)
    for shape, dtype in (
        ((2, 8, 64, 128), torch.bfloat16),
        ((1, 1, 64, 576), torch.bfloat16),
        ((2, 3, 64, 64), torch.uint8),
    ):
        cache = torch.zeros(2, 3, *shape, dtype=dtype)
        yield from launches.variants(f"zero {shape} {dtype}", partial(kernel.zero, cache, one), 1)
        yield from launches.variants(f"copy {shape} {dtype}", partial(kernel.copy, cache, one, one), 1)
