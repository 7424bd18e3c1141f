"""Attention at the shapes of real models and of odd ones, through the very calls that launch it on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final
from unittest import mock

import torch
from triton.runtime.driver import driver

from lockstep_kernels import dependent
from lockstep_kernels.attention import PagedBatch, cuda
from tests.kernels import launches

# query heads, key/value heads, head_dim
SHAPES: Final = {
    "llama-3.1-8b": (32, 8, 128),
    "qwen3-30b-a3b": (32, 4, 128),
    "smollm2-135m": (9, 3, 64),
    "16 heads of 128": (16, 16, 128),
    "4 heads of 256": (4, 1, 256),
    "8 heads of 80": (8, 2, 80),
    "4 heads of 16": (4, 2, 16),
}
FIRST: Final = "llama-3.1-8b"  # compiled in every form; the others in the usual one
H200: Final = mock.Mock(multi_processor_count=132)


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, heads in SHAPES.items():
        for block_size in (16, 64) if name == FIRST else (64,):
            for dtype in (torch.bfloat16, torch.float16, torch.float32) if name == FIRST else (torch.bfloat16,):
                what = f"{name} blocks of {block_size} {str(dtype).removeprefix('torch.')}"
                run = partial(_run, *heads, block_size, dtype)
                yield from launches.variants(f"prefill {what}", partial(run, decode=False), 1)
                yield from launches.variants(f"decode {what}", partial(run, decode=True), 2)
                captured = launches.variants(f"captured prefill {what}", partial(run, decode=False, captured=True), 2)
                yield next(captured)  # the other kernel is that of prefill
                if name == FIRST and dtype == torch.bfloat16:
                    for part in (True, False):  # what context parallelism attends to
                        form = f"part {what} {'' if part else 'not '}causal"
                        yield from launches.variants(
                            f"prefill {form}", partial(run, decode=False, part=True, causal=part), 1
                        )
                    yield from launches.variants(f"decode part {what}", partial(run, decode=True, part=True), 2)
                if name == FIRST:
                    many = launches.variants(f"decode {what}, 64 sequences", partial(run, decode=True, sequences=64), 2)
                    yield list(many)[1]
                    fixed = partial(run, decode=True, deterministic=True)
                    yield from launches.variants(f"decode {what} deterministic", fixed, 2)
        small = partial(_run, *heads, 64, torch.float8_e4m3fn)
        yield from launches.variants(f"prefill {name} float8", partial(small, decode=False), 1)
        yield from launches.variants(f"decode {name} float8", partial(small, decode=True), 2)


def _run(
    heads: int,
    kv_heads: int,
    width: int,
    block_size: int,
    dtype: torch.dtype,  # of the cache
    *,
    decode: bool,
    deterministic: bool = False,
    captured: bool = False,
    part: bool = False,  # of a sequence's keys: with its log-sum-exp, and not rounded
    causal: bool = True,
    sequences: int = 2,  # of a decode step
) -> None:
    table = torch.ones(sequences, 16, dtype=torch.int64)
    batch = PagedBatch((64, 70), (64, 100), table[:2], block_size, causal=causal)
    if decode:
        batch = PagedBatch((), (), table, block_size, lens=torch.full((sequences,), 100), max_seq_len=256)
    if captured:
        starts = torch.tensor([0, 64, 134])
        batch = PagedBatch((), (), table[:2], block_size, lens=torch.full((2,), 100), query_starts=starts, tokens=134)
    cache = torch.empty(2, 2, kv_heads, block_size, width, dtype=dtype)
    small = dtype.itemsize == 1
    qkv = torch.empty(134, heads + 2 * kv_heads, width, dtype=torch.bfloat16 if small else dtype)
    scales = torch.ones(2, kv_heads).unbind() if small else None
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: H200),
        mock.patch.object(dependent, "supported", lambda device: driver.active.get_current_target().arch >= 90),
    ):
        plan = cuda.prepare(
            batch,
            group=heads // kv_heads,
            kv_heads=kv_heads,
            head_dim=width,
            dtype=dtype,
            device=torch.device("cpu"),
            deterministic=deterministic,
            new_kv=False,
        )
        out, lse = (torch.empty(134, heads * width), torch.empty(134, heads)) if part else (None, None)
        cuda.attention(qkv[:, :heads], cache, plan, width**-0.5, out, None, scales, lse)
