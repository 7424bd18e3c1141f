"""Variants of sampling, at the vocabularies of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.sampling import Float, Int, RowTables, kernel
from lockstep_kernels.sampling.rows import kernel as rows_kernel
from tests.kernels import launches

ROWS = 65


def tables(vocab: int, *, bias: int, stop_ids: int, counted: bool) -> RowTables:
    counts = torch.zeros(ROWS, vocab, dtype=torch.int32) if counted else None
    return RowTables(
        floats=torch.zeros(ROWS, len(Float)),
        ints=torch.zeros(ROWS, len(Int), dtype=torch.int64),
        stop_ids=torch.zeros(ROWS, stop_ids, dtype=torch.int64),
        bias_ids=torch.zeros(ROWS, bias, dtype=torch.int64),
        bias_values=torch.zeros(ROWS, bias),
        lengths=torch.zeros(ROWS, dtype=torch.int64),
        counts=counts,
        in_prompt=None if counts is None else counts > 0,
    )


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    index = torch.zeros(4, dtype=torch.int64)
    for vocab in (49152, 102400, 128256, 151936, 262144):
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.zeros(4, vocab, dtype=dtype)
            yield from launches.variants(f"greedy {vocab} {dtype}", partial(kernel.argmax, logits), 2)
        logits = torch.zeros(4, vocab)
        for count in (0, 20):
            call = partial(kernel.logprobs, logits, index, count)
            yield from launches.variants(f"logprobs {vocab}, {count} best", call, 2)
        plain = tables(vocab, bias=1, stop_ids=1, counted=False)
        call = partial(rows_kernel.sample_rows, logits, index, plain, None, None)
        yield from launches.variants(f"rows {vocab}", call, 7)
    rich = tables(vocab, bias=512, stop_ids=8, counted=True)
    mask = torch.zeros(4, vocab // 32, dtype=torch.int32)
    call = partial(rows_kernel.sample_rows, logits.bfloat16(), index, rich, index, mask)
    yield from launches.variants(f"rows {vocab}, bfloat16, penalties, bias, mask", call, 7)
