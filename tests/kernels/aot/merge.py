"""Merges of parts of attention, at the heads of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.merge import kernel
from tests.kernels import launches


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    for parts in (2, 4, 8):
        for heads, width in ((32, 128), (9, 64), (128, 128)):
            for dtype in (torch.bfloat16, torch.float32):
                outs, lses = torch.empty(parts, 64, heads, width), torch.empty(parts, 64, heads)
                out = torch.empty(64, heads, width, dtype=dtype)
                call = partial(kernel.merge, outs, lses, out, lses[0])
                yield from launches.variants(f"{parts} parts of {heads} heads of {width} to {dtype}", call, 1)
