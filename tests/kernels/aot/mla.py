"""Latent attention at the shapes of DeepSeek-V2-Lite and V3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from lockstep_kernels.mla import Expansion, LatentBatch, Prepared, cuda, parts
from lockstep_kernels.rms_norm import Norm
from tests.kernels import launches

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
H200 = mock.Mock(multi_processor_count=132)


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    for heads in (16, 128):
        for dtype in (torch.bfloat16, torch.float16):
            for block_size, sequences in ((64, 1), (64, 64), (16, 64), (64, 256)):
                name = f"decode h{heads} {dtype} blocks of {block_size}, {sequences} sequences"
                yield from launches.variants(
                    name, partial(_decode, heads, dtype, block_size, sequences), 4 if sequences == 1 else 5
                )
            yield from launches.variants(f"captured prompts h{heads} {dtype}", partial(_captured, heads, dtype), 4)
            for before in (0, 100):
                name = f"prompts h{heads} {dtype} {before} cached"
                yield from launches.variants(name, partial(_prompts, heads, dtype, before), 3 if before else 2)
            for sequences in (1, 64):
                name = f"decode h{heads} {dtype} one by one, {sequences} sequences"
                yield from launches.variants(
                    name, partial(_one_by_one, heads, dtype, sequences), 6 if sequences == 1 else 7
                )
            yield from launches.variants(f"keys h{heads} {dtype}", partial(_keys, heads, dtype), 1)


def _operands(heads: int, tokens: int, dtype: torch.dtype, block_size: int) -> tuple[Any, ...]:
    q_width = heads * (NOPE + ROPE)
    projected = torch.empty(tokens, q_width + RANK + ROPE, dtype=dtype)
    q, latents = projected[:, :q_width].view(tokens, heads, -1), projected[:, q_width:]
    cache = torch.empty(8, 1, 1, block_size, RANK + ROPE, dtype=dtype)
    angles = torch.empty(tokens, ROPE // 2)
    prepared = Prepared(angles, angles, torch.zeros(tokens, dtype=torch.int64), True, None)
    expansion = Expansion(torch.empty(heads, NOPE + VALUE, RANK, dtype=dtype), NOPE)
    return q, latents, Norm(torch.empty(RANK), 1e-6), cache, prepared, expansion


def _decode(heads: int, dtype: torch.dtype, block_size: int, sequences: int) -> None:
    q, latents, norm, cache, prepared, expansion = _operands(heads, sequences, dtype, block_size)
    lens, table = torch.zeros(sequences, dtype=torch.int64), torch.zeros(sequences, 16, dtype=torch.int64)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda device: H200):
        split = cuda.choose_split(heads, block_size, dtype, torch.device("cpu"))
    plan = cuda.plan_decode(lens, table, block_size, expansion, split)
    absorbed = cuda.finish(q, latents, norm, cache, prepared, expansion)
    out = torch.empty(sequences, heads * VALUE, dtype=dtype)
    cuda.decode(q, absorbed, cache, plan, expansion, 0.1, out)


def _one_by_one(heads: int, dtype: torch.dtype, sequences: int) -> None:
    q, latents, norm, cache, p, expansion = _operands(heads, sequences, dtype, 64)
    lens, table = torch.zeros(sequences, dtype=torch.int64), torch.zeros(sequences, 16, dtype=torch.int64)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda device: H200):
        plan = parts.plan(LatentBatch(True, (), (), lens, table, 64), expansion, dtype)
    parts.finish_latents(latents, norm, p.cos, p.sin, True)
    parts.rotate_queries(q, p.cos, p.sin, True)
    out, lse = torch.empty(sequences, heads * VALUE), torch.empty(sequences, heads)
    parts.attend(q, cache, plan, expansion, 0.1, out, lse)


def _keys(heads: int, dtype: torch.dtype) -> None:
    q, _, _, cache, _, expansion = _operands(heads, 4, dtype, 64)
    batch = LatentBatch(False, (4,), (100,), torch.tensor([100]), torch.zeros(1, 16, dtype=torch.int64), 64)
    plan = parts.plan(batch, expansion, dtype)
    parts.attend(q, cache, plan, expansion, 0.1, torch.empty(4, heads * VALUE), torch.empty(4, heads))


def _captured(heads: int, dtype: torch.dtype) -> None:
    q, latents, norm, cache, prepared, expansion = _operands(heads, 4, dtype, 64)
    lens, table, starts = torch.tensor([104, 0]), torch.zeros(2, 16, dtype=torch.int64), torch.tensor([0, 4, 4])
    batch = LatentBatch(False, (), (), lens, table, 64, query_starts=starts, tokens=4, cached=256)
    plan = cuda.plan_captured(batch, starts, expansion, ROPE, dtype, cuda.choose_tiling(dtype))
    cuda.finish(q, latents, norm, cache, prepared)
    cuda.attend(q, latents, cache, plan, expansion, 0.1, torch.empty(4, heads * VALUE, dtype=dtype))


def _prompts(heads: int, dtype: torch.dtype, before: int) -> None:
    q, latents, norm, cache, prepared, expansion = _operands(heads, 4, dtype, 64)
    lens, table = torch.tensor([before + 4]), torch.zeros(1, 16, dtype=torch.int64)
    batch = LatentBatch(False, (4,), (before + 4,), lens, table, 64)
    plan = cuda.plan_prompts(batch, expansion, dtype, cuda.choose_tiling(dtype))
    cuda.finish(q, latents, norm, cache, prepared)
    cuda.attend(q, latents, cache, plan, expansion, 0.1, torch.empty(4, heads * VALUE, dtype=dtype))
