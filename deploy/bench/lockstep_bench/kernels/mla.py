"""Latent attention at the shapes of DeepSeek: decode against the bytes of latents, prompts against torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep_bench.kernels import Case
from lockstep_bench.kernels.attention import _counted, _table
from lockstep_kernels.mla import Expansion, LatentBatch, Prepared, attention, cuda, pack, reference
from lockstep_kernels.rms_norm import Norm

DEVICE: Final = torch.device("cuda")
DTYPE: Final = torch.bfloat16
WORKING_SET: Final = 192 * 2**20  # bytes, several times the L2 cache
MOST_RUNS: Final = 128
RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
SCALE: Final = 1.59 * (NOPE + ROPE) ** -0.5
LITE, THIRD = 16, 128  # heads of DeepSeek-V2-Lite, and of V3

# heads; positions of each sequence
DECODE: Final = (
    (LITE, (128,)),
    (LITE, (384,)),
    (LITE, (1024,)),
    (LITE, (8192,)),
    (LITE, (131072,)),
    (LITE, (384,) * 8),
    (LITE, (1088,) * 64),
    (LITE, (640,) * 256),
    (LITE, (1088,) * 256),
    (LITE, (32768,) + (512,) * 63),
    (THIRD, (1088,) * 64),
    (THIRD, (4096,) * 128),
)
# heads; (tokens before, new tokens) of each
PROMPTS: Final = (
    (LITE, ((0, 4096),)),
    (LITE, ((0, 4096),) * 4),
    (LITE, ((0, 1024),) * 16),
    (LITE, ((0, 512),) * 32),
    (LITE, ((12288, 4096),)),
    (LITE, tuple((0, n) for n in (100, 3000, 700, 5000, 64, 1500))),
    (THIRD, ((0, 4096),)),
)


@dataclass(frozen=True)
class Layer:
    """Operands of one call, over blocks in random order."""

    q: torch.Tensor
    latents: torch.Tensor
    norm: Norm
    cache: torch.Tensor
    expansion: Expansion
    out: torch.Tensor


def cases() -> Iterator[Case]:
    for heads, lens in DECODE:
        yield decode_case(heads, lens)
    for lens in ((384,), (8192,), (1088,) * 64, (640,) * 256):
        yield from decode_parts(LITE, lens)
    yield decode_case(LITE, (1088,) * 64, block_size=16)
    for heads, spans in PROMPTS:
        yield prompt_case(heads, spans)
    for spans in (((0, 1024),) * 4, ((1024, 128),) * 8):
        yield captured_case(spans)
    for heads, spans in PROMPTS:
        yield from prompts_by_torch(heads, spans)


def tuning() -> Iterator[Case]:
    """Other ways to cut the work, to be compared with the chosen one."""
    for heads, changes in (
        (
            LITE,
            (
                {},
                {"ahead": 0},
                {"ahead": 4},
                {"warps": 8},
                {"stages": 4, "programs": 132},
                {"stages": 4, "programs": 132, "warps": 8},
                {"keys": 64, "stages": 2, "programs": 132},
                {"keys": 64, "stages": 2, "programs": 132, "warps": 8},
            ),
        ),
        (THIRD, ({}, {"heads": 64, "programs": 66})),
    ):
        chosen = cuda.choose_split(heads, 64, DTYPE, DEVICE)
        for lens in ((1088,) * 64, (640,) * 256, (384,), (131072,)) if heads == LITE else ((1088,) * 64,):
            for change in changes:
                yield from decode_parts(heads, lens, split=replace(chosen, **change), what=str(change), finish=False)
    for tiling in (
        cuda.choose_tiling(DTYPE),
        cuda.Tiling(128, 64, 8, 2),
        cuda.Tiling(128, 128, 8, 2),
        cuda.Tiling(64, 64, 4, 3),
    ):
        yield prompt_case(LITE, ((0, 4096),) * 4, tiling, str(tiling))


def decode_case(heads: int, lens: tuple[int, ...], *, block_size: int = 64) -> Case:
    """All of a captured step's attention between its products; the host knows no lengths."""
    table = _table(lens, block_size)
    batch = LatentBatch(True, (), (), torch.tensor(lens, device=DEVICE), table, block_size)
    layers = _layers(heads, lens, table, block_size)
    prepared = _prepared(table, tuple((n - 1, 1) for n in lens), block_size)
    plan = cuda.prepare(batch, layers[0].expansion, ROPE, DTYPE)
    prepared = replace(prepared, plan=plan)

    def run(layer: Layer) -> torch.Tensor:
        attention(
            layer.q, layer.latents, layer.norm, layer.cache, prepared, layer.expansion, scale=SCALE, out=layer.out
        )
        return layer.out

    known = LatentBatch(False, (1,) * len(lens), lens, batch.seq_lens, table, block_size)
    return Case(
        f"decode h{heads} {_counted(lens)} blocks of {block_size}",
        [partial(run, layer) for layer in layers],
        bytes=_bytes(heads, lens),
        flops=_decode_flops(heads, lens),
        check=partial(_error, layers[0], known, prepared, run) if sum(lens) <= 2**17 else None,
    )


def decode_parts(
    heads: int, lens: tuple[int, ...], *, split: cuda.Split | None = None, what: str = "", finish: bool = True
) -> Iterator[Case]:
    """The kernels of `decode_case` apart: what precedes attention, and attention with its merge."""
    table = _table(lens, 64)
    layers = _layers(heads, lens, table, 64)
    prepared = _prepared(table, tuple((n - 1, 1) for n in lens), 64)
    name = f"h{heads} {_counted(lens)} {what}".rstrip()
    tokens, expansion = len(lens), layers[0].expansion
    if finish:
        yield Case(
            f"finish and absorb {name}",
            [partial(cuda.finish, x.q, x.latents, x.norm, x.cache, prepared, x.expansion) for x in layers],
            bytes=heads * NOPE * RANK * 2.0 + tokens * (heads * (NOPE + 2 * ROPE + RANK) + 3 * (RANK + ROPE)) * 2,
            flops=2.0 * tokens * heads * NOPE * RANK,
        )
    split = split or cuda.choose_split(heads, 64, DTYPE, DEVICE)
    plan = cuda.plan_decode(torch.tensor(lens, device=DEVICE), table, 64, expansion, split)
    absorbed = torch.randn(tokens, heads, RANK, dtype=DTYPE, device=DEVICE) * 0.1
    yield Case(
        f"attend and merge {name}",
        [partial(cuda.decode, x.q, absorbed, x.cache, plan, x.expansion, SCALE, x.out) for x in layers],
        bytes=sum(lens) * (RANK + ROPE) * 2.0 + heads * VALUE * RANK * 2.0,
        flops=_decode_flops(heads, lens),
    )


def prompt_case(
    heads: int, spans: tuple[tuple[int, int], ...], tiling: cuda.Tiling | None = None, what: str = ""
) -> Case:
    """Expansion included, of new and of cached positions."""
    lens = tuple(before + new for before, new in spans)
    table = _table(lens, 64)
    layer = _layer(heads, sum(new for _, new in spans), int(table.max()), 64)
    batch = LatentBatch(False, tuple(new for _, new in spans), lens, torch.tensor(lens, device=DEVICE), table, 64)
    plan: object = cuda.prepare(batch, layer.expansion, ROPE, DTYPE)
    if tiling is not None:
        plan = cuda.plan_prompts(batch, layer.expansion, DTYPE, tiling)
    prepared = replace(_prepared(table, spans, 64), plan=plan)

    def run(layer: Layer) -> torch.Tensor:
        attention(
            layer.q, layer.latents, layer.norm, layer.cache, prepared, layer.expansion, scale=SCALE, out=layer.out
        )
        return layer.out

    return Case(
        f"prompts h{heads} {_counted(spans)} {what}".rstrip(),
        [partial(run, layer)] * 4,
        bytes=2.0 * layer.q.numel() * 2 + sum(lens) * (RANK + ROPE) * 2.0,
        flops=_prompt_flops(heads, spans) + 2.0 * sum(lens) * heads * (NOPE + VALUE) * RANK,
        check=partial(_error, layer, batch, prepared, run) if max(lens) <= 4096 and heads == LITE else None,
    )


def captured_case(spans: tuple[tuple[int, int], ...]) -> Case:
    """A captured pass that its tokens fill, with room for 8192 cached positions."""
    lens = tuple(before + new for before, new in spans)
    table = _table(lens, 64)
    tokens = sum(new for _, new in spans)
    layer = _layer(LITE, tokens, int(table.max()), 64)
    starts = torch.tensor([0, *(new for _, new in spans)], device=DEVICE).cumsum(0)
    seq_lens = torch.tensor(lens, device=DEVICE)
    batch = LatentBatch(False, (), (), seq_lens, table, 64, query_starts=starts, tokens=tokens, cached=8192)
    prepared = replace(_prepared(table, spans, 64), plan=cuda.prepare(batch, layer.expansion, ROPE, DTYPE))
    known = LatentBatch(False, tuple(new for _, new in spans), lens, seq_lens, table, 64)

    def run(layer: Layer) -> torch.Tensor:
        attention(
            layer.q, layer.latents, layer.norm, layer.cache, prepared, layer.expansion, scale=SCALE, out=layer.out
        )
        return layer.out

    return Case(
        f"captured prompts h{LITE} {_counted(spans)}",
        [partial(run, layer)] * 4,
        bytes=2.0 * layer.q.numel() * 2 + sum(lens) * (RANK + ROPE) * 2.0,
        flops=_prompt_flops(LITE, spans) + 2.0 * sum(lens) * LITE * (NOPE + VALUE) * RANK,
        check=partial(_error, layer, known, prepared, run),
    )


def prompts_by_torch(heads: int, spans: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    """The same without norm, rotation and cache write: expansion, keys put together, torch's own attention."""
    if any(before for before, _ in spans):
        return
    lens = [new for _, new in spans]
    layer = _layer(heads, sum(lens), 1, 64)
    name = f"prompts h{heads} {_counted(spans)}"
    flops = _prompt_flops(heads, spans) + 2.0 * sum(lens) * heads * (NOPE + VALUE) * RANK
    moved = 2.0 * layer.q.numel() * 2

    def expand() -> tuple[torch.Tensor, torch.Tensor]:
        weight = layer.expansion.weight.view(-1, RANK)
        expanded = torch.nn.functional.linear(layer.latents[:, :RANK], weight).view(-1, heads, NOPE + VALUE)
        rotated = layer.latents[:, None, RANK:].expand(-1, heads, -1)
        return torch.cat((expanded[..., :NOPE], rotated), -1), expanded[..., NOPE:]

    def cudnn() -> torch.Tensor:
        k, v = expand()
        q, k, v = (x.unflatten(0, (len(lens), -1)).transpose(1, 2) for x in (layer.q, k, v))  # type: ignore[no-untyped-call]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)

    if len(set(lens)) == 1:
        yield Case(f"{name} torch cuDNN", [cudnn] * 4, moved, flops)


def _layers(heads: int, lens: tuple[int, ...], table: torch.Tensor, block_size: int) -> list[Layer]:
    count = int(min(MOST_RUNS, max(2, WORKING_SET // _bytes(heads, lens))))
    return [_layer(heads, len(lens), int(table.max()), block_size) for _ in range(count)]


def _layer(heads: int, tokens: int, blocks: int, block_size: int) -> Layer:
    """New tokens as one product gives them: query heads, latent, rotated key."""
    q_width = heads * (NOPE + ROPE)
    projected = torch.randn(tokens, q_width + RANK + ROPE, dtype=DTYPE, device=DEVICE)
    weight = torch.randn(heads * (NOPE + VALUE), RANK, dtype=DTYPE, device=DEVICE) * RANK**-0.5
    return Layer(
        projected[:, :q_width].view(tokens, heads, NOPE + ROPE),
        projected[:, q_width:],
        Norm(torch.ones(RANK, device=DEVICE), 1e-6),
        torch.randn(blocks + 1, 1, 1, block_size, RANK + ROPE, dtype=DTYPE, device=DEVICE),
        pack(weight, heads, NOPE),
        torch.empty(tokens, heads * VALUE, dtype=DTYPE, device=DEVICE),
    )


def _prepared(table: torch.Tensor, spans: tuple[tuple[int, int], ...], block_size: int) -> Prepared:
    """Without a plan; every token is turned by no angle, so that a call may be repeated."""
    slots = []
    for row, (before, new) in zip(table, spans, strict=True):
        positions = torch.arange(before, before + new, device=DEVICE)
        slots.append(row[positions // block_size] * block_size + positions % block_size)
    tokens = sum(new for _, new in spans)
    cos, sin = torch.ones(tokens, ROPE // 2, device=DEVICE), torch.zeros(tokens, ROPE // 2, device=DEVICE)
    return Prepared(cos, sin, torch.cat(slots), True, None)


def _error(layer: Layer, batch: LatentBatch, prepared: Prepared, run: Callable[[Layer], torch.Tensor]) -> float:
    """The largest one. Raises AssertionError if it is more than rounding the weights and the result explains."""
    out = run(layer).float()
    expected = torch.empty_like(out)
    reference.attention(layer.q, layer.cache, batch, layer.expansion, SCALE, expected)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)
    return float((out - expected).abs().max())


def _bytes(heads: int, lens: tuple[int, ...]) -> float:
    """Latents, and the weights that expand them."""
    return sum(lens) * (RANK + ROPE) * 2.0 + heads * (NOPE + VALUE) * RANK * 2.0


def _decode_flops(heads: int, lens: tuple[int, ...]) -> float:
    return 2.0 * heads * (2 * RANK + ROPE) * sum(lens)


def _prompt_flops(heads: int, spans: tuple[tuple[int, int], ...]) -> float:
    """Two products of each query with each key that it sees."""
    pairs = sum(new * before + new * (new + 1) / 2 for before, new in spans)
    return 2.0 * heads * (NOPE + ROPE + VALUE) * pairs
