"""What ranks do with each other's rows, beside a copy of as many bytes: order of mirrored prompts, tokens to experts and back, merges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch

from lockstep_bench.kernels import COPY_BYTES_PER_S, Case
from lockstep_kernels.gather_sum import gather_sum, reference
from lockstep_kernels.merge import merge
from lockstep_kernels.merge import reference as merge_reference

DEVICE = torch.device("cuda")
DTYPE: Final = torch.bfloat16
SIZE: Final = DTYPE.itemsize
WORKING_SET: Final = 192 * 2**20  # bytes, several times the L2 cache
MOST_RUNS: Final = 64

# tokens, width of their rows
ROWS: Final = ((64, 4096), (16384, 4096), (16384, 7168))
# tokens, experts of each, width: of decode steps and prompts of Qwen3-30B-A3B and DeepSeek-V3
EXPERTS: Final = ((64, 8, 2048), (8192, 8, 2048), (64, 8, 7168), (4096, 8, 7168))
# parts, tokens, heads, width: of decode steps over ranks
PARTS: Final = (
    (2, 64, 32, 128),
    (4, 64, 32, 128),
    (8, 64, 32, 128),
    (4, 256, 32, 128),
    (4, 64, 128, 128),
    (8, 256, 128, 128),
)
# tokens, heads, width: of prompts, to which pieces of their prefix are added
PIECES: Final = ((2048, 32, 128), (4096, 128, 128))


def cases() -> Iterator[Case]:
    for tokens, width in ROWS:
        yield copy_case(tokens, width)
        yield mirror_case(tokens, width, ranks=4)
    for shape in EXPERTS:
        yield dispatch_case(*shape)
        yield combine_case(*shape)
    for parts in PARTS:
        yield merge_case(*parts)
    for piece in PIECES:
        yield piece_case(*piece)


def copy_case(tokens: int, width: int) -> Case:
    """What all others are beside."""
    size = 2 * tokens * width * SIZE
    runs = [partial(_randn(tokens, width).copy_, _randn(tokens, width)) for _ in range(_copies(size))]
    return _case(f"copy T={tokens} of {width}", runs, size)


def mirror_case(tokens: int, width: int, ranks: int) -> Case:
    """Rows gathered rank by rank, of each its chunk from the front and that from the back, in natural order."""
    chunk = tokens // (2 * ranks)
    chunks = torch.arange(tokens, device=DEVICE).view(2 * ranks, chunk)
    gathered = torch.cat([chunks[i] for rank in range(ranks) for i in (rank, 2 * ranks - 1 - rank)])
    index = gathered.argsort()
    size = 2 * tokens * width * SIZE
    operands = [(_randn(tokens, width), _randn(tokens, width)) for _ in range(_copies(size))]
    runs = [partial(torch.index_select, x, 0, index, out=out) for x, out in operands]
    return _case(f"mirror T={tokens} of {width}, {ranks} ranks", runs, size)


def dispatch_case(tokens: int, chosen: int, width: int) -> Case:
    """Tokens' rows in the order of the ranks that they go to, one for each choice; an eighth of the places is left empty, as
    capacities leave some."""
    places = tokens * chosen * 8 // 7
    order = torch.randperm(places, device=DEVICE)
    index = (order // chosen).where(order < tokens * chosen, -1).to(torch.int32).unsqueeze(1)
    size = (tokens + places) * width * SIZE
    rows = [_randn(tokens, width) for _ in range(_copies(size))]
    runs = [partial(gather_sum, x, index) for x in rows]

    def check() -> float:
        return _error(runs[0](), reference.gather_sum(rows[0], index, None))

    return _case(f"dispatch T={tokens} x {chosen} of {width}", runs, size, check)


def combine_case(tokens: int, chosen: int, width: int) -> Case:
    """Sums of what came back for each token, on top of what its shared expert gave; an eighth of the choices came from nowhere."""
    index = torch.randperm(tokens * chosen, device=DEVICE).view(tokens, chosen)
    index = index.where(index % 8 != 0, -1).to(torch.int32)
    there = int((index >= 0).sum())
    size = (there + 2 * tokens) * width * SIZE
    operands = [(_randn(tokens * chosen, width), _randn(tokens, width)) for _ in range(_copies(size))]
    runs = [partial(gather_sum, rows, index, plus=plus) for rows, plus in operands]

    def check() -> float:
        return _error(runs[0](), reference.gather_sum(operands[0][0], index, operands[0][1]))

    return _case(f"combine T={tokens} x {chosen} of {width}", runs, size, check)


def merge_case(parts: int, tokens: int, heads: int, width: int) -> Case:
    """Of float32 as ranks send it, each one's out and then its lse; to what the next product reads."""
    rows = tokens * heads
    size = parts * rows * (width + 1) * 4 + rows * (width * SIZE + 4)
    sent = [torch.randn(parts, rows * (width + 1), device=DEVICE) for _ in range(_copies(size))]
    operands = [
        (x[:, : rows * width].view(parts, tokens, heads, width), x[:, rows * width :].view(parts, tokens, heads))
        for x in sent
    ]
    runs = [partial(merge, outs, lses, dtype=DTYPE) for outs, lses in operands]
    name = f"merge {parts} parts T={tokens} of {heads} x {width}"
    return _case(name, runs, size, lambda: _merge_error(runs[0](), *operands[0]))


def piece_case(tokens: int, heads: int, width: int) -> Case:
    """A piece added to what there is, in place."""
    rows = tokens * heads
    size = 3 * rows * (width + 1) * 4
    operands = [
        (torch.randn(2, tokens, heads, width, device=DEVICE), torch.randn(2, tokens, heads, device=DEVICE))
        for _ in range(_copies(size))
    ]
    runs = [partial(merge, outs, lses, outs[0], lses[0]) for outs, lses in operands]
    before = operands[0][0].clone(), operands[0][1].clone()
    name = f"merge a piece T={tokens} of {heads} x {width}"
    return _case(name, runs, size, lambda: _merge_error(merge(*before), *before))


def _case(name: str, runs: Sequence[Callable[[], Any]], size: float, check: Callable[[], float] | None = None) -> Case:
    return Case(name, runs, bytes=size, check=check, bytes_per_s=COPY_BYTES_PER_S)


def _merge_error(got: tuple[torch.Tensor, torch.Tensor], outs: torch.Tensor, lses: torch.Tensor) -> float:
    want = torch.empty(outs.shape[1:], device=DEVICE), torch.empty(lses.shape[1:], device=DEVICE)
    merge_reference.merge(outs, lses, *want)
    return max(_error(x, y) for x, y in zip(got, want, strict=True))


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest one. Raises AssertionError if it is more than rounding the result explains."""
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2**-7)
    return float((got.float() - want.float()).abs().max())


def _randn(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE).to(DTYPE)


def _copies(size: float) -> int:
    return max(1, min(MOST_RUNS, round(WORKING_SET / size)))
