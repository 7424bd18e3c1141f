"""Variants of products with 8-bit weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.fp8 import E4M3, kernel
from lockstep_kernels.linear import kernel as products
from tests.kernels import launches

BF16 = torch.bfloat16


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    for k in (4096, 7168, 18432):
        for groups in (True, False):
            for gain in (None, torch.empty(k)):
                call = partial(kernel.quantise, torch.empty(64, k, dtype=BF16), groups, gain=gain, pdl=True)
                yield from launches.variants(f"quantise {k} groups={groups} norm={gain is not None}", call, 1)
    for n, k in ((6144, 4096), (7168, 18432), (2112, 7168)):
        w = torch.empty(n, k, dtype=E4M3)
        for scale in (torch.empty(-(-n // 128), -(-k // 128)), torch.empty(n)):
            name = f"{n}x{k} {'blocks' if scale.dim() == 2 else 'rows'}"
            for rows in (64, 8192):
                x, y = torch.empty(rows, k, dtype=E4M3), torch.empty(rows, n, dtype=BF16)
                x_scale = torch.empty((rows, k // 128) if scale.dim() == 2 else (rows,))
                call = partial(kernel.tiles, x, x_scale, w, scale, None, out=y, plus=y, pdl=True)
                yield from launches.variants(f"tiles {name} T={rows}", call, 1)
            for rows in (1, 4):
                x, y = torch.empty(rows, k, dtype=BF16), torch.empty(rows, n, dtype=BF16)
                call = partial(products.skinny, x, w, None, out=y, gain=torch.empty(k), weight_scale=scale, pdl=True)
                yield from launches.variants(f"skinny {name} T={rows}", call, 1)
