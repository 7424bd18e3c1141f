"""What context parallelism needs of the CUDA path: log-sum-exp, keys that are all earlier, parts without keys, and their merge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import splits
from tests.kernels.device import DEVICE, HALF_DTYPES, ON_GPU, poisoned, randn, requires_gpu

from lockstep_kernels import attention as op  # isort: skip
from lockstep_kernels.attention import PagedBatch, cuda, reference  # isort: skip
from lockstep_kernels.merge import kernel as merging, merge, reference as merge_reference  # isort: skip
from tests.kernels import test_attention_kernel as gqa  # isort: skip

HEADS = st.sampled_from([gqa.Heads(2, 4, 16), gqa.Heads(3, 3, 16), gqa.Heads(1, 2, 24)])
DTYPES = st.sampled_from([*HALF_DTYPES, torch.float32])
LENGTHS = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 32, 33]), st.integers(0, 50)).map(lambda n: n * gqa.LONG)
QUICK = settings(max_examples=30 if ON_GPU else 4, deadline=None)
FEW = settings(max_examples=20 if ON_GPU else 3, deadline=None)  # as each takes seconds in the interpreter
SPLITS = st.builds(
    cuda.Split,
    processors=st.sampled_from([1, 3, 7]),
    keys=st.just(16),
    resident=st.integers(1, 2),
    cut=st.integers(0, 4),
    whole=st.booleans(),
    fixed=st.sampled_from([0, 2]),
    most=st.just(3),
    stages=st.just(2),
)


def run(
    operands: gqa.Operands, batch: PagedBatch, split: cuda.Split | None = None, tiling: cuda.Tiling | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out float32, lse) of the CUDA path, which writes the rows that it should."""
    h = operands.heads
    plan = cuda.prepare(
        batch,
        group=h.group,
        kv_heads=h.kv_heads,
        head_dim=h.width,
        dtype=operands.cache.dtype,
        device=DEVICE,
        deterministic=split is not None and split.fixed > 0,
        new_kv=False,
        split=split,
        tiling=tiling,
    )
    tokens, heads = len(operands.q), h.kv_heads * h.group
    out, lse = poisoned(tokens + 1, heads * h.width), poisoned(tokens + 1, heads)
    cuda.attention(operands.q, operands.cache, plan, h.width**-0.5, out, None, operands.kv_scale, lse[:-1])
    assert out[-1].isnan().all() and lse[-1].isnan().all(), "wrote past the last token"
    return out[:-1], lse[:-1]


def check(operands: gqa.Operands, batch: PagedBatch, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Against the reference, of a batch whose lengths the host knows."""
    heads = operands.heads.kv_heads * operands.heads.group
    out = torch.empty(len(operands.q), heads * operands.heads.width, device=DEVICE)
    lse = torch.empty(len(out), heads, device=DEVICE)
    scale = operands.heads.width**-0.5
    reference.attention(operands.q, operands.cache, batch, scale, out, operands.kv_scale, lse)
    tolerance = gqa.TOLERANCE[operands.q.dtype]
    torch.testing.assert_close(got[0], out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1], lse, rtol=2e-5, atol=2e-5)


@QUICK
@given(
    heads=HEADS,
    dtype=DTYPES,
    lengths=st.lists(LENGTHS, min_size=1, max_size=4),
    block_size=st.sampled_from([16, 64]),
    split=SPLITS,
)
def test_decode(heads: gqa.Heads, dtype: torch.dtype, lengths: list[int], block_size: int, split: cuda.Split) -> None:
    """The host does not know which sequences have no key here."""
    operands = gqa.make(heads, tuple((max(n, 1) - 1, max(n, 1)) for n in lengths), block_size, dtype)
    bound = operands.table.shape[1] * block_size
    batch = PagedBatch((), (), operands.table, block_size, torch.tensor(lengths, device=DEVICE), bound)
    known = PagedBatch((1,) * len(lengths), tuple(lengths), operands.table, block_size)
    check(operands, known, run(operands, batch, split))


@pytest.mark.parametrize("causal", [False, True])
@QUICK
@given(
    heads=HEADS,
    dtype=DTYPES,
    spans=st.lists(st.tuples(LENGTHS, st.integers(1, 40)), min_size=1, max_size=3),
    block_size=st.sampled_from([16, 64]),
    tiling=st.sampled_from(gqa.TILINGS),
)
def test_prefill(
    causal: bool,
    heads: gqa.Heads,
    dtype: torch.dtype,
    spans: list[tuple[int, int]],
    block_size: int,
    tiling: cuda.Tiling,
) -> None:
    """Chunks that end with their sequence, or pieces of what is before them, of which there may be nothing."""
    if heads.width % 16:
        tiling = replace(tiling, described=False)
    chunks = tuple((max(0, n - new), max(n, 1)) if causal else (0, max(n, 1)) for n, new in spans)
    operands = gqa.make(heads, chunks, block_size, dtype)
    batch = operands.batch()
    if not causal:
        new = tuple(new for _, new in spans)
        batch = PagedBatch(new, tuple(n for n, _ in spans), operands.table, block_size, causal=False)
        operands = replace(operands, q=2 * randn(sum(new), heads.kv_heads * heads.group, heads.width, dtype=dtype))
    check(operands, batch, run(operands, batch, tiling=tiling))


def test_a_captured_prefill_pass() -> None:
    """Rows that belong to no sequence have no key."""
    operands = gqa.make(gqa.Heads(2, 3, 16), ((0, 9), (13, 17)), 16, torch.bfloat16)
    padded = replace(operands, q=torch.cat((operands.q, poisoned(9, *operands.q.shape[1:], dtype=torch.bfloat16))))
    out, lse = run(padded, gqa.captured_batch(operands, 9), tiling=gqa.TILINGS[1])
    check(operands, operands.batch(), (out[:13], lse[:13]))
    assert not out[13:].any() and (lse[13:] == -torch.inf).all()


def test_a_cache_of_8_bits() -> None:
    operands = gqa.in_8_bits(gqa.make(gqa.Heads(2, 4, 16), ((39, 40), (6, 7)), 16, torch.bfloat16))
    check(operands, operands.batch(), run(operands, operands.decode_batch(), gqa.SPLIT))
    check(operands, operands.batch(), run(operands, operands.batch(), tiling=gqa.TILINGS[0]))


def test_there_is_no_lse_of_what_cudnn_attends_to() -> None:
    operands = gqa.make(gqa.Heads(1, 1, 16), ((0, 512),), 64, torch.bfloat16)
    shape = {"group": 1, "kv_heads": 1, "head_dim": 16, "dtype": torch.bfloat16, "device": DEVICE}
    plan = cuda.prepare(operands.batch(), **shape, deterministic=False, new_kv=True)  # type: ignore[arg-type]
    kv = operands.q, operands.q
    with pytest.raises(ValueError, match="no log-sum-exp of a pass that was prepared for new keys"):
        cuda.attention(operands.q, operands.cache, plan, 0.25, None, kv, None, poisoned(512, 1))


@QUICK
@given(
    parts=st.integers(1, 5),
    tokens=st.integers(0, 200 if ON_GPU else 9),
    heads=st.integers(1, 5),
    width=st.sampled_from([1, 24, 64, 128, 192]),
    dtypes=st.tuples(DTYPES, DTYPES),
    absent=st.floats(0, 1),
    in_place=st.booleans(),
)
def test_merge(
    parts: int,
    tokens: int,
    heads: int,
    width: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    absent: float,
    in_place: bool,
) -> None:
    """Of parts that one gather has laid out, each rank's out and then its lse; those without keys are NaN."""
    dtype, out_dtype = dtypes[0], dtypes[0] if in_place else dtypes[1]
    lses = 3 * randn(parts, tokens, heads, seed=1)
    lses[randn(parts, tokens, heads, seed=2).sigmoid() < absent] = -torch.inf
    room = poisoned(parts, 2 * tokens * heads * width, dtype=dtype)
    outs = room[:, : tokens * heads * width].view(parts, tokens, heads, width)
    outs.copy_(randn(parts, tokens, heads, width, seed=3).where(lses.unsqueeze(-1) > -torch.inf, torch.nan))
    lse_room = poisoned(parts, 2 * tokens * heads)
    own_lses = lse_room[:, : tokens * heads].view(parts, tokens, heads)
    own_lses.copy_(lses)
    want = torch.empty(tokens, heads, width, device=DEVICE), torch.empty(tokens, heads, device=DEVICE)
    merge_reference.merge(outs, lses, *want)
    wide = poisoned(tokens, heads * width + 3, dtype=out_dtype)
    out, lse = wide[:, : heads * width].view(tokens, heads, width), poisoned(tokens, heads)
    if in_place:
        out, lse = outs[-1], own_lses[-1]
    merging.merge(outs, own_lses, out, lse)
    tolerance = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[out_dtype]
    torch.testing.assert_close(out.float(), want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, want[1], rtol=2e-6, atol=2e-6)
    assert wide[:, heads * width :].isnan().all()


@FEW
@given(
    lengths=st.lists(LENGTHS.filter(bool), min_size=1, max_size=2),
    ranks=st.integers(1, 4),
    size=st.sampled_from([16, 32]),
)
def test_keys_dealt_out_among_ranks(lengths: list[int], ranks: int, size: int) -> None:
    """Decode by the kernels, merged by the kernel, is attention to all keys in float64."""
    h = gqa.Heads(2, 3, 16)
    heads = h.kv_heads * h.group
    whole = [randn(n, 2, h.kv_heads, h.width, seed=i + 1) for i, n in enumerate(lengths)]
    q = randn(len(lengths), heads, h.width)
    widths = [-(-n // (size * ranks)) for n in lengths]
    table = torch.zeros(len(lengths), max(widths), dtype=torch.int64, device=DEVICE)
    for i, width in enumerate(widths):
        table[i, :width] = torch.arange(width) + 1 + sum(widths[:i])
    outs, lses = poisoned(ranks, len(lengths), heads, h.width), poisoned(ranks, len(lengths), heads)
    for rank in range(ranks):
        cache = poisoned(sum(widths) + 1, 2, h.kv_heads, size, h.width)
        for row, rows in zip(table, whole, strict=True):
            positions = torch.arange(len(rows), device=DEVICE)
            positions = positions[splits.owner(positions, size, ranks) == rank]
            slots = splits.slots(row, positions, size, ranks)
            cache[slots // size, :, :, slots % size] = rows[positions]
        lens = torch.tensor([splits.local_length(n, rank, size, ranks) for n in lengths], device=DEVICE)
        batch = PagedBatch((), (), table, size, lens, table.shape[1] * size)
        operands = gqa.Operands(h, ((0, 1),) * len(lengths), q, cache, table, size)
        out, lses[rank] = run(operands, batch, gqa.SPLIT)
        outs[rank] = out.view(-1, heads, h.width)
    out, lse = poisoned(len(lengths), heads, h.width), poisoned(len(lengths), heads)
    merging.merge(outs, lses, out, lse)
    for i, rows in enumerate(whole):
        keys, values = rows.repeat_interleave(h.group, 2).unbind(1)
        want = splits.exact(q[i : i + 1], keys, values, torch.tensor([len(rows)]), h.width**-0.5)
        torch.testing.assert_close(out[i : i + 1].double(), want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[i : i + 1].double(), want[1], rtol=1e-5, atol=1e-5)


@requires_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [gqa.Heads(8, 4, 128), gqa.Heads(3, 3, 64)])
def test_a_captured_step_merges_what_lengths_on_the_device_say(heads: gqa.Heads) -> None:
    """Two parts of each sequence as two ranks would send them, written where they are sent from."""
    whole = gqa.make(heads, tuple((n - 1, n) for n in (3000, 500, 70)), 64, torch.bfloat16, spare=20)
    count, rows = heads.kv_heads * heads.group, 3 * heads.kv_heads * heads.group
    sent = poisoned(2, rows * (heads.width + 1))
    outs = sent[:, : rows * heads.width].view(2, 3, count, heads.width)
    lses = sent[:, rows * heads.width :].view(2, 3, count)
    lens = torch.ones(2, 3, dtype=torch.int64, device=DEVICE)
    halves = [whole.table[:, side::2].contiguous() for side in (0, 1)]  # blocks in turn

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        for side, table in enumerate(halves):
            batch = PagedBatch((), (), table, 64, lens[side], table.shape[1] * 64)
            prepared = op.prepare(
                batch, heads=count, kv_heads=heads.kv_heads, head_dim=heads.width, dtype=torch.bfloat16, device=DEVICE
            )
            op.attention(
                whole.q, whole.cache, prepared, scale=heads.width**-0.5, out=outs[side].flatten(1), lse=lses[side]
            )
        return merge(outs, lses, dtype=torch.bfloat16)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for lengths in ((3000, 500, 70), (64, 1, 65), (2999, 0, 7)):
        for side in (0, 1):
            lens[side] = torch.tensor([splits.local_length(n, side, 64, 2) for n in lengths])
        graph.replay()
        known = PagedBatch((1, 1, 1), lengths, whole.table, 64)
        check(whole, known, (out.float().flatten(1), lse))
