"""The CUDA path of attention against its reference: however work is cut, with NaN in every slot that must not be read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.device import DEVICE, HALF_DTYPES, ON_GPU, poisoned, randn, requires_gpu

from lockstep_kernels import attention as op  # isort: skip
from lockstep_kernels.attention import PagedBatch, cuda, reference  # isort: skip

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
SPLIT = cuda.Split(processors=5, keys=16, resident=1, cut=0, stages=2)
TILINGS = (
    cuda.Tiling(16, 16, 4, 2, described=False),
    cuda.Tiling(32, 16, 4, 2, described=True, parts=2),
    cuda.Tiling(32, 16, 4, 2, described=False, parts=2),
)
LONG = 20 if ON_GPU else 1  # sequences are this much longer where they cost nothing


@dataclass(frozen=True)
class Heads:
    kv_heads: int
    group: int
    width: int


@dataclass(frozen=True)
class Operands:
    """A pass over `spans` (first new position, length) of sequences; the cache is NaN wherever nothing was stored."""

    heads: Heads
    spans: tuple[tuple[int, int], ...]
    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    block_size: int
    kv_scale: tuple[torch.Tensor, torch.Tensor] | None = None

    def batch(self, **device: Any) -> PagedBatch:
        known = not device or device.pop("known", False)
        new, lens = tuple(end - start for start, end in self.spans), tuple(end for _, end in self.spans)
        return PagedBatch(new if known else (), lens if known else (), self.table, self.block_size, **device)

    def decode_batch(self, bound: int = 0) -> PagedBatch:
        lens = torch.tensor([end for _, end in self.spans], device=DEVICE)
        return self.batch(lens=lens, max_seq_len=bound or max(end for _, end in self.spans))

    def expected(self) -> torch.Tensor:
        out = torch.empty(len(self.q), self.heads.kv_heads * self.heads.group * self.heads.width, device=DEVICE)
        reference.attention(self.q, self.cache, self.batch(), self.heads.width**-0.5, out, self.kv_scale)
        return out

    def run(self, batch: PagedBatch, *, deterministic: bool = False, **shapes: Any) -> torch.Tensor:
        """Of the CUDA path; checks that it writes the rows it should."""
        h = self.heads
        plan = cuda.prepare(
            batch,
            group=h.group,
            kv_heads=h.kv_heads,
            head_dim=h.width,
            dtype=self.cache.dtype,
            device=DEVICE,
            deterministic=deterministic,
            new_kv=False,
            **shapes,
        )
        out = poisoned(len(self.q) + 1, h.kv_heads * h.group * h.width, dtype=self.q.dtype)
        for _ in range(2):  # layers share a plan
            cuda.attention(self.q, self.cache, plan, h.width**-0.5, out, None, self.kv_scale)
        assert out[-1].isnan().all(), "wrote past the last token"
        return out[:-1]

    def check(self, out: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(out.float(), self.expected(), rtol=tolerance, atol=tolerance)


def make(
    heads: Heads, spans: tuple[tuple[int, int], ...], block_size: int, dtype: torch.dtype, seed: int = 0, spare: int = 0
) -> Operands:
    """`spare` further columns of the block table lead nowhere."""
    widths = [-(-end // block_size) for _, end in spans]
    ids = (torch.randperm(sum(widths), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    cache = poisoned(sum(widths) + 1, 2, heads.kv_heads, block_size, heads.width, dtype=dtype)
    table = torch.zeros(len(spans), max(widths) + spare, dtype=torch.int64, device=DEVICE)
    for i, (width, (_, end)) in enumerate(zip(widths, spans, strict=True)):
        table[i, :width] = torch.tensor([ids.pop() for _ in range(width)])
        positions = torch.arange(end, device=DEVICE)
        kv = randn(end, 2, heads.kv_heads, heads.width, dtype=dtype, seed=seed + i + 1)
        cache[table[i, positions // block_size], :, :, positions % block_size] = kv
    tokens = sum(end - start for start, end in spans)
    room = randn(tokens, heads.kv_heads * (heads.group + 2), heads.width, dtype=dtype, seed=seed) * 2
    return Operands(heads, spans, room[:, : heads.kv_heads * heads.group], cache, table, block_size)


def in_8_bits(operands: Operands) -> Operands:
    """The same with a cache of float8_e4m3fn, a scale a head; what was NaN is NaN."""
    h = operands.heads.kv_heads
    scales = (randn(h, seed=7).abs() + 0.2) / 100, (randn(h, seed=8).abs() + 0.2) / 100
    by_plane = torch.stack(scales)[None, :, :, None, None]
    cache = (operands.cache.float() / by_plane).clamp(-448, 448).to(torch.float8_e4m3fn)
    return replace(operands, cache=cache, kv_scale=scales)


def captured_batch(operands: Operands, extra: int) -> PagedBatch:
    """The same pass with lengths on the device alone, and `extra` rows that belong to no sequence."""
    new = torch.tensor([0, *(end - start for start, end in operands.spans)], device=DEVICE)
    lens = torch.tensor([end for _, end in operands.spans], device=DEVICE)
    return operands.batch(lens=lens, query_starts=new.cumsum(0), tokens=len(operands.q) + extra)


HEADS = st.sampled_from(
    [Heads(2, 4, 16), Heads(3, 3, 16), Heads(1, 8, 32), Heads(2, 1, 16), Heads(1, 16, 16), Heads(1, 2, 24)]
)
DTYPES = st.sampled_from([*HALF_DTYPES, torch.float32])
LENGTHS = st.one_of(st.sampled_from([1, 15, 16, 17, 31, 32, 33, 48]), st.integers(1, 50)).map(lambda n: n * LONG)
QUICK = settings(max_examples=40 if ON_GPU else 8, deadline=None)


def test_each_pair_has_a_program_of_its_own_where_they_are_a_few_more_than_fit_at_a_time() -> None:
    device = torch.device("cuda", 7)  # that no other test asks for
    with mock.patch.object(torch.cuda, "get_device_properties", lambda _: mock.Mock(multi_processor_count=132)):
        for pairs in range(1, 3000, 13):
            split = cuda.choose_split(pairs, 128, torch.bfloat16, device, False)
            assert (split.programs >= pairs) == (pairs <= 8 * 132)
            assert cuda.choose_split(pairs, 128, torch.bfloat16, device, True).fixed, (
                "bits must not depend on the batch"
            )
            fixed = {cuda.choose_split(p, 128, torch.bfloat16, device, True) for p in (1, pairs)}
            assert len(fixed) == 1 and split.registers * split.keys <= 168 * 64


@QUICK
@given(
    heads=HEADS,
    dtype=DTYPES,
    lengths=st.lists(LENGTHS, min_size=1, max_size=4),
    block_size=st.sampled_from([16, 32, 64]),
    processors=st.sampled_from([1, 3, 20] if ON_GPU else [1, 3, 7]),
    resident=st.sampled_from([1, 2, 3, 8]),
    cut=st.integers(0, 4),
    whole=st.booleans(),
    keys=st.sampled_from([16, 32]),
    far=st.booleans(),
)
def test_decode(
    heads: Heads,
    dtype: torch.dtype,
    lengths: list[int],
    block_size: int,
    processors: int,
    resident: int,
    cut: int,
    whole: bool,
    keys: int,
    far: bool,
) -> None:
    operands = make(heads, tuple((n - 1, n) for n in lengths), block_size, dtype, spare=3 * far)
    bound = operands.table.shape[1] * block_size if far else 0
    out = operands.run(operands.decode_batch(bound), split=cuda.Split(processors, keys, resident, cut, whole))
    operands.check(out)


@QUICK
@given(
    heads=HEADS,
    dtype=DTYPES,
    spans=st.lists(st.tuples(LENGTHS, st.integers(1, 40)), min_size=1, max_size=3),
    block_size=st.sampled_from([16, 32, 64]),
    tiling=st.sampled_from(TILINGS),
)
def test_prefill(
    heads: Heads, dtype: torch.dtype, spans: list[tuple[int, int]], block_size: int, tiling: cuda.Tiling
) -> None:
    chunks = tuple((max(0, end - new), end) for end, new in spans)
    if heads.width % 16:
        tiling = replace(tiling, described=False)
    operands = make(heads, chunks, block_size, dtype)
    operands.check(operands.run(operands.batch(), tiling=tiling))


@QUICK
@given(
    heads=HEADS,
    spans=st.lists(st.tuples(LENGTHS, st.integers(0, 30)), min_size=1, max_size=3).filter(
        lambda x: any(n for _, n in x)
    ),
    tiling=st.sampled_from(TILINGS),
    extra=st.sampled_from([0, 1, 20]),
)
def test_captured_prefill(heads: Heads, spans: list[tuple[int, int]], tiling: cuda.Tiling, extra: int) -> None:
    """Bit for bit what the same pass is with lengths on the host; sequences without new tokens and spare rows are nothing."""
    chunks = tuple((max(0, end - new), end) for end, new in spans)
    if heads.width % 16:
        tiling = replace(tiling, described=False)
    operands = make(heads, chunks, 16, torch.bfloat16)
    there = [i for i, (start, end) in enumerate(chunks) if start < end]
    known = replace(operands, spans=tuple(chunks[i] for i in there), table=operands.table[there])
    padded = replace(operands, q=torch.cat((operands.q, poisoned(extra, *operands.q.shape[1:], dtype=torch.bfloat16))))
    out = padded.run(captured_batch(operands, extra), tiling=tiling)
    assert torch.equal(out[: len(operands.q)], known.run(known.batch(), tiling=tiling))
    assert not out[len(operands.q) :].any()


@QUICK
@given(
    spans=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 60)), min_size=1, max_size=9),
    extra=st.integers(0, 40),
    rows=st.sampled_from([32, 64, 128]),
)
def test_tasks_found_on_the_device_are_those_of_the_host(spans: list[tuple[int, int]], extra: int, rows: int) -> None:
    chunks = tuple((max(0, end - new), end) for end, new in spans)
    group, tokens = 3, sum(end - start for start, end in chunks)
    table = torch.ones(len(chunks), 13, dtype=torch.int64, device=DEVICE)
    operands = Operands(Heads(1, group, 16), chunks, poisoned(tokens, group, 16), poisoned(0), table, 16)
    there = [i for i, (start, end) in enumerate(chunks) if start < end]
    known = replace(operands, spans=tuple(chunks[i] for i in there), table=table[there])
    tiling = cuda.Tiling(rows, 16, 4, 2, described=False)

    def tasks(batch: PagedBatch) -> list[list[int]]:
        options: dict[str, Any] = {"deterministic": False, "new_kv": True, "dtype": torch.bfloat16, "device": DEVICE}
        plan = cuda.prepare(batch, group=group, kv_heads=1, head_dim=16, tiling=tiling, **options)
        assert isinstance(plan, cuda.PrefillPlan) and not plan.dense
        return plan.tasks.tolist()

    if tokens + extra == 0:
        return
    found = tasks(captured_batch(operands, extra))
    want = [[*task[:3], there[task[3]]] for task in tasks(known.batch())]
    assert found[: len(want)] == want
    each = rows // group
    spare = [(tokens + start, min(each, extra - start)) for start in range(0, extra, each)]
    rest = sorted(found[len(want) : len(want) + len(spare)])
    assert rest == [[first, -count, count, 0] for first, count in spare]
    assert not any(count for _, _, count, _ in found[len(want) + len(spare) :])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("heads", [Heads(2, 4, 16), Heads(3, 1, 32)])
def test_a_cache_of_8_bits(heads: Heads, dtype: torch.dtype) -> None:
    decode = in_8_bits(make(heads, ((39, 40), (6, 7)), 16, dtype))
    decode.check(decode.run(decode.decode_batch(), split=SPLIT))
    prefill = in_8_bits(make(heads, ((0, 9), (20, 41)), 32, dtype))
    for tiling in TILINGS:
        prefill.check(prefill.run(prefill.batch(), tiling=tiling))


def test_a_sequence_that_is_none_becomes_zeros_and_spoils_no_other() -> None:
    operands = make(Heads(2, 2, 16), ((0, 1), (39, 40), (0, 1)), 16, torch.bfloat16)
    lens = torch.tensor([0, 40, 0], device=DEVICE)
    out = operands.run(operands.batch(lens=lens, max_seq_len=40), split=SPLIT)
    assert not out[0].any() and not out[2].any()
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(out[1].float(), operands.expected()[1], rtol=tolerance, atol=tolerance)


def test_lengths_beyond_the_bound_are_cut() -> None:
    operands = make(Heads(1, 2, 16), ((19, 20), (31, 32)), 16, torch.float32)
    lens = torch.tensor([20, 10**12], device=DEVICE)
    operands.check(operands.run(operands.batch(lens=lens, max_seq_len=32), split=SPLIT))


@pytest.mark.parametrize("decode", [True, False])
def test_a_sequence_with_nan_spoils_no_other(decode: bool) -> None:
    operands = make(Heads(2, 2, 16), ((29, 30), (30, 31)), 16, torch.float32)
    operands.cache[operands.table[0, 0], :, :, 3] = torch.nan
    shapes: dict[str, Any] = {"split": SPLIT} if decode else {"tiling": TILINGS[1]}
    out = operands.run(operands.decode_batch() if decode else operands.batch(), **shapes)
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1], operands.expected()[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_decode_depends_on_the_sequence_alone(dtype: torch.dtype) -> None:
    heads, lengths = Heads(2, 3, 16), [70 * LONG, 1, 33 * LONG, 100 * LONG]
    operands = make(heads, tuple((n - 1, n) for n in lengths), 16, dtype, spare=2)
    split = cuda.Split(processors=3, keys=16, resident=1, fixed=2, most=3, stages=2)
    together = operands.run(operands.decode_batch(), deterministic=True, split=split)
    operands.check(together)
    for i, n in enumerate(lengths):
        part = slice(i, i + 1)
        alone = replace(operands, spans=((n - 1, n),), q=operands.q[part], table=operands.table[part])
        bound = alone.table.shape[1] * 16
        out = alone.run(alone.decode_batch(bound), deterministic=True, split=replace(split, processors=7))
        assert torch.equal(out[0], together[i])


@pytest.mark.parametrize("tiling", TILINGS)
def test_prefill_does_not_depend_on_how_a_prompt_is_cut(tiling: cuda.Tiling) -> None:
    n = 50 * LONG
    whole = make(Heads(1, 3, 16), ((0, n),), 16, torch.bfloat16)
    want = whole.run(whole.batch(), tiling=tiling)
    for start, end in ((0, 7), (7, 23), (23, 24), (24, n)):
        part = replace(whole, spans=((start, end),), q=whole.q[start:end])
        assert torch.equal(part.run(part.batch(), tiling=tiling), want[start:end])


def test_dense_parts_are_neighbours_of_one_length_without_a_prefix() -> None:
    lens = (100, 1100, 1100, 2048, 1500, 1024)  # the fifth has a prefix
    new = (100, 1100, 1100, 2048, 1000, 1024)
    batch = PagedBatch(new, lens, torch.ones(6, 32, dtype=torch.int64), 64)
    plan = cuda.prepare(
        batch,
        group=4,
        kv_heads=1,
        head_dim=64,
        dtype=torch.bfloat16,
        device=DEVICE,
        deterministic=False,
        new_kv=True,
    )
    assert isinstance(plan, cuda.PrefillPlan)
    assert plan.dense == (
        cuda.Dense(100, 2, 1100, 1024),
        cuda.Dense(2300, 1, 2048, 2048),
        cuda.Dense(5348, 1, 1024, 1024),
    )
    left = sorted((first, position, tokens, i) for first, position, tokens, i in plan.tasks.tolist())
    covered = [(i, position + t) for _, position, tokens, i in left for t in range(tokens)]
    tails = [(0, range(100)), (1, range(1024, 1100)), (2, range(1024, 1100)), (4, range(500, 1500))]
    assert covered == [(i, position) for i, positions in tails for position in positions]
    assert all(first == sum(new[:i]) + position - (lens[i] - new[i]) for first, position, _, i in left)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 20), (torch.bfloat16, 136), (torch.float16, 256)]
)
def test_what_cudnn_has_no_kernel_for_is_not_given_to_it(dtype: torch.dtype, head_dim: int) -> None:
    batch = PagedBatch((2048,), (2048,), torch.ones(1, 32, dtype=torch.int64), 64)
    plan = cuda.prepare(
        batch,
        group=1,
        kv_heads=1,
        head_dim=head_dim,
        dtype=dtype,
        device=DEVICE,
        deterministic=False,
        new_kv=True,
    )
    assert isinstance(plan, cuda.PrefillPlan) and not plan.dense
    assert sum(tokens for _, _, tokens, _ in plan.tasks.tolist()) == 2048


def test_decode_steps_with_bad_lengths_are_refused() -> None:
    table, lens = torch.ones(2, 2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="up to 33 positions do not fit"):
        PagedBatch((), (), table, 16, lens, 33)
    with pytest.raises(ValueError, match=r"lens has shape \(1,\), expected \(2,\)"):
        PagedBatch((), (), table, 16, lens[:1], 32)
    with pytest.raises(ValueError, match="one new token a sequence"):
        PagedBatch((1, 2), (1, 2), table, 16, lens, 32)
    with pytest.raises(ValueError, match="disagree about the number of sequences"):
        PagedBatch((), (), table, 16)
    with pytest.raises(ValueError, match=r"query_starts has shape \(2,\), expected \(3,\)"):
        PagedBatch((), (), table, 16, lens, query_starts=lens, tokens=2)
    with pytest.raises(ValueError, match="a captured prefill pass has lens, query_starts and tokens"):
        PagedBatch((1, 1), (1, 1), table, 16, lens, query_starts=torch.arange(3), tokens=2)
    with pytest.raises(ValueError, match="attention on cpu needs the lengths on the host"):
        op.prepare(
            PagedBatch((), (), table, 16, lens, 32),
            heads=2,
            kv_heads=1,
            head_dim=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


@requires_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [Heads(8, 4, 128), Heads(4, 8, 128), Heads(3, 3, 64)])
@pytest.mark.parametrize(
    "lengths", [(1, 63, 64, 1000, 4097, 20_000, 129, 640), (384,), (1024,), (30_000,), (1088,) * 64, (200,) * 150]
)
def test_decode_of_real_shapes(heads: Heads, deterministic: bool, lengths: tuple[int, ...]) -> None:
    for block_size in (16, 64):
        operands = make(heads, tuple((n - 1, n) for n in lengths), block_size, torch.bfloat16, spare=5)
        bound = operands.table.shape[1] * block_size
        operands.check(operands.run(operands.decode_batch(bound), deterministic=deterministic))


@requires_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [Heads(8, 4, 128), Heads(4, 8, 128), Heads(3, 3, 64)])
def test_prefill_of_real_shapes(heads: Heads) -> None:
    spans = ((0, 700), (1000, 1001), (333, 2345), (0, 64), (5000, 5100), (0, 1))
    for block_size in (16, 64):
        operands = make(heads, spans, block_size, torch.bfloat16)
        operands.check(operands.run(operands.batch()))


@requires_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [Heads(8, 4, 128), Heads(3, 3, 64)])
@pytest.mark.parametrize("lengths", [(2048, 2048), (1100, 1100, 300, 1024)])
def test_prefill_with_new_keys_and_values_as_given(heads: Heads, lengths: tuple[int, ...]) -> None:
    operands = make(heads, tuple((0, n) for n in lengths), 64, torch.bfloat16)
    stored = []
    for i, n in enumerate(lengths):
        positions = torch.arange(n, device=DEVICE)
        stored.append(operands.cache[operands.table[i, positions // 64], :, :, positions % 64])
    k, v = torch.cat(stored).unbind(1)
    prepared = op.prepare(
        operands.batch(),
        heads=heads.kv_heads * heads.group,
        kv_heads=heads.kv_heads,
        head_dim=heads.width,
        dtype=torch.bfloat16,
        device=DEVICE,
        new_kv=True,
    )
    out = op.attention(operands.q, operands.cache, prepared, scale=heads.width**-0.5, new_kv=(k, v))
    operands.check(out)
    given = poisoned(len(out) + 1, out.shape[1], dtype=torch.bfloat16)
    op.attention(operands.q, operands.cache, prepared, scale=heads.width**-0.5, out=given, new_kv=(k, v))
    assert torch.equal(given[:-1], out) and given[-1].isnan().all()
    with pytest.raises(ValueError, match="they are not given"):
        op.attention(operands.q, operands.cache, prepared, scale=1.0)


@requires_gpu
@pytest.mark.gpu
def test_a_captured_step_follows_the_lengths_on_the_device() -> None:
    heads = Heads(8, 4, 128)
    operands = make(heads, tuple((n - 1, n) for n in (3000, 500, 70)), 64, torch.bfloat16, spare=100)
    lens = torch.ones(3, dtype=torch.int64, device=DEVICE)
    batch = operands.batch(lens=lens, max_seq_len=operands.table.shape[1] * 64)
    operands.run(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared = op.prepare(batch, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(3):
            out = op.attention(operands.q, operands.cache, prepared, scale=128**-0.5)
    for lengths in ((3000, 500, 70), (1, 400, 0), (2999, 64, 65)):
        lens.copy_(torch.tensor(lengths))
        graph.replay()
        expected = replace(operands, spans=tuple((max(n, 1) - 1, max(n, 1)) for n in lengths)).expected()
        expected[[i for i, n in enumerate(lengths) if n == 0]] = 0
        torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)


@requires_gpu
@pytest.mark.gpu
def test_a_captured_prefill_pass_follows_the_lengths_on_the_device() -> None:
    heads, tokens = Heads(8, 4, 128), 1024
    operands = make(heads, ((0, 3000), (0, 900), (0, 70)), 64, torch.bfloat16)
    q = randn(tokens, heads.kv_heads * heads.group, heads.width, dtype=torch.bfloat16)
    lens = torch.ones(3, dtype=torch.int64, device=DEVICE)
    starts = torch.arange(4, device=DEVICE)
    batch = operands.batch(lens=lens, query_starts=starts, tokens=tokens)
    operands = replace(operands, q=q)
    operands.run(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared = op.prepare(batch, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(3):
            out = op.attention(q, operands.cache, prepared, scale=128**-0.5)
    for spans in (((2100, 3000), (0, 100), (46, 70)), ((5, 5), (0, 900), (0, 1)), ((2999, 3000), (899, 900), (69, 70))):
        new = [end - start for start, end in spans]
        lens.copy_(torch.tensor([end for _, end in spans]))
        starts.copy_(torch.tensor([0, *new]).cumsum(0))
        graph.replay()
        there = [i for i in range(3) if new[i]]
        known = replace(operands, spans=tuple(spans[i] for i in there), table=operands.table[there], q=q[: sum(new)])
        torch.testing.assert_close(out[: sum(new)].float(), known.expected(), rtol=2**-7, atol=2**-7)
        assert not out[sum(new) :].any()
