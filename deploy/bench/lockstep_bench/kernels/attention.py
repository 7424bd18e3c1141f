"""Attention at the shapes of the models: decode against the bytes of keys and values, prefill against torch's own kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from lockstep_bench.kernels import Case
from lockstep_kernels.attention import PagedBatch, cuda, reference

DEVICE: Final = torch.device("cuda")
DTYPE: Final = torch.bfloat16
WORKING_SET: Final = 192 * 2**20  # bytes, several times the L2 cache
MOST_RUNS: Final = 256


@dataclass(frozen=True)
class Model:
    name: str
    heads: int
    kv_heads: int
    width: int
    max_len: int

    @property
    def token_bytes(self) -> int:
        """Of keys and values in one layer."""
        return 2 * self.kv_heads * self.width * DTYPE.itemsize


LLAMA: Final = Model("llama-3.1-8b", 32, 8, 128, 131072)
QWEN: Final = Model("qwen3-30b-a3b", 32, 4, 128, 40960)
SMOL: Final = Model("smollm2-135m", 9, 3, 64, 8192)

# sequences of each length
DECODE: Final[tuple[tuple[Model, tuple[int, ...]], ...]] = (
    (LLAMA, (128,)),
    (LLAMA, (384,)),
    (LLAMA, (1024,)),
    (LLAMA, (8192,)),
    (LLAMA, (131072,)),
    (LLAMA, (1088,) * 64),
    (LLAMA, (640,) * 256),
    (LLAMA, (32768,) + (512,) * 63),
    (QWEN, (1088,) * 64),
    (QWEN, (640,) * 256),
    (SMOL, (1088,) * 64),
    (SMOL, (640,) * 256),
)
# other ways to cut the work than the chosen one
SPLITS: Final[tuple[tuple[Model, tuple[int, ...], dict[str, Any]], ...]] = (
    (LLAMA, (1024,), {"ahead": False}),
    (LLAMA, (8192,), {"whole": False}),
    (LLAMA, (1088,) * 64, {"resident": 3, "keys": 64, "stages": 3, "registers": 168, "cut": 4}),
    (QWEN, (1088,) * 64, {"whole": False}),
    (QWEN, (640,) * 256, {"resident": 3}),
    (SMOL, (1088,) * 64, {"whole": False}),
    (SMOL, (1088,) * 64, {"resident": 4, "keys": 64, "stages": 4, "registers": 128, "cut": 8}),
    (SMOL, (640,) * 256, {"resident": 6}),
)
# (tokens before, new tokens) of each, and the ways to compute them
PREFILL: Final = (
    (LLAMA, ((0, 4096),) * 4, ("given", "paged")),
    (LLAMA, ((0, 512),) * 32, ("given", "captured")),
    (LLAMA, ((12288, 4096),), ("paged",)),
    (LLAMA, tuple((0, n) for n in (100, 3000, 700, 5000, 64, 1500)), ("given", "captured")),
)


@dataclass(frozen=True)
class Layer:
    """Operands of one call, over blocks in random order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: torch.Tensor


def cases() -> Iterator[Case]:
    for model, lens in DECODE:
        yield decode_case(model, lens)
    yield decode_case(LLAMA, (1088,) * 64, deterministic=True)
    for model, lens, change in SPLITS:
        yield decode_case(model, lens, **change)
    for model, spans, ways in PREFILL:
        for way in ways:
            yield prefill_case(model, spans, way=way)
    beside_each_other = cuda.Tiling(64, 64, 4, 2, described=True)  # two programs on a multiprocessor
    yield prefill_case(LLAMA, ((0, 512),) * 32, way="captured", tiling=beside_each_other)


def beside() -> Iterator[Case]:
    """Torch's own kernels."""
    yield decode_by_torch(LLAMA, 1088, 64)
    for model, spans, _ in PREFILL:
        yield from prefill_by_torch(model, spans)


def tuning() -> Iterator[Case]:
    """Further ways to cut the work, to be compared with the chosen one."""
    changes: tuple[dict[str, Any], ...] = (
        {"resident": 2},
        {"resident": 2, "stages": 4, "registers": 255},
        {"stages": 2},
        {"cut": 2},
        {"cut": 8},
    )
    for lens in ((384,), (8192,), (1088,) * 64, (640,) * 256):
        for change in changes:
            yield decode_case(LLAMA, lens, **change)
    for tiling in (
        cuda.Tiling(128, 64, 8, 3, described=True),
        cuda.Tiling(128, 64, 8, 3, described=True, parts=2),
        cuda.Tiling(128, 64, 8, 2, described=False, parts=2),
        cuda.Tiling(128, 64, 8, 3, described=False),
        cuda.Tiling(128, 128, 8, 2, described=False),
        cuda.Tiling(64, 64, 4, 2, described=True),
    ):
        for model in (LLAMA, SMOL):
            for spans in (((0, 4096),) * 4, ((0, 512),) * 32):
                yield prefill_case(model, spans, way="paged", tiling=tiling)


def decode_case(
    model: Model,
    lens: tuple[int, ...],
    *,
    block_size: int = 64,
    deterministic: bool = False,
    **change: Any,
) -> Case:
    """A captured step: the host knows no lengths, and its bound is the model's. `change`: of the chosen split."""
    table = _table(lens, block_size, -(-model.max_len // block_size))
    batch = PagedBatch((), (), table, block_size, torch.tensor(lens, device=DEVICE), model.max_len)
    plan = cuda.prepare(
        batch,
        group=model.heads // model.kv_heads,
        kv_heads=model.kv_heads,
        head_dim=model.width,
        dtype=DTYPE,
        device=DEVICE,
        deterministic=deterministic,
        new_kv=False,
        split=replace(
            cuda.choose_split(len(lens) * model.kv_heads, model.width, DTYPE, DEVICE, deterministic), **change
        ),
    )
    size = sum(lens) * model.token_bytes
    count = min(MOST_RUNS, max(2, WORKING_SET // size))
    layers = [_layer(model, len(lens), int(table.max()), block_size) for _ in range(count)]
    known = PagedBatch((1,) * len(lens), lens, table, block_size)
    out = torch.empty(len(lens), model.heads * model.width, dtype=DTYPE, device=DEVICE)
    scale = model.width**-0.5
    name = f"decode {model.name} {_counted(lens)}{' deterministic' * deterministic} {_changes(change)}"
    runs = [partial(cuda.attention, layer.q, layer.cache, plan, scale, out, None) for layer in layers]
    return Case(name.rstrip(), runs, bytes=size, check=partial(_error, layers[0], known, runs[0], scale))


def decode_by_torch(model: Model, length: int, sequences: int) -> Case:
    """torch's flash attention over keys and values in a row."""
    shape = (sequences, model.kv_heads, length, model.width)
    q = torch.randn(sequences, model.heads, 1, model.width, dtype=DTYPE, device=DEVICE)
    kv = [torch.randn(2, *shape, dtype=DTYPE, device=DEVICE) for _ in range(2)]

    def flash(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    name = f"decode {model.name} {sequences}x{length} torch flash"
    return Case(name, [partial(flash, *x) for x in kv], bytes=sequences * length * model.token_bytes)


def prefill_case(
    model: Model,
    spans: tuple[tuple[int, int], ...],
    *,
    way: str,
    tiling: cuda.Tiling | None = None,
    block_size: int = 64,
) -> Case:
    """`way`: "given", new keys and values are at hand, as in the engine; "paged", all by the Triton kernel; "captured", that
    kernel with lengths on the device alone, and as many further rows as pad the tokens to a multiple of 512."""
    lens = tuple(before + new for before, new in spans)
    tokens = sum(new for _, new in spans)
    table = _table(lens, block_size)
    known = batch = PagedBatch(tuple(new for _, new in spans), lens, table, block_size)
    rows = tokens
    if way == "captured":
        rows = -(-tokens // 512) * 512
        starts = torch.tensor([0, *itertools.accumulate(known.query_lens)], device=DEVICE)
        batch = PagedBatch(
            (), (), table, block_size, torch.tensor(lens, device=DEVICE), query_starts=starts, tokens=rows
        )
    layer = _layer(model, rows, int(table.max()), block_size)
    _store(layer, spans, table, block_size)
    plan = cuda.prepare(
        batch,
        group=model.heads // model.kv_heads,
        kv_heads=model.kv_heads,
        head_dim=model.width,
        dtype=DTYPE,
        device=DEVICE,
        deterministic=False,
        new_kv=way == "given",
        tiling=tiling,
    )
    scale = model.width**-0.5
    run = partial(
        cuda.attention, layer.q, layer.cache, plan, scale, None, (layer.k, layer.v) if way == "given" else None
    )
    return Case(
        f"prefill {model.name} {_counted(spans)} {way} {tiling or ''}".rstrip(),
        [run] * 4,
        bytes=sum(lens) * model.token_bytes + 2 * tokens * model.heads * model.width * DTYPE.itemsize,
        flops=_flops(model, spans),
        check=partial(_error, layer, known, run, scale) if max(lens) <= 8192 else None,
    )


def prefill_by_torch(model: Model, spans: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    """torch's own attention over keys and values in a row; sequences of different lengths only by varlen_attn."""
    if any(before for before, _ in spans):
        return
    lens = [new for _, new in spans]
    layer = _layer(model, sum(lens), 1, 64)
    name, flops = f"prefill {model.name} {_counted(spans)}", _flops(model, spans)
    moved = 2.0 * layer.q.numel() * DTYPE.itemsize + sum(lens) * model.token_bytes
    if len(set(lens)) == 1:
        q, k, v = (_batched(x, len(lens)) for x in (layer.q, layer.k, layer.v))

        def cudnn() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        yield Case(f"{name} torch cuDNN", [cudnn] * 4, moved, flops)
    starts = torch.tensor([0, *lens]).cumsum(0).to(DEVICE, torch.int32)
    group = model.heads // model.kv_heads
    k, v = (x.repeat_interleave(group, 1) for x in (layer.k, layer.v))
    varlen = partial(varlen_attn, layer.q.contiguous(), k, v, starts, starts, max(lens), max(lens), window_size=(-1, 0))
    yield Case(f"{name} torch varlen_attn", [varlen] * 4, moved, flops)


def _batched(x: torch.Tensor, sequences: int) -> torch.Tensor:
    """[sequences, heads, tokens, d], a view of x [T, heads, d] of sequences of one length."""
    stride, *others = x.stride()
    tokens, (heads, width) = len(x) // sequences, x.shape[1:]
    return x.as_strided((sequences, heads, tokens, width), (tokens * stride, others[0], stride, others[1]))


def _layer(model: Model, tokens: int, blocks: int, block_size: int) -> Layer:
    """New tokens as a product gives them: query, key and value heads of a token in a row."""
    qkv = torch.randn(tokens, model.heads + 2 * model.kv_heads, model.width, dtype=DTYPE, device=DEVICE)
    q, k, v = torch.tensor_split(qkv, (model.heads, model.heads + model.kv_heads), 1)
    shape = (blocks + 1, 2, model.kv_heads, block_size, model.width)
    return Layer(q, k, v, torch.randn(shape, dtype=DTYPE, device=DEVICE))


def _table(lens: tuple[int, ...], block_size: int, width: int = 0) -> torch.Tensor:
    """[B, W] int64: blocks of all sequences, dealt in random order."""
    widths = [-(-n // block_size) for n in lens]
    ids = iter((torch.randperm(sum(widths), generator=torch.Generator().manual_seed(0)) + 1).tolist())
    table = torch.zeros(len(lens), width or max(widths), dtype=torch.int64)
    for row, own in zip(table, widths, strict=True):
        row[:own] = torch.tensor(list(itertools.islice(ids, own)))
    return table.to(DEVICE)


def _store(layer: Layer, spans: tuple[tuple[int, int], ...], table: torch.Tensor, block_size: int) -> None:
    """Puts the new tokens' keys and values where the cache has them."""
    first = 0
    for row, (before, new) in zip(table, spans, strict=True):
        positions = torch.arange(before, before + new, device=DEVICE)
        kv = torch.stack((layer.k[first : first + new], layer.v[first : first + new]), 1)
        layer.cache[row[positions // block_size], :, :, positions % block_size] = kv
        first += new


def _error(layer: Layer, batch: PagedBatch, run: Callable[[], torch.Tensor], scale: float) -> float:
    """The largest one. Raises AssertionError if it is more than rounding the weights and the result explains."""
    tokens = sum(batch.query_lens)
    expected = torch.empty(tokens, layer.q[0].numel(), device=DEVICE)
    reference.attention(layer.q[:tokens], layer.cache, batch, scale, expected)
    out = run()[:tokens].float()
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)
    return float((out - expected).abs().max())


def _flops(model: Model, spans: tuple[tuple[int, int], ...]) -> float:
    """Two products of each query with each key that it sees."""
    return 4.0 * model.heads * model.width * sum(new * before + new * (new + 1) / 2 for before, new in spans)


def _changes(change: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in change.items())


def _counted(items: tuple[Any, ...]) -> str:
    """Runs of equal items, as 64x1088; a span is before+new."""
    names = ["+".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in items]
    runs = [(name, len(list(same))) for name, same in itertools.groupby(names)]
    return ",".join(f"{count}x{name}" for name, count in runs)
