"""What context parallelism needs of latent attention's CUDA path: its steps one by one, log-sum-exp, and keys that are all earlier."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.device import DEVICE, ON_GPU, poisoned, randn
from tests.kernels.test_mla_kernel import DTYPES, EPS, LONG, SHAPES, TOLERANCE, Operands, Shape, make

from lockstep_kernels.mla import LatentBatch, cuda, parts, reference  # isort: skip

QUICK = settings(max_examples=25 if ON_GPU else 4, deadline=None)
TILING = cuda.Tiling(32, 32, 4, 2)
LENGTHS = st.one_of(st.sampled_from([0, 1, 31, 32, 33]), st.integers(0, 70)).map(lambda n: n * LONG)


def stored(operands: Operands) -> Operands:
    """The same with the new latents in the cache, and queries that are finished; by the reference."""
    p = operands.prepared
    reference.store(
        operands.q, operands.latents, operands.norm.gain, EPS, p.cos, p.sin, operands.cache, p.slots, p.interleaved
    )
    return operands


def room(operands: Operands, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shape = operands.shape
    return poisoned(tokens + 1, shape.heads * shape.value, dtype=dtype), poisoned(tokens + 1, shape.heads)


def check(
    operands: Operands, q: torch.Tensor, batch: LatentBatch, got: tuple[torch.Tensor, torch.Tensor], lse: float = 1e-4
) -> None:
    out, own_lse = room(operands, len(q), torch.float32)
    reference.attention(q, operands.cache, batch, operands.expansion, operands.scale, out, own_lse)
    assert got[0][-1].isnan().all() and got[1][-1].isnan().all(), "wrote past the last token"
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(got[0][:-1].float(), out[:-1], rtol=tolerance, atol=tolerance)
    lse = (
        tolerance if q.dtype.itemsize == 2 else lse
    )  # queries are rounded once they are absorbed, keys once they are expanded
    torch.testing.assert_close(got[1][:-1], own_lse[:-1], rtol=lse, atol=lse)


@pytest.mark.parametrize("many", [False, True])
@QUICK
@given(
    shape=st.sampled_from(SHAPES),
    dtype=DTYPES,
    lengths=st.lists(LENGTHS, min_size=1, max_size=3),
    block_size=st.sampled_from([16, 64]),
    programs=st.sampled_from([1, 3, 9]),
)
def test_decode(
    many: bool, shape: Shape, dtype: torch.dtype, lengths: list[int], block_size: int, programs: int
) -> None:
    """Of finished queries, some of whose sequences have no key here."""
    operands = stored(make(shape, tuple((max(n, 1) - 1, max(n, 1)) for n in lengths), block_size, dtype))
    lens = torch.tensor(lengths, device=DEVICE)
    split = cuda.Split(programs, 16, 32, 1, warps=4, stages=2)
    plan = cuda.plan_decode(lens, operands.table, block_size, operands.expansion, split)
    out, lse = room(operands, len(lengths), torch.float32)
    absorbed = parts.absorb(operands.q, operands.expansion)
    number = 1 if many else 99
    cuda.decode(
        operands.q, absorbed, operands.cache, plan, operands.expansion, operands.scale, out, many=number, lse=lse[:-1]
    )
    batch = LatentBatch(True, (1,) * len(lengths), tuple(lengths), lens, operands.table, block_size)
    check(operands, operands.q, batch, (out, lse))
    assert all(not out[i].any() and (lse[i] == -torch.inf).all() for i, n in enumerate(lengths) if n == 0)


@pytest.mark.parametrize("causal", [False, True])
@QUICK
@given(
    shape=st.sampled_from(SHAPES),
    dtype=DTYPES,
    spans=st.lists(st.tuples(LENGTHS, st.integers(1, 40)), min_size=1, max_size=3),
    block_size=st.sampled_from([16, 64]),
    piece=st.sampled_from([17, 64, 1000]),
    rounded=st.booleans(),
)
def test_prompts_whose_keys_all_lie_in_a_cache(
    causal: bool,
    shape: Shape,
    dtype: torch.dtype,
    spans: list[tuple[int, int]],
    block_size: int,
    piece: int,
    rounded: bool,
) -> None:
    """Chunks that end with their sequence, or pieces of what is before them, expanded a few positions at a time."""
    chunks = tuple((max(0, n - new), max(n, 1)) if causal else (0, max(n, 1)) for n, new in spans)
    operands = stored(make(shape, chunks, block_size, dtype))
    q, batch = operands.q, operands.batch(decode=False)
    if not causal:
        new, lens = tuple(new for _, new in spans), tuple(n for n, _ in spans)
        batch = LatentBatch(
            False, new, lens, torch.tensor(lens, device=DEVICE), operands.table, block_size, causal=False
        )
        q = randn(sum(new), *q.shape[1:], dtype=dtype, seed=5)
    plan = parts.plan_keys(
        batch, operands.expansion, dtype, cuda.choose_tiling(dtype) if ON_GPU else TILING, piece * LONG
    )
    out, lse = room(operands, len(q), dtype if rounded else torch.float32)
    parts.attend(q, operands.cache, plan, operands.expansion, operands.scale, out[:-1], lse[:-1])
    check(operands, q, batch, (out, lse))


@pytest.mark.parametrize("before", [0, 40])
def test_prompts_as_a_whole_with_their_lse(before: int) -> None:
    """What `attention` does of prompts, whose new keys do not come from the cache."""
    operands = make(SHAPES[0], ((before, before + 35),), 16, torch.float32)
    batch = operands.batch(decode=False)
    plan = cuda.plan_prompts(batch, operands.expansion, torch.float32, TILING, 30)
    stored(operands)
    out, lse = room(operands, 35, torch.float32)
    cuda.attend(operands.q, operands.latents, operands.cache, plan, operands.expansion, operands.scale, out, lse[:-1])
    check(operands, operands.q, batch, (out, lse))


@QUICK
@given(shape=st.sampled_from(SHAPES), dtype=DTYPES, tokens=st.integers(1, 9), interleaved=st.booleans())
def test_latents_and_queries_are_finished_alone(
    shape: Shape, dtype: torch.dtype, tokens: int, interleaved: bool
) -> None:
    operands = make(shape, ((0, tokens),), 16, dtype, interleaved=interleaved)
    p = operands.prepared
    want_q, want_latents = operands.q.clone(), operands.latents.clone()
    reference.finish_latents(want_latents, operands.norm.gain, EPS, p.cos, p.sin, interleaved)
    reference.rotate_queries(want_q, p.cos, p.sin, interleaved)
    before = operands.q.clone()
    parts.finish_latents(operands.latents, operands.norm, p.cos, p.sin, interleaved)
    assert torch.equal(operands.q, before)
    parts.rotate_queries(operands.q, p.cos, p.sin, interleaved)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(operands.latents, want_latents, rtol=tolerance, atol=tolerance / 4)
    torch.testing.assert_close(operands.q, want_q, rtol=tolerance, atol=tolerance / 4)
