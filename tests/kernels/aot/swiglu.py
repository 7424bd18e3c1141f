"""Variants of the gate behind a joint product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.swiglu import kernel
from tests.kernels import launches


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    for width in (1408, 1536, 10944, 14336):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            call = partial(kernel.silu_mul, torch.empty(64, 2 * width, dtype=dtype), pdl=True)
            yield from launches.variants(f"{width} wide {dtype}", call, 1)
