"""Dense layers at the shapes of the models: products against cuBLAS, the small operations between them, and a step of products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from lockstep_bench.kernels import Case
from lockstep_kernels.linear import kernel, linear, pack
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_kernels.rope import kernel as rope
from lockstep_kernels.swiglu import GateUp, pack_gate_up, swiglu
from lockstep_kernels.swiglu import kernel as elementwise

DEVICE: Final = torch.device("cuda")
DTYPE: Final = torch.bfloat16
SIZE: Final = DTYPE.itemsize
WORKING_SET: Final = 192 * 2**20  # bytes, several times the L2 cache
MOST_RUNS: Final = 128
BATCHES: Final = (1, 8, 64, 256, 8192)
EPS: Final = 1e-5
WORST: Final = 0.06  # error of values of about 1, of which bfloat16 keeps 8 bits

# What `tiles` might be for batches between a few and many rows: rows, columns, depth, warps, tiles in flight.
TILES: Final = {
    8: ((16, 32, 256, 4, 4), (16, 16, 256, 4, 5), (16, 64, 128, 4, 5)),
    16: ((16, 32, 256, 4, 4), (16, 16, 256, 4, 5), (16, 64, 128, 4, 5)),
    32: ((32, 32, 256, 4, 3), (32, 64, 128, 4, 5)),
    64: ((64, 32, 128, 4, 5), (64, 64, 128, 4, 4), (64, 64, 64, 4, 6)),
}
# Other ways of a skinny product with 4096 columns: rows of the weight, columns, warps.
SKINNY: Final = ((4, 1024, 4), (8, 1024, 8), (8, 512, 4), (4, 2048, 8), (16, 512, 8))


@dataclass(frozen=True)
class Shape:
    """The dense products of a model. `inner` 0: its feed-forward part is not dense."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    inner: int
    vocab: int
    head_norm: bool = False
    latent: int = 0  # outputs of the first product where attention is latent

    @property
    def qkv(self) -> int:
        return self.latent or (self.heads + 2 * self.kv_heads) * self.width

    @property
    def mixed(self) -> int:
        """What attention gives."""
        return self.heads * self.width


LLAMA: Final = Shape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256)
SMOL: Final = Shape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152)
QWEN: Final = Shape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 0, 151936, head_norm=True)
# The first product is [queries of 192 | latents of 576]; shared experts are 2816 wide.
DEEPSEEK: Final = Shape("deepseek-v2-lite", 27, 2048, 16, 1, 128, 2816, 102400, latent=16 * 192 + 576)
SHAPES: Final = (LLAMA, SMOL, QWEN, DEEPSEEK)


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        for rows in BATCHES:
            yield from _products(shape, rows)
    for rows in (8, 16, 32, 64):
        yield from _tiles(rows)
    yield from _skinny_configurations()
    for shape in SHAPES:
        for rows in (1, 64, 8192):
            yield from _small(shape, rows)
    for shape in (LLAMA, SMOL):
        for rows in (1, 2, 4, 8, 64):
            yield _step(shape, rows)


def _randn(*size: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*size, device=DEVICE) * scale).to(DTYPE)


def _copies(size: float) -> int:
    return max(1, min(MOST_RUNS, round(WORKING_SET / size)))


def _norm(width: int) -> Norm:
    return Norm(1 + 0.1 * torch.randn(width, device=DEVICE), EPS)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.gain


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    worst = ((got.float() - want).abs() / want.abs().clamp(min=1)).max().item()
    if not worst < WORST:
        raise AssertionError(f"the largest error is {worst}")
    return worst


def _product(
    name: str,
    rows: int,
    n: int,
    k: int,
    make: Callable[[torch.Tensor], Callable[[], torch.Tensor]],
    exact: Callable[[torch.Tensor], torch.Tensor],
    *,
    out: int | None = None,
    out_bytes: int = SIZE,
) -> Case:
    """`make` turns a weight [n, k] into a run; `exact` is what the run gives, in float32. `out`: width of the result."""
    width = n if out is None else out
    size = n * k * SIZE + rows * (k * SIZE + width * out_bytes)
    weights = [_randn(n, k, scale=k**-0.5) for _ in range(_copies(size))]
    runs = [make(weight) for weight in weights]
    return Case(
        name, runs, bytes=size, flops=2.0 * rows * n * k, check=lambda: _error(make(weights[0])(), exact(weights[0]))
    )


def _products(s: Shape, rows: int) -> Iterator[Case]:
    yield from _plain(f"{s.name} qkv", rows, s.qkv, s.hidden, norm=True)
    yield from _plain(f"{s.name} out", rows, s.hidden, s.mixed, plus=True)
    if s.inner:
        yield from _gated(f"{s.name} gate_up", rows, s.inner, s.hidden)
        yield from _plain(f"{s.name} down", rows, s.hidden, s.inner, plus=True)
    if rows <= 256:
        yield from _plain(f"{s.name} head", rows, s.vocab, s.hidden, wide=True)


def _plain(
    name: str, rows: int, n: int, k: int, *, norm: bool = False, plus: bool = False, wide: bool = False
) -> Iterator[Case]:
    """cuBLAS on the bare product; ours with the norm before it and the residual behind it; the same, deterministic."""
    x, before = _randn(rows, k), _norm(k) if norm else None
    residual = _randn(rows, n) if plus else None
    name = f"{name} {n}x{k} T={rows}"

    def bare(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
        return partial(torch.nn.functional.linear, x, weight)

    def whole(deterministic: bool, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
        packed = pack(weight, deterministic=deterministic)
        added = None if residual is None else residual.clone()
        return partial(linear, x, packed, norm=before, plus=added, wide=wide)

    def exact(weight: torch.Tensor) -> torch.Tensor:
        y = (x.float() if before is None else _normed(x, before)) @ weight.float().t()
        return y if residual is None else y + residual.float()

    yield _product(f"{name} cublas alone", rows, n, k, bare, lambda weight: x.float() @ weight.float().t())
    extra = "".join((" norm" * norm, " plus" * plus, " float32" * wide))
    for kind, deterministic in (("", False), (" deterministic", True)):
        yield _product(
            f"{name}{extra}{kind}", rows, n, k, partial(whole, deterministic), exact, out_bytes=4 if wide else SIZE
        )


def _gated(name: str, rows: int, inner: int, k: int) -> Iterator[Case]:
    x, norm = _randn(rows, k), _norm(k)
    name = f"{name} {2 * inner}x{k} T={rows}"

    def whole(deterministic: bool, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
        return partial(swiglu, x, GateUp(pack(weight, deterministic=deterministic), None), norm=norm)

    def exact(weight: torch.Tensor) -> torch.Tensor:
        gate, up = (_normed(x, norm) @ weight.float().t()).chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    yield _product(
        f"{name} cublas alone",
        rows,
        2 * inner,
        k,
        lambda weight: partial(torch.nn.functional.linear, x, weight),
        lambda weight: x.float() @ weight.float().t(),
    )
    for kind, deterministic in (("", False), (" deterministic", True)):
        yield _product(f"{name} norm silu{kind}", rows, 2 * inner, k, partial(whole, deterministic), exact, out=inner)


def _tiles(rows: int) -> Iterator[Case]:
    """Own tiles where cuBLAS is used now."""
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (960, 576), (5120, 2048)):
        x = _randn(rows, k)
        for numbers in (None, *TILES[rows]):
            config = None if numbers is None else kernel.TileConfig(*numbers)

            def make(
                weight: torch.Tensor, x: torch.Tensor = x, n: int = n, config: kernel.TileConfig | None = config
            ) -> Callable[[], torch.Tensor]:
                if config is None:
                    return partial(torch.nn.functional.linear, x, weight)
                return partial(kernel.tiles, x, weight, None, out=x.new_empty(len(x), n), config=config)

            name = f"tiles {n}x{k} T={rows} {'cublas' if numbers is None else 'x'.join(map(str, numbers))}"
            yield _product(name, rows, n, k, make, lambda weight, x=x: x.float() @ weight.float().t())  # type: ignore[misc]


def _skinny_configurations() -> Iterator[Case]:
    for n, k, gated in ((6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False)):
        x = _randn(1, k)
        for numbers in SKINNY:
            for pdl in (True, False):
                yield Case(
                    f"skinny {n}x{k}{' gated' * gated} {'x'.join(map(str, numbers))}{' overlapped' * pdl}",
                    [
                        partial(
                            kernel.skinny,
                            x,
                            _randn((1 + gated) * n, k, scale=k**-0.5),
                            None,
                            out=x.new_empty(1, n),
                            gated=gated,
                            config=kernel.SkinnyConfig(*numbers),
                            pdl=pdl,
                        )
                        for _ in range(_copies((1 + gated) * n * k * SIZE))
                    ],
                    bytes=(1 + gated) * n * k * SIZE,
                )


def _small(s: Shape, rows: int) -> Iterator[Case]:
    hidden, norm = s.hidden * rows * SIZE, _norm(s.hidden)
    inputs = [_randn(rows, s.hidden) for _ in range(_copies(2 * hidden))]
    yield Case(
        f"rms_norm {s.name} {s.hidden} T={rows}",
        [partial(rms_norm, x, *norm) for x in inputs],
        bytes=2 * hidden,
        check=lambda: _error(rms_norm(inputs[0], *norm), _normed(inputs[0], norm)),
    )
    yield Case(
        f"rms_norm {s.name} {s.hidden} T={rows} torch",
        [partial(torch.nn.functional.rms_norm, x, (s.hidden,), norm.gain.to(DTYPE), EPS) for x in inputs],
        bytes=2 * hidden,
    )
    if s.inner:
        both = [_randn(rows, 2 * s.inner) for _ in range(_copies(3 * s.inner * rows * SIZE))]
        yield Case(
            f"silu_mul {s.name} {s.inner} T={rows}",
            [partial(elementwise.silu_mul, pair) for pair in both],
            bytes=3 * s.inner * rows * SIZE,
        )
    if s.latent:
        return
    qkv_bytes = s.qkv * rows * SIZE
    blocks = 1 + -(-rows // 64)
    positions = torch.arange(rows, device=DEVICE) % 4096
    slots = torch.randperm(blocks * 64, device=DEVICE)[:rows]
    angles = torch.outer(torch.arange(4096.0, device=DEVICE), torch.rand(s.width // 2, device=DEVICE))
    gain = 1 + 0.1 * torch.randn(s.heads + s.kv_heads, s.width, device=DEVICE) if s.head_norm else None
    yield Case(
        f"rope and store {s.name}{' norm' * s.head_norm} T={rows}",
        [
            partial(
                rope.rotate_and_store_,
                _randn(rows, s.heads + 2 * s.kv_heads, s.width),
                torch.zeros(blocks, 2, s.kv_heads, 64, s.width, dtype=DTYPE, device=DEVICE),
                angles.cos(),
                angles.sin(),
                positions,
                slots,
                gain,
                EPS,
            )
            for _ in range(_copies(2 * qkv_bytes))
        ],
        bytes=2 * qkv_bytes,
    )


def _step(s: Shape, rows: int) -> Case:
    """All dense products of one decode step, norms and residuals included, attention left out."""
    layers = [_Layer(s) for _ in range(s.layers)]
    head, final = pack(_randn(s.vocab, s.hidden, scale=s.hidden**-0.5)), _norm(s.hidden)
    given = _randn(rows, s.hidden)

    def run() -> torch.Tensor:
        hidden = given.clone()
        for layer in layers:
            hidden = layer(hidden)
        return linear(rms_norm(hidden, *final), head, wide=True)

    weights = s.layers * (s.qkv + s.mixed + 3 * s.inner) * s.hidden + s.vocab * s.hidden
    return Case(f"step {s.name} T={rows}", [run], bytes=weights * SIZE, flops=2.0 * rows * weights)


class _Layer:
    def __init__(self, s: Shape) -> None:
        self._first, self._second = _norm(s.hidden), _norm(s.hidden)
        self._mixed = s.mixed
        self._qkv, self._out, self._down = (
            pack(_randn(n, k, scale=0.1 * k**-0.5))
            for n, k in ((s.qkv, s.hidden), (s.hidden, self._mixed), (s.hidden, s.inner))
        )
        self._gate_up = pack_gate_up(*(_randn(s.inner, s.hidden, scale=s.hidden**-0.5) for _ in range(2)))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = linear(hidden, self._qkv, norm=self._first)[:, : self._mixed].contiguous()
        hidden = linear(mixed, self._out, plus=hidden)
        return linear(swiglu(hidden, self._gate_up, norm=self._second), self._down, plus=hidden)
