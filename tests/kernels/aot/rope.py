"""Variants of the step from the product of q, k and v to attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.rope import kernel
from tests.kernels import launches

# query heads, key heads, width, rotated, normalised
MODELS = {
    "llama-3.1-8b": (32, 8, 128, 128, False),
    "smollm2-135m": (9, 3, 64, 64, False),
    "qwen3-30b-a3b": (32, 4, 128, 128, True),
    "glm-4-moe": (96, 8, 128, 64, True),
}


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    for model, (queries, keys, width, rotated, normed) in MODELS.items():
        for dtype in (torch.bfloat16, torch.float16):
            qkv = torch.empty(64, queries + 2 * keys, width, dtype=dtype)
            cache = torch.empty(9, 2, keys, 64, width, dtype=dtype)
            table, index = torch.empty(100, rotated // 2), torch.empty(64, dtype=torch.int64)
            gain = torch.empty(queries + keys, width) if normed else None
            call = partial(kernel.rotate_and_store_, qkv, cache, table, table, index, index, gain, 1e-6, pdl=True)
            yield from launches.variants(f"{model} {dtype}", call, 1)
        for name, heads, first, last in (
            ("queries", queries, 0, queries),
            ("keys and values", keys, queries, queries + 2 * keys),
        ):
            some, own = qkv[:, first:last].contiguous(), None if gain is None else gain[first : first + heads]
            call = partial(kernel.rotate_heads_, some, heads, table, table, index, index, own, 1e-6, pdl=True)
            yield from launches.variants(f"{model} {dtype} {name} alone", call, 1)
        narrow, scale = cache.to(torch.float8_e4m3fn), torch.empty(2, keys)
        call = partial(
            kernel.rotate_and_store_, qkv, narrow, table, table, index, index, gain, 1e-6, kv_scale=scale, pdl=True
        )
        yield from launches.variants(f"{model} into a cache of 8 bits", call, 1)
