"""Variants of normalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.rms_norm import kernel
from tests.kernels import launches

BF16 = torch.bfloat16


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    for width in (512, 576, 1536, 2048, 4096, 7168):
        call = partial(kernel.rms_norm, torch.empty(64, width, dtype=BF16), torch.empty(width), 1e-6, pdl=True)
        yield from launches.variants(f"{width} wide", call, 1)
    heads = torch.empty(64, 40, 128, dtype=BF16)[:, :36]
    for gain in (torch.empty(128), torch.empty(36, 128)):
        call = partial(kernel.rms_norm, heads, gain, 1e-6, pdl=True)
        yield from launches.variants(f"36 heads, gain of {gain.dim()} dimensions", call, 1)
