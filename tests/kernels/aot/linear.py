"""Variants of products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.linear import kernel
from lockstep_kernels.linear.few import kernel as few
from tests.kernels import launches

BF16 = torch.bfloat16
SHAPES = {
    "smollm2-135m": ((960, 576), (576, 576), (576, 1536), (49152, 576)),
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096)),
    "qwen3-30b-a3b": ((5120, 2048), (2048, 4096), (151936, 2048)),
    "deepseek-v2-lite": ((3648, 2048), (2048, 2048), (2048, 2816), (2048, 10944)),
}
GATE_UP = {"smollm2-135m": (1536, 576), "llama-3.1-8b": (14336, 4096), "deepseek-v2-lite": (2816, 2048)}


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    for model, shapes in SHAPES.items():
        for n, k in shapes:
            for rows in (1, 2, 4):
                x, w, y = (torch.empty(a, b, dtype=BF16) for a, b in ((rows, k), (n, k), (rows, n)))
                for name, options in (("", {}), (" norm", {"gain": torch.empty(k)}), (" plus", {"plus": y})):
                    call = partial(kernel.skinny, x, w, None, out=y, pdl=True, **options)
                    yield from launches.variants(f"{model} {n}x{k} T={rows}{name}", call, 1)
    for model, (n, k) in GATE_UP.items():
        for rows in (1, 2, 4):
            x, w, y = (torch.empty(a, b, dtype=BF16) for a, b in ((rows, k), (2 * n, k), (rows, n)))
            call = partial(kernel.skinny, x, w, None, out=y, gain=torch.empty(k), gated=True, pdl=True)
            yield from launches.variants(f"{model} gated {n}x{k} T={rows}", call, 1)
    for n, k, gated in ((960, 576, False), (576, 576, False), (1536, 576, True), (576, 1536, False)):
        for rows in (8, 32, 64):
            x, w, y = (torch.empty(a, b, dtype=BF16) for a, b in ((rows, k), ((1 + gated) * n, k), (rows, n)))
            call = partial(few.few, x, w, None, out=y, plus=y if n == 576 else None, gated=gated, pdl=True)
            yield from launches.variants(f"few {n}x{k}{' gated' * gated} T={rows}", call, 1)
    for n, k in SHAPES["llama-3.1-8b"]:
        for rows, dtype in ((8, torch.float32), (64, BF16), (64, torch.float16), (8192, BF16)):
            x, w, y = (torch.empty(a, b, dtype=dtype) for a, b in ((rows, k), (n, k), (rows, n)))
            yield from launches.variants(
                f"tiles {n}x{k} T={rows} {dtype}", partial(kernel.tiles, x, w, None, out=y, plus=y, pdl=True), 1
            )
