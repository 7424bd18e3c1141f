"""Sampling in Triton against its reference: every feature and their mixtures, exact sets, ties, rows that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_kernels import sampling as ops
from lockstep_kernels.sampling import Feature, Float, Int, RowTables, reference
from tests.kernels.device import DEVICE, ON_GPU, randn

from lockstep_kernels.sampling import kernel  # isort: skip  (after tests.kernels.device)
from lockstep_kernels.sampling.rows import kernel as rows_kernel  # isort: skip

# One block or less, and more than one; odd, so that rows begin at every alignment.
VOCABS = (7, 101, 2048, 4099, 32000, 151_936) if ON_GPU else (7, 101, 2101)
EXAMPLES = 60 if ON_GPU else 6
RECIPES = (
    Feature(0),
    Feature.RANDOM,
    Feature.RANDOM | Feature.TOP_K,
    Feature.RANDOM | Feature.TOP_P,
    Feature.RANDOM | Feature.MIN_P,
    Feature.RANDOM | Feature.TOP_K | Feature.TOP_P | Feature.MIN_P,
    Feature.PENALTIES,
    Feature.BIAS | Feature.MIN_TOKENS | Feature.STOP_IDS,
    Feature.RANDOM | Feature.TOP_K | Feature.TOP_P | Feature.PENALTIES | Feature.BIAS | Feature.MIN_TOKENS,
)


def tables_of(rows: int, vocab: int, features: list[Feature], seed: int = 0) -> RowTables:
    """Random parameters of `rows` rows; features[i % len(features)] are those of row i. The others must not count."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(rows, generator=generator) * (high - low) + low

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (rows, *shape), generator=generator)

    floats, ints = torch.zeros(rows, len(Float)), torch.zeros(rows, len(Int), dtype=torch.int64)
    floats[:, Float.TEMPERATURE] = uniform(0.1, 2)
    floats[:, Float.TOP_P] = uniform(0.01, 0.999)
    floats[:, Float.MIN_P] = uniform(0.001, 0.2)
    floats[:, Float.PRESENCE], floats[:, Float.FREQUENCY] = uniform(-2, 2), uniform(-2, 2)
    floats[:, Float.REPETITION] = uniform(0.5, 2)
    ints[:, Int.SEED] = numbers(-(2**63), 2**63 - 1)
    ints[:, Int.CHOICE] = numbers(0, 4)
    ints[:, Int.TOP_K] = 1 + numbers(0, vocab - 1) // (1 + numbers(0, 50))
    ints[:, Int.MIN_LENGTH] = numbers(0, 30)
    ints[:, Int.FEATURES] = torch.tensor([int(features[i % len(features)]) for i in range(rows)])
    bias_ids = torch.stack([torch.randperm(vocab, generator=generator)[:4] for _ in range(rows)])
    bias_values = torch.randn(bias_ids.shape, generator=generator) * 4
    bias_ids, bias_values = torch.cat((bias_ids, bias_ids[:, :1]), 1), torch.cat((bias_values, torch.zeros(rows, 1)), 1)
    return RowTables(
        floats=floats.to(DEVICE),
        ints=ints.to(DEVICE),
        stop_ids=numbers(0, vocab, 3).to(DEVICE),
        bias_ids=bias_ids.to(DEVICE),
        bias_values=bias_values.to(DEVICE),
        lengths=numbers(1, 60).to(DEVICE),
        counts=(numbers(0, 4, vocab) * (numbers(0, 9, vocab) == 0)).int().to(DEVICE),
        in_prompt=(numbers(0, 9, vocab) == 0).to(DEVICE),
    )


def logits_of(rows: int, vocab: int, seed: int, *, scale: float = 3.0, coarse: bool = False) -> torch.Tensor:
    """`coarse`: as a bfloat16 model computes them, with many ties."""
    logits = randn(rows, vocab, seed=seed) * scale
    return logits.bfloat16().float() if coarse else logits


def check_tokens(logits: torch.Tensor, index: torch.Tensor, tables: RowTables, found: torch.Tensor) -> None:
    """`found` are the reference's tokens, but for draws that rounding decides."""
    places = tables.lengths[index]
    want = reference.sample_rows(logits, index, tables, places, None)[0]
    different = (found != want).nonzero()[:, 0]
    if len(different) == 0:
        return
    assert ON_GPU, "the interpreter rounds as the reference does"
    rows = index[different]
    x = reference.shape_rows(logits[different], rows, tables, places[different], None)
    open_tables = replace(tables, ints=tables.ints.clone())
    open_tables.ints[:, Int.FEATURES] &= int(Feature.RANDOM)
    keys = tables.ints[rows]
    scores = reference.filter_rows(x, rows, open_tables).double()
    noise = ops.gumbel(keys[:, Int.SEED], keys[:, Int.CHOICE], places[different], x.shape[1])
    for i, token in enumerate(found[different].tolist()):
        kept = reference.filter_rows(x[i : i + 1], rows[i : i + 1], tables)[0]
        at_the_edge = (scores[i] - kept[kept > -torch.inf].min()).abs() < 1e-5
        surely_kept = (kept > -torch.inf) & ~at_the_edge
        noisy = scores[i] + noise[i]
        best = noisy.masked_fill(~surely_kept, -torch.inf).max()
        assert (surely_kept | at_the_edge)[token] and noisy[token] > best - 1e-5, (rows[i], token)


@pytest.fixture(scope="module", autouse=True)
def workspaces_hold_anything() -> Iterator[None]:
    """What nobody wrote is NaN, or an index far away; so whoever reads it is noticed."""
    empty = torch.empty

    def garbage(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        if made.dtype == torch.bool:
            return made.fill_(True)
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).max // 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", garbage)
        yield


# Greedy


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 4), vocab=st.sampled_from(VOCABS), half=st.booleans())
def test_greedy_equals_the_reference(seed: int, n: int, vocab: int, half: bool) -> None:
    logits = logits_of(n, vocab, seed, coarse=True)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0])
    generator = torch.Generator().manual_seed(seed)
    for row in range(n):
        places = torch.randint(0, vocab, (2,), generator=generator)
        logits[row, places.to(DEVICE)] = special[torch.randint(0, 5, (2,), generator=generator)].to(DEVICE)
    if half:
        logits = logits.bfloat16()
    tokens, values, bad = kernel.argmax(logits)
    want, best = reference.greedy(logits)
    assert torch.equal(tokens, want)
    assert torch.equal(values.isnan(), best.isnan()) and torch.equal(values.nan_to_num(5), best.float().nan_to_num(5))
    assert torch.equal(bad, ~torch.isfinite(best))


@pytest.mark.parametrize("rows", [[-0.0, 0.0, -0.0], [0.0, -0.0, 0.0], [-torch.inf] * 3, [-1.0, -2.0, -1.0]])
def test_the_first_of_equal_logits(rows: list[float]) -> None:
    logits = torch.tensor([rows], device=DEVICE)
    assert kernel.argmax(logits)[0].tolist() == [0]
    index, tables = torch.zeros(1, dtype=torch.int64, device=DEVICE), tables_of(1, 3, [Feature(0)])
    assert rows_kernel.sample_rows(logits, index, tables, None, None)[0].tolist() == [0]


# Rows


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 200 if ON_GPU else 4),
    vocab=st.sampled_from(VOCABS),
    features=st.lists(st.sampled_from(RECIPES), min_size=1, max_size=4),
    coarse=st.booleans(),
    scale=st.sampled_from([0.01, 3.0, 30.0]),
)
def test_rows_get_the_tokens_of_the_reference(
    seed: int, n: int, vocab: int, features: list[Feature], coarse: bool, scale: float
) -> None:
    n = min(n, 4 + 200_000 // vocab)
    tables = tables_of(n + 2, vocab, features, seed)
    index = torch.randperm(n + 2, generator=torch.Generator().manual_seed(seed))[:n].to(DEVICE)
    logits = logits_of(n, vocab, seed, scale=scale, coarse=coarse)
    tokens, bad = rows_kernel.sample_rows(logits.clone(), index, tables, None, None)
    check_tokens(logits, index, tables, tokens)
    assert not bad.any()


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from(VOCABS))
def test_a_mixed_batch_equals_its_rows_alone_in_any_order(seed: int, vocab: int) -> None:
    n = min(20, 4 + 200_000 // vocab) if ON_GPU else 3
    generator = torch.Generator().manual_seed(seed)
    features = [RECIPES[i] for i in torch.randint(0, len(RECIPES), (n,), generator=generator).tolist()]
    tables, logits = tables_of(n, vocab, features, seed), logits_of(n, vocab, seed)
    order = torch.randperm(n, generator=generator).to(DEVICE)
    together = rows_kernel.sample_rows(logits[order], order, tables, None, None)[0]
    for place, row in enumerate(order.tolist()[:2]):
        one = torch.tensor([row], device=DEVICE)
        assert rows_kernel.sample_rows(logits[one], one, tables, None, None)[0].item() == together[place].item()


@pytest.mark.parametrize("k", [1, 3, 65, 100])
def test_top_k_draws_just_the_k_best_and_what_equals_the_last(k: int) -> None:
    vocab, n = 101, 3000 if ON_GPU else (20 if k == 3 else 5)
    tables = tables_of(1, vocab, [Feature.RANDOM | Feature.TOP_K])
    tables.ints[:, Int.TOP_K], tables.floats[:, Float.TEMPERATURE] = k, 50.0
    logits = logits_of(1, vocab, k)
    ranked = logits[0].argsort(descending=True)
    if k == 3:
        logits[0, ranked[3:5]] = logits[0, ranked[2]].clone()
    best = set((logits[0] >= logits[0, ranked[k - 1]]).nonzero()[:, 0].tolist())
    assert len(best) == (5 if k == 3 else k)
    index = torch.zeros(n, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(n, device=DEVICE)
    found = set(rows_kernel.sample_rows(logits.repeat(n, 1), index, tables, positions, None)[0].tolist())
    assert found <= best
    if ON_GPU or k <= 3:
        assert found == best


@pytest.mark.parametrize("scale", [0.01, 3.0])
@pytest.mark.parametrize("p", [1e-6, 0.2, 0.95])
def test_top_p_draws_just_the_nucleus(p: float, scale: float) -> None:
    """A small nucleus of nearly equal tokens needs many candidates: also those of the row's last kernel."""
    vocab, n = 101, 3000 if ON_GPU else 16
    tables = tables_of(1, vocab, [Feature.RANDOM | Feature.TOP_P])
    tables.floats[:, Float.TOP_P], tables.floats[:, Float.TEMPERATURE] = p, 1.0
    logits = logits_of(1, vocab, 5, scale=scale)
    ranked = logits[0].double().softmax(0).sort(descending=True)
    size = int((ranked.values.cumsum(0) - ranked.values < p).sum())
    nucleus = set(ranked.indices[:size].tolist())
    index = torch.zeros(n, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(n, device=DEVICE)
    found = rows_kernel.sample_rows(logits.repeat(n, 1), index, tables, positions, None)[0]
    assert set(found.tolist()) <= nucleus
    wanted = reference.sample_rows(logits.repeat(n, 1), index, tables, positions, None)[0]
    assert (found != wanted).sum() <= (n // 500 if ON_GPU else 0)


def test_noise_is_that_of_the_reference() -> None:
    """Temperature alone: the drawn token is the argmax of logits and the reference's noise, at positions and seeds of any size."""
    n, vocab = 24 if not ON_GPU else 2000, 64
    tables = tables_of(n, vocab, [Feature.RANDOM], seed=3)
    tables.floats[:, Float.TEMPERATURE] = 1.0
    tables.ints[:4, Int.SEED] = torch.tensor([0, -1, 2**63 - 1, -(2**63)], device=DEVICE)
    index, positions = torch.arange(n, device=DEVICE), torch.arange(n, device=DEVICE) * 99_991
    logits = torch.zeros(n, vocab, device=DEVICE)
    keys = tables.ints
    want = ops.gumbel(keys[:, Int.SEED], keys[:, Int.CHOICE], positions, vocab).argmax(-1)
    assert torch.equal(rows_kernel.sample_rows(logits, index, tables, positions, None)[0], want)


NOT_NUMBERS = (
    [torch.nan], [-torch.inf] * 101, [torch.inf], [torch.inf, torch.nan], [-torch.nan], [torch.inf] * 101, [torch.nan] * 101,
)  # fmt: skip


@pytest.mark.parametrize("features", RECIPES, ids=str)
def test_rows_that_are_not_finite_are_bad_and_alone(features: Feature) -> None:
    rows = len(NOT_NUMBERS) + 2
    tables, index = tables_of(rows, 101, [features]), torch.arange(rows, device=DEVICE)
    logits = logits_of(rows, 101, 1)
    expected = rows_kernel.sample_rows(logits.clone(), index, tables, None, None)[0]
    for row, values in enumerate(NOT_NUMBERS, 1):
        places = torch.arange(7, 7 + len(values)) % 101
        logits[row, places.to(DEVICE)] = torch.tensor(values, device=DEVICE)
    tokens, bad = rows_kernel.sample_rows(logits, index, tables, None, None)
    assert bad.tolist() == [False, *[True] * len(NOT_NUMBERS), False]
    assert tokens[[0, -1]].tolist() == expected[[0, -1]].tolist()
    assert ((tokens >= 0) & (tokens < 101)).all()


@pytest.mark.parametrize("parameter", [Float.TEMPERATURE, Float.TOP_P, Float.MIN_P, Float.REPETITION, Float.FREQUENCY])
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, -torch.inf, -1.0, 5.0])
def test_no_parameter_leads_out_of_the_vocabulary(parameter: Float, value: float) -> None:
    """Of values that no request may have, the tokens are of no account, but they are tokens."""
    tables = tables_of(2, 101, [everything := Feature.RANDOM | Feature.TOP_K | Feature.TOP_P | Feature.MIN_P])
    tables.ints[1, Int.FEATURES] = int(everything | Feature.PENALTIES)
    tables.floats[:, parameter] = value
    tokens, _ = rows_kernel.sample_rows(logits_of(2, 101, 1), torch.arange(2, device=DEVICE), tables, None, None)
    assert ((tokens >= 0) & (tokens < 101)).all()


def test_ids_beyond_the_vocabulary_change_no_other_row() -> None:
    tables = tables_of(3, 101, [Feature.BIAS | Feature.MIN_TOKENS])
    tables.ints[:, Int.MIN_LENGTH] = 1000
    tables.stop_ids[0], tables.bias_ids[0], tables.bias_values[0] = 101 + 5, 101 + 7, 100.0
    logits, index = logits_of(3, 101, 1), torch.arange(3, device=DEVICE)
    before = reference.shape_rows(logits[1:].clone(), index[1:], tables, tables.lengths[1:], None)
    rows_kernel.sample_rows(logits, index, tables, None, None)
    assert torch.equal(logits[1:], before)


def test_rows_of_which_nothing_is_possible_end_as_the_reference_does() -> None:
    tables = tables_of(2, 101, [Feature.RANDOM | Feature.TOP_P, Feature(0)])
    mask = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    tokens, bad = rows_kernel.sample_rows(logits_of(2, 101, 1), torch.arange(2, device=DEVICE), tables, None, mask)
    assert tokens.tolist() == [0, 0] and bad.tolist() == [False, False]


def test_the_scratch_row_may_be_listed_often() -> None:
    tables = tables_of(4, 101, [Feature.RANDOM, Feature.PENALTIES, Feature.BIAS, Feature(0)])
    logits, index = logits_of(6, 101, 2), torch.tensor([0, 3, 1, 3, 3, 2], device=DEVICE)
    tokens = rows_kernel.sample_rows(logits.clone(), index, tables, None, None)[0]
    check_tokens(logits, index, tables, tokens)
    assert torch.equal(tokens[[1, 3, 4]], logits[[1, 3, 4]].argmax(-1))


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from(VOCABS), features=st.sampled_from(RECIPES))
def test_only_tokens_of_the_mask_are_possible(seed: int, vocab: int, features: Feature) -> None:
    n = 3
    tables, logits = tables_of(n, vocab, [features], seed), logits_of(n, vocab, seed)
    index = torch.arange(n, device=DEVICE)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randint(-(2**31), 2**31, (n, -(-vocab // 32)), generator=generator).int().to(DEVICE)
    mask[0] = -1
    mask[:, 0] |= 2
    masked = ops.apply_bitmask(logits, mask)
    tokens = rows_kernel.sample_rows(logits.clone(), index, tables, None, mask)[0]
    check_tokens(masked, index, tables, tokens)
    for row, token in enumerate(tokens.tolist()):
        assert (int(mask[row, token // 32]) >> (token % 32)) & 1
        allowed = {t for t in range(vocab) if (int(mask[row, t // 32]) >> (t % 32)) & 1} if vocab < 200 else None
        assert allowed is None or set((masked[row] > -torch.inf).nonzero()[:, 0].tolist()) == allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_left_as_they_are(dtype: torch.dtype) -> None:
    n, vocab = len(RECIPES), 2101
    tables, logits = tables_of(n, vocab, list(RECIPES)), logits_of(n, vocab, 0).to(dtype)
    before, index = logits.clone(), torch.arange(n, device=DEVICE)
    tokens = rows_kernel.sample_rows(logits, index, tables, None, None)[0]
    assert torch.equal(logits, before)
    assert torch.equal(tokens, rows_kernel.sample_rows(logits.float(), index, tables, None, None)[0])


def test_no_counts_and_no_rows() -> None:
    tables = replace(tables_of(2, 101, [Feature.RANDOM | Feature.TOP_P]), counts=None, in_prompt=None)
    logits, index = logits_of(2, 101, 0), torch.arange(2, device=DEVICE)
    check_tokens(logits, index, tables, rows_kernel.sample_rows(logits.clone(), index, tables, None, None)[0])
    tokens, bad = rows_kernel.sample_rows(logits[:0], index[:0], tables, None, None)
    assert len(tokens) == len(bad) == 0
    with pytest.raises(ValueError, match="index has shape"):
        ops.sample_rows(logits, index[:1], tables)


# Logprobs


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 3),
    vocab=st.sampled_from(VOCABS),
    count=st.sampled_from([0, 1, 5, 20]),
    half=st.booleans(),
)
def test_logprobs_equal_the_log_softmax(seed: int, n: int, vocab: int, count: int, half: bool) -> None:
    count = min(count, vocab)
    logits = logits_of(n, vocab, seed, scale=10.0)
    logits[0, torch.randperm(vocab)[: vocab // 2].to(DEVICE)] = -torch.inf
    logits = logits.bfloat16() if half else logits
    tokens = torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    chosen, ids, values = kernel.logprobs(logits, tokens, count)
    expected = logits.double().log_softmax(-1).clamp(min=ops.LOWEST_LOGPROB)
    torch.testing.assert_close(chosen.double(), expected.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(values.double(), expected.gather(1, ids), atol=1e-5, rtol=1e-6)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices  # of equal ones the first comes first
    assert ids.shape == values.shape == (n, count) and torch.equal(ids, order[:, :count])


def test_logprobs_of_a_row_that_is_not_finite_harm_no_other() -> None:
    logits, tokens = logits_of(3, 2101, 0), torch.tensor([1, 2, 3], device=DEVICE)
    expected = kernel.logprobs(logits, tokens, 3)
    logits[1, 5] = torch.nan
    for want, got in zip(expected, kernel.logprobs(logits, tokens, 3), strict=True):
        assert torch.equal(want[[0, 2]], got[[0, 2]])
