"""The CUDA path of latent attention against its reference: however work is cut, with NaN in every slot that must not be read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.device import DEVICE, HALF_DTYPES, ON_GPU, poisoned, randn

from lockstep_kernels.mla import Expansion, LatentBatch, Prepared, cuda, reference  # isort: skip
from lockstep_kernels.rms_norm import Norm  # isort: skip

EPS = 1e-6
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
LONG = 20 if ON_GPU else 1  # sequences are this much longer where they cost nothing


@dataclass(frozen=True)
class Shape:
    heads: int
    nope: int
    rope: int
    value: int
    rank: int


SHAPES = [Shape(2, 16, 16, 16, 32), Shape(3, 24, 16, 20, 16), Shape(16, 16, 32, 32, 16)]
if ON_GPU:
    SHAPES = [Shape(3, 24, 16, 20, 32), Shape(16, 128, 64, 128, 512), Shape(128, 128, 64, 128, 512)]


@dataclass(frozen=True)
class Operands:
    """A pass over `spans` (first new position, length) of sequences; the cache is NaN wherever nothing is stored before it."""

    shape: Shape
    spans: tuple[tuple[int, int], ...]
    block_size: int
    q: torch.Tensor
    latents: torch.Tensor
    norm: Norm
    cache: torch.Tensor
    table: torch.Tensor
    expansion: Expansion
    prepared: Prepared  # without a plan

    @property
    def scale(self) -> float:
        return float((self.shape.nope + self.shape.rope) ** -0.5)

    def batch(self, *, decode: bool, known: bool = True) -> LatentBatch:
        new, lens = (tuple(end - start for start, end in self.spans), tuple(end for _, end in self.spans))
        return LatentBatch(
            decode,
            new if known else (),
            lens if known else (),
            torch.tensor(lens, device=DEVICE),
            self.table,
            self.block_size,
        )

    def expected(self) -> tuple[torch.Tensor, ...]:
        """What the pass leaves in q, latents and cache, and its result: by the reference, in float32."""
        q, latents, cache = self.q.clone(), self.latents.clone(), self.cache.clone()
        p = self.prepared
        reference.store(q, latents, self.norm.gain, EPS, p.cos, p.sin, cache, p.slots, p.interleaved)
        out = torch.empty(len(q), self.shape.heads * self.shape.value, device=DEVICE)
        reference.attention(q, cache, self.batch(decode=False), self.expansion, self.scale, out)
        return q, latents, cache, out


def make(
    shape: Shape,
    spans: tuple[tuple[int, int], ...],
    block_size: int,
    dtype: torch.dtype,
    *,
    interleaved: bool = True,
    seed: int = 0,
) -> Operands:
    widths = [-(-end // block_size) for _, end in spans]
    ids = (torch.randperm(sum(widths), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    width = shape.rank + shape.rope
    cache = poisoned(sum(widths) + 1, 1, 1, block_size, width, dtype=dtype)
    table = torch.zeros(len(spans), max(widths) + 1, dtype=torch.int64, device=DEVICE)
    slots = []
    for i, (blocks, (start, end)) in enumerate(zip(widths, spans, strict=True)):
        table[i, :blocks] = torch.tensor([ids.pop() for _ in range(blocks)])
        positions = torch.arange(end, device=DEVICE)
        at = table[i, positions // block_size] * block_size + positions % block_size
        cache.view(-1, width)[at[:start]] = randn(start, width, dtype=dtype, seed=seed + i + 1)
        slots.append(at[start:])
    tokens = sum(end - start for start, end in spans)
    q_width = shape.heads * (shape.nope + shape.rope)
    projected = randn(tokens, q_width + width, dtype=dtype, seed=seed)  # as one product gives them
    q, latents = projected[:, :q_width].view(tokens, shape.heads, -1), projected[:, q_width:]
    angles = torch.arange(tokens * shape.rope // 2, device=DEVICE).view(tokens, -1).float()
    weight = randn(shape.heads, shape.nope + shape.value, shape.rank, dtype=dtype, seed=seed + 9) * shape.rank**-0.5
    return Operands(
        shape,
        spans,
        block_size,
        q,
        latents,
        Norm(1 + 0.1 * randn(shape.rank, seed=seed + 10), EPS),
        cache,
        table,
        Expansion(weight, shape.nope),
        Prepared(angles.cos(), angles.sin(), torch.cat(slots), interleaved, None),
    )


def check(operands: Operands, want: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    tolerance = TOLERANCE[operands.q.dtype]
    for got, expected in zip((operands.q, operands.latents, operands.cache), want, strict=False):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance / 4, equal_nan=True)
    assert out[-1].isnan().all(), "wrote past the last token"
    torch.testing.assert_close(out[:-1].float(), want[3], rtol=tolerance, atol=tolerance)


DTYPES = st.sampled_from(HALF_DTYPES if ON_GPU else [*HALF_DTYPES, torch.float32])
LENGTHS = st.one_of(st.sampled_from([1, 15, 16, 31, 32, 33, 64, 65]), st.integers(1, 70)).map(lambda n: n * LONG)
QUICK = settings(max_examples=25 if ON_GPU else 8, deadline=None)


@QUICK
@given(
    shape=st.sampled_from(SHAPES),
    dtype=DTYPES,
    lengths=st.lists(LENGTHS, min_size=1, max_size=3),
    block_size=st.sampled_from([16, 32, 64, 128]),
    programs=st.sampled_from([1, 2, 5, 9]),
    keys=st.sampled_from([32, 64]),
    least=st.integers(1, 2),
    many=st.booleans(),
    interleaved=st.booleans(),
)
def test_decode(
    shape: Shape,
    dtype: torch.dtype,
    lengths: list[int],
    block_size: int,
    programs: int,
    keys: int,
    least: int,
    many: bool,
    interleaved: bool,
) -> None:
    """Of one new token a sequence, without lengths on the host; both ways to merge what programs have of a sequence."""
    operands = make(shape, tuple((n - 1, n) for n in lengths), block_size, dtype, interleaved=interleaved)
    want = operands.expected()
    batch = operands.batch(decode=True, known=False)
    split = cuda.Split(programs, 16, keys, least, warps=4, stages=2)
    if ON_GPU:  # as it is launched in earnest
        chosen = cuda.choose_split(shape.heads, block_size, dtype, DEVICE)
        stages = chosen.stages if keys == chosen.keys else 2  # what is not chosen is there to be compared with it
        split = replace(chosen, programs=30 * programs, least=least, keys=keys, stages=stages)
    plan = cuda.plan_decode(batch.seq_lens, batch.block_table, block_size, operands.expansion, split)
    plan.parts.fill_(torch.nan)
    out = poisoned(len(lengths) + 1, shape.heads * shape.value, dtype=dtype)
    absorbed = cuda.finish(
        operands.q, operands.latents, operands.norm, operands.cache, operands.prepared, operands.expansion
    )
    assert absorbed is not None
    cuda.decode(
        operands.q, absorbed, operands.cache, plan, operands.expansion, operands.scale, out, many=1 if many else 99
    )
    check(operands, want, out)


def test_decode_of_sequences_without_positions() -> None:
    """They cost no work, get zeros and disturb no other."""
    shape = SHAPES[0]
    operands = make(shape, ((69, 70), (4, 5)), 16, torch.float32)
    want = operands.expected()[3]
    absorbed = cuda.finish(
        operands.q, operands.latents, operands.norm, operands.cache, operands.prepared, operands.expansion
    )
    assert absorbed is not None
    lens = torch.tensor([0, 0, 70, 0, 5, 0], device=DEVICE)
    pick = torch.tensor([0, 1, 0, 0, 1, 1], device=DEVICE)
    for many in (1, 99):
        plan = cuda.plan_decode(lens, operands.table[pick], 16, operands.expansion, cuda.Split(3, 16, 32, 1, 4, 2))
        out = poisoned(6, shape.heads * shape.value)
        cuda.decode(
            operands.q[pick],
            absorbed[pick],
            operands.cache,
            plan,
            operands.expansion,
            operands.scale,
            out,
            many=many,
        )
        torch.testing.assert_close(out[[2, 4]], want, rtol=1e-5, atol=1e-5)
        assert (out[[0, 1, 3, 5]] == 0).all()


SPANS = st.tuples(st.one_of(st.just(0), st.integers(0, 70)), st.integers(1, 70)).map(
    lambda span: (span[0] * LONG, (span[0] + span[1]) * LONG)
)


@QUICK
@given(
    shape=st.sampled_from(SHAPES),
    dtype=DTYPES,
    spans=st.lists(SPANS, min_size=1, max_size=2),
    block_size=st.sampled_from([16, 64]),
    piece=st.sampled_from([17, 64, 1000]),
    interleaved=st.booleans(),
)
def test_prompts(
    shape: Shape,
    dtype: torch.dtype,
    spans: list[tuple[int, int]],
    block_size: int,
    piece: int,
    interleaved: bool,
) -> None:
    """With and without cached positions before them, in pieces of any size."""
    operands = make(shape, tuple(spans), block_size, dtype, interleaved=interleaved)
    want = operands.expected()
    tiling = cuda.choose_tiling(dtype) if ON_GPU else cuda.Tiling(32, 32, 4, 2)
    plan = cuda.plan_prompts(operands.batch(decode=False), operands.expansion, dtype, tiling, piece * LONG)
    out = poisoned(len(operands.q) + 1, shape.heads * shape.value, dtype=dtype)
    assert cuda.finish(operands.q, operands.latents, operands.norm, operands.cache, operands.prepared) is None
    cuda.attend(operands.q, operands.latents, operands.cache, plan, operands.expansion, operands.scale, out)
    check(operands, want, out)


@QUICK
@given(
    shape=st.sampled_from(SHAPES),
    dtype=DTYPES,
    spans=st.lists(SPANS, min_size=1, max_size=2),
    idle=st.lists(st.integers(0, 9), max_size=1),
    block_size=st.sampled_from([16, 64]),
    extra=st.integers(0, 70),
    spare=st.integers(0, 40),
)
def test_captured_prompts(
    shape: Shape,
    dtype: torch.dtype,
    spans: list[tuple[int, int]],
    idle: list[int],
    block_size: int,
    extra: int,
    spare: int,
) -> None:
    """With lengths on the device alone; sequences without new tokens change nothing, and `extra` rows of none become zeros."""
    every = (spans[0], *((n, n) for n in idle), *spans[1:])
    operands = make(shape, every, block_size, dtype)
    there = [i for i, (start, end) in enumerate(every) if start < end]
    known = replace(operands, spans=tuple(spans), table=operands.table[there])
    want = known.expected()
    cuda.finish(operands.q, operands.latents, operands.norm, operands.cache, operands.prepared)
    batch = replace(
        operands.batch(decode=True, known=False),
        decode=False,
        query_starts=torch.tensor([0, *(end - start for start, end in every)], device=DEVICE).cumsum(0),
        tokens=len(operands.q) + extra,
        cached=sum(start for start, _ in every) + spare,
    )
    tiling = cuda.choose_tiling(dtype) if ON_GPU else cuda.Tiling(32, 32, 4, 2)
    assert batch.query_starts is not None
    plan = cuda.plan_captured(batch, batch.query_starts, operands.expansion, shape.rope, dtype, tiling)
    assert plan.cached is not None
    plan.cached.expanded.fill_(torch.nan)
    q, latents = (torch.cat((x, poisoned(extra, *x.shape[1:], dtype=dtype))) for x in (operands.q, operands.latents))
    out = poisoned(len(q) + 1, shape.heads * shape.value, dtype=dtype)
    cuda.attend(q, latents, operands.cache, plan, operands.expansion, operands.scale, out)
    assert not out[len(operands.q) : -1].any()
    check(operands, want, torch.cat((out[: len(operands.q)], out[-1:])))


def test_a_fault_of_one_sequence_stays_there() -> None:
    """NaN among one prompt's values do not reach its neighbours in the pass."""
    shape = SHAPES[0]
    operands = make(shape, ((0, 30), (0, 20), (0, 33)), 16, torch.float32)
    want = operands.expected()[3]
    operands.latents[30:50] = torch.nan
    cuda.finish(operands.q, operands.latents, operands.norm, operands.cache, operands.prepared)
    plan = cuda.plan_prompts(operands.batch(decode=False), operands.expansion, torch.float32, cuda.Tiling(32, 32, 4, 2))
    out = poisoned(84, shape.heads * shape.value)
    cuda.attend(operands.q, operands.latents, operands.cache, plan, operands.expansion, operands.scale, out)
    others = [*range(30), *range(50, 83)]
    torch.testing.assert_close(out[others], want[others], rtol=1e-5, atol=1e-5)
    assert out[30:50].isnan().all()


@pytest.mark.parametrize(("rank", "rope", "name"), [(48, 16, "kv_lora_rank"), (32, 8, "qk_rope_head_dim")])
def test_widths_that_the_kernels_do_not_have_are_named(rank: int, rope: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        cuda.check_widths(Expansion(torch.empty(2, 32, rank), 16), rope)
