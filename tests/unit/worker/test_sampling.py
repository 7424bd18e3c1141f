"""Each sampling parameter against an oracle, noise as a pure function, and rows that do not notice their batch mates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.errors import LockstepError
from lockstep_common.steps import MAX_BIASES, MAX_STOP_IDS, AddRow, Sampling, unpack_words
from lockstep_kernels import post_update
from lockstep_kernels import sampling as ops
from lockstep_kernels.sampling import Feature, cpu, reference
from lockstep_worker.sampling import (
    LogprobsMode,
    Sampled,
    SamplingRows,
    TokenSampler,
    Variant,
    bytes_a_row,
    features_of,
    top_logprobs_of,
)
from tests.unit.worker.toy import CPU, Choice, PlanDriver, ToyModel, make_runner, solo, u32

V = 101  # odd, so that rows begin at every alignment


def logits_of(rows: int, seed: int = 0, vocab_size: int = V, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def sample(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
    choices: Sequence[int] | None = None,
) -> Sampled:
    """One step of len(samplings) rows whose histories are prompts + outputs."""
    n, vocab_size = logits.shape
    prompts = prompts or [[0]] * n
    outputs = outputs or [[]] * n
    rows = SamplingRows(n, vocab_size, CPU, torch.from_numpy)
    adds = [
        AddRow(i, "", choices[i] if choices else 0, len(p), u32([*p, *o]), 0, (), s, 10_000)
        for i, (p, o, s) in enumerate(zip(prompts, outputs, samplings, strict=True))
    ]
    rows.add(adds)
    index = np.arange(n)
    batch = rows.select(index, torch.from_numpy(index))
    positions = torch.tensor([len(add.tokens) for add in adds])
    sampled = TokenSampler(rows).sample(logits, batch, positions)
    rows.count(batch, sampled.tokens)
    return sampled


def added(samplings: Sequence[Sampling], histories: Sequence[Sequence[int]], vocab_size: int = V) -> SamplingRows:
    """Rows of prompts of one token and these outputs."""
    rows = SamplingRows(len(samplings), vocab_size, CPU, torch.from_numpy)
    rows.add(
        [
            AddRow(i, "", i % 3, 1, u32([0, *history]), 0, (), sampling, 10_000)
            for i, (sampling, history) in enumerate(zip(samplings, histories, strict=True))
        ]
    )
    return rows


def draws(logits: torch.Tensor, sampling: Sampling, count: int = 2000) -> np.ndarray:
    """Tokens drawn from one row's logits [V] at `count` positions."""
    rows = SamplingRows(1, logits.shape[-1], CPU, torch.from_numpy)
    rows.add([AddRow(0, "", 0, 1, u32([0]), 0, (), sampling, 10_000)])
    batch = rows.select(np.zeros(count, np.int64), torch.zeros(count, dtype=torch.int64))
    sampled = TokenSampler(rows).sample(logits.expand(count, -1).contiguous(), batch, torch.arange(count))
    return sampled.tokens.numpy()


# Features


def test_greedy_rows_without_extras_take_the_fast_path() -> None:
    assert features_of(Sampling(), V) == Feature(0)
    assert features_of(Sampling(top_p=0.5, top_k=3, min_p=0.1, stop_ids=(1,)), V) == Feature.STOP_IDS
    rows = SamplingRows(2, V, CPU, torch.from_numpy)
    rows.add([AddRow(i, "", 0, 1, u32([0]), 0, (), Sampling(stop_ids=(4,)), 9) for i in range(2)])
    batch = rows.select(np.arange(2), torch.arange(2))
    assert not batch.features & Feature.SHAPED and batch.wanted is None and batch.stop_ids is not None
    assert not rows.counts.any() and rows.variant(np.arange(2)) is Variant.GREEDY


def test_greedy_is_the_first_largest() -> None:
    logits = logits_of(5)
    logits[2, 3] = logits[2, 77] = 99.0
    for implementation in (cpu, reference):
        tokens, best = implementation.greedy(logits)
        assert tokens.tolist()[2] == 3
        assert torch.equal(tokens, logits.argmax(-1)) and torch.equal(best, logits.amax(-1))


# Oracles, one a parameter


def test_temperature_draws_from_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    found = np.bincount(draws(logits, Sampling(temperature=0.7, seed=1), 20_000), minlength=4) / 20_000
    assert np.abs(found - (logits / 0.7).softmax(-1).numpy()).max() < 0.012


def test_tiny_temperatures_equal_greedy() -> None:
    logits = logits_of(8, scale=15.0).clamp(-60, 59)
    logits[torch.arange(8), torch.arange(8) * 9] = 60.0
    expected = logits.argmax(-1).tolist()
    for temperature in (1e-5, 2e-5, 1e-6, 1e-30):
        for top_p in (1.0, 1e-4):
            sampled = sample(logits, [Sampling(temperature=temperature, top_p=top_p, seed=s) for s in range(8)])
            assert sampled.tokens.tolist() == expected
            assert sampled.bad is not None and not sampled.bad.any()


@pytest.mark.parametrize("k", [1, 3, 40])
def test_top_k_draws_only_the_k_best(k: int) -> None:
    logits = logits_of(1)[0]
    best = set(logits.topk(k).indices.tolist())
    found = set(draws(logits, Sampling(temperature=3.0, top_k=k, seed=4)).tolist())
    assert found <= best and len(found) > 0.6 * k


@pytest.mark.parametrize("p", [1e-4, 0.3, 0.9, 0.999])
def test_top_p_draws_only_the_nucleus(p: float) -> None:
    logits = logits_of(1, scale=1.0)[0]
    ranked = sorted(logits.softmax(-1).tolist(), reverse=True)
    size, mass = 0, 0.0
    while mass < p:
        mass += ranked[size]
        size += 1
    found = set(draws(logits, Sampling(temperature=1.0, top_p=p, seed=4), 4000).tolist())
    assert found <= set(logits.topk(size).indices.tolist()) and len(found) > 0.5 * size


def test_min_p_draws_only_tokens_near_the_best() -> None:
    logits = logits_of(1, scale=1.0)[0]
    probs = logits.softmax(-1)
    found = set(draws(logits, Sampling(temperature=1.0, min_p=0.2, seed=4)).tolist())
    assert found == set((probs >= 0.2 * probs.max()).nonzero()[:, 0].tolist())


def test_penalties_count_prompt_and_output_as_defined() -> None:
    logits = logits_of(1)
    prompt, output = [3, 4, 4], [5, 5, 6]
    expected = logits[0].tolist()
    for token in {*prompt, *output}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(output):
        expected[token] -= 0.5 + 0.25 * output.count(token)
    counts = torch.bincount(torch.tensor(output), minlength=V).int()[None]
    in_prompt = torch.bincount(torch.tensor(prompt), minlength=V)[None] > 0
    one = torch.ones(1)
    found = ops.penalise(logits, counts, in_prompt, 0.5 * one, 0.25 * one, 1.5 * one)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_penalties_keep_greedy_rows_from_repeating() -> None:
    sampling = Sampling(frequency_penalty=2.0, presence_penalty=2.0)
    flat = ToyModel(lambda history: np.linspace(0, 1, 50, dtype=np.float32))
    assert solo(flat, Choice((1,), sampling, limit=12), window=3).output == list(range(49, 38, -1))


def test_bias_moves_single_tokens() -> None:
    logits = logits_of(3)
    plain = logits.argmax(-1).tolist()
    found = sample(
        logits,
        [Sampling(bias=((7, 100.0),)), Sampling(bias=tuple((i, -100.0) for i in range(V) if i != 8)), Sampling()],
    ).tokens.tolist()
    assert found == [7, 8, plain[2]]


@pytest.mark.parametrize("eos", [(11, 12), (12, 11), (12,)])
def test_min_tokens_suppresses_all_stop_ids_and_nothing_else(eos: tuple[int, ...]) -> None:
    """A prompt of 20 tokens and a model that wants its second EOS from the second token on, then the token before it."""

    def logits(history: tuple[int, ...]) -> np.ndarray:
        values = np.zeros(50, np.float32)
        values[[12, 11, 49]] = (9, 8, 7) if len(history) > 20 else (0, 0, 9)
        return values

    prompt = tuple(range(20))
    choice = solo(ToyModel(logits), Choice(prompt, Sampling(stop_ids=eos, min_tokens=5), limit=60), window=8)
    assert choice.output == [49] + ([49] * 4 if 11 in eos else [11] * 4) + [12]
    ignoring = solo(ToyModel(logits), Choice(prompt, Sampling(min_tokens=5), limit=30), window=8)
    assert ignoring.output == [49] + [12] * 9


def test_stop_id_0_and_the_last_token_are_ordinary() -> None:
    logits = torch.zeros(2, V)
    logits[:, V - 1] = 5.0
    logits[:, 0] = 9.0
    wanting = Sampling(stop_ids=(0,), min_tokens=2)
    assert sample(logits, [wanting, Sampling(stop_ids=(0, 4, 9), min_tokens=2)]).tokens.tolist() == [V - 1, V - 1]


# Noise


def test_seed_makes_a_row_reproducible_whatever_its_mates_do() -> None:
    """The same seeded request alone, beside an unseeded one, beside a greedy one."""
    seeded = Sampling(temperature=0.8, seed=42)
    alone = solo(ToyModel(), Choice((1, 2, 3), seeded, limit=30)).output
    for mate in (Sampling(temperature=1.0, seed=77), Sampling(), Sampling(temperature=2.0, top_k=3, seed=42)):
        driver = PlanDriver(make_runner(ToyModel()))
        choices = {0: Choice((9, 9), mate, limit=40), 4: Choice((1, 2, 3), seeded, limit=30)}
        driver.add(choices)
        driver.finish()
        assert choices[4].output == alone


def test_choices_of_one_request_differ_and_repeat() -> None:
    def run() -> list[list[int]]:
        driver = PlanDriver(make_runner(ToyModel()))
        choices = {i: Choice((1, 2), Sampling(temperature=1.0, seed=7), limit=20, choice=i) for i in range(3)}
        driver.add(choices)
        driver.finish()
        return [choice.output for choice in choices.values()]

    first = run()
    assert len({tuple(output) for output in first}) == 3 and run() == first


@settings(max_examples=30, deadline=None)
@given(
    keys=st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 100), st.integers(0, 2**20)), min_size=1, max_size=5
    )
)
def test_noise_depends_on_its_key_only(keys: list[tuple[int, int, int]]) -> None:
    columns = torch.tensor(keys)
    together = ops.gumbel(columns[:, 0], columns[:, 1], columns[:, 2], V)
    assert torch.isfinite(together).all()
    for i in range(len(keys)):
        one = columns[i : i + 1]
        assert torch.equal(ops.gumbel(one[:, 0], one[:, 1], one[:, 2], V), together[i : i + 1])
        assert torch.equal(ops.gumbel(one[:, 0], one[:, 1], one[:, 2], V + 30)[:, :V], together[i : i + 1])


def test_noise_is_gumbel_and_its_keys_are_unrelated() -> None:
    positions = torch.arange(400)
    zero = torch.zeros_like(positions)
    noise = ops.gumbel(zero, zero, positions, 501).double()
    assert abs(noise.mean().item() - 0.5772) < 0.01 and abs(noise.var().item() - 1.6449) < 0.02
    others = (ops.gumbel(zero + 1, zero, positions, 501), ops.gumbel(zero, zero + 1, positions, 501))
    for other in (*(o.double() for o in others), noise.roll(1, 0), noise.roll(1, 1)):
        assert abs(torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1]) < 0.01


# Batches

RECIPES = [
    Sampling(),
    Sampling(temperature=1.0, top_p=0.9, seed=1),
    Sampling(temperature=0.3, top_k=7, seed=2, logprobs=0),
    Sampling(temperature=1.5, min_p=0.05, top_k=30, top_p=0.8, seed=3, logprobs=4),
    Sampling(repetition_penalty=1.2, logprobs=2),
    Sampling(presence_penalty=1.0, frequency_penalty=-0.5, temperature=0.9, seed=4),
    Sampling(bias=((3, 2.5), (4, -100.0)), stop_ids=(1, 2), min_tokens=4),
    Sampling(temperature=1.0, seed=2**64 - 1, bias=((0, 1.0),), logprobs=4),
    Sampling(stop_ids=(5,), logprobs=1),
]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), vocab_size=st.sampled_from([V, 64, 1000]))
def test_a_mixed_batch_equals_its_rows_alone_in_every_bit(data: st.DataObject, vocab_size: int) -> None:
    n = data.draw(st.integers(2, 9))
    samplings = [data.draw(st.sampled_from(RECIPES)) for _ in range(n)]
    logits = logits_of(n, data.draw(st.integers(0, 99)), vocab_size)
    histories = [[int(t) for t in logits[i].argsort()[-4:]] for i in range(n)]
    together = sample(logits, samplings, outputs=histories)
    assert together.bad is not None and not together.bad.any()
    for i in range(n):
        alone = sample(logits[i : i + 1], samplings[i : i + 1], outputs=histories[i : i + 1])
        assert alone.tokens[0] == together.tokens[i]
    wanted = [i for i in range(n) if samplings[i].logprobs >= 0]
    alone_logprobs = [sample(logits[i : i + 1], samplings[i : i + 1]).logprobs for i in wanted]
    if wanted:
        again = sample(logits, samplings).logprobs
        assert again is not None and torch.equal(again, torch.cat([lp for lp in alone_logprobs if lp is not None]))


@settings(max_examples=20, deadline=None)
@given(data=st.data(), vocab_size=st.sampled_from([V, 64, 1000]))
def test_rows_that_find_on_the_device_what_they_ask_for_get_the_same_tokens(
    data: st.DataObject, vocab_size: int
) -> None:
    """The form of captured steps, with the scratch row in unused places."""
    n = data.draw(st.integers(1, 9))
    samplings = [data.draw(st.sampled_from(RECIPES)) for _ in range(n)]
    logits = logits_of(n, data.draw(st.integers(0, 99)), vocab_size)
    histories = [[int(t) for t in logits[i].argsort()[-4:]] for i in range(n)]
    rows = added(samplings, histories, vocab_size)
    positions = torch.full((n,), 5)
    expected = TokenSampler(rows).sample(logits, rows.select(np.arange(n), torch.arange(n)), positions)
    index = torch.cat((torch.arange(n), torch.tensor([n, n])))
    lengths = torch.cat((positions, torch.tensor([0])))
    tokens, bad = ops.sample_rows(torch.cat((logits, logits[:1].expand(2, -1))), index, rows.tables(lengths))
    assert torch.equal(tokens[:n], expected.tokens) and not bad.any()
    assert tokens[n:].tolist() == [int(logits[0].argmax())] * 2


def test_tables_have_room_for_all_that_requests_may_ask_for_and_never_move() -> None:
    narrow = Sampling(bias=((3, 50.0),), stop_ids=(3,), min_tokens=9)
    most = Sampling(bias=tuple((i, 0.5) for i in range(MAX_BIASES)), stop_ids=tuple(range(MAX_STOP_IDS)), min_tokens=9)
    rows = SamplingRows(3, 2000, CPU, torch.from_numpy)
    lengths = torch.ones(4)
    before = places_of(rows.tables(lengths))
    for row, sampling in enumerate((narrow, Sampling(presence_penalty=1.0, stop_ids=(7, 8)), most)):
        rows.add([AddRow(row, "", 0, 1, u32([0, 5]), 0, (), sampling, 99)])
    assert places_of(rows.tables(lengths)) == before
    assert rows.stop_ids[:, :3].tolist() == [[3] * 3, [7, 8, 8], [0, 1, 2], [-1] * 3]
    assert rows.bias_values.sum(1).tolist() == [50.0, 0.0, MAX_BIASES / 2, 0.0]
    assert rows.counts.sum(1).tolist() == [0, 1, 0, 0]
    batch = rows.select(np.arange(2), torch.arange(2))
    assert batch.stop_ids is not None and batch.stop_ids.tolist() == [[3, 3], [7, 8]], "no wider than its rows ask for"
    sizes = sum(
        getattr(rows, name)[0].nbytes for name in ("stop_ids", "bias_ids", "bias_values", "counts", "in_prompt")
    )
    assert sizes == bytes_a_row(2000)


def places_of(tables: ops.RowTables) -> list[int]:
    return [getattr(tables, field.name).data_ptr() for field in fields(tables)]


@pytest.mark.parametrize(
    ("sampling", "what"),
    [
        (Sampling(stop_ids=tuple(range(MAX_STOP_IDS + 1))), "33 stop ids"),
        (Sampling(bias=((1, 1.0),) * (MAX_BIASES + 1)), "1025 biases"),
    ],
)
def test_a_row_that_asks_for_more_than_there_is_room_for_is_named(sampling: Sampling, what: str) -> None:
    rows = SamplingRows(3, V, CPU, torch.from_numpy)
    with pytest.raises(LockstepError, match=f"row 2 has {what}"):
        rows.add([AddRow(2, "", 0, 1, u32([0]), 0, (), sampling, 99)])


def test_a_batch_says_which_captured_step_it_needs() -> None:
    rows = added([Sampling(), Sampling(temperature=1.0), Sampling(logprobs=0)], [[1], [2], [3]])
    wanted = ([0], Variant.GREEDY), ([0, 1], Variant.SHAPED), ([0, 2], Variant.EAGER), ([1, 2], Variant.EAGER)
    for listed, variant in wanted:
        assert rows.variant(np.array(listed)) is variant


def test_masked_greedy_row_beside_a_random_one() -> None:
    """A greedy row with all but two tokens impossible, beside top-p: the best legal token, and the mate's own draw."""
    logits = logits_of(2)
    mate = Sampling(temperature=1.0, top_p=0.9, seed=9)
    masked = logits.clone()
    masked[0] = -torch.inf
    masked[0, [20, 30]] = logits[0, [20, 30]]
    found = sample(masked, [Sampling(), mate])
    assert found.tokens[0] == (20 if logits[0, 20] > logits[0, 30] else 30)
    assert found.tokens[1] == sample(logits[1:], [mate]).tokens[0]
    assert found.bad is not None and not found.bad.any()


def test_rows_that_are_not_finite_are_bad_and_alone() -> None:
    logits = logits_of(5)
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    logits[3, 9] = torch.inf
    samplings = [Sampling(temperature=1.0, top_p=0.9, top_k=20, seed=i, logprobs=3) for i in range(5)]
    found = sample(logits, samplings)
    assert found.bad is not None and found.bad.tolist() == [False, True, True, True, False]
    for i in (0, 4):
        assert found.tokens[i] == sample(logits[i : i + 1], samplings[i : i + 1]).tokens[0]


# Logprobs


def test_logprobs_are_those_of_the_unmodified_logits_and_finite() -> None:
    logits = logits_of(3)
    logits[2, 1:] = -torch.inf
    samplings = [
        Sampling(temperature=0.5, seed=1, logprobs=0),
        Sampling(bias=((5, 100.0),), logprobs=5),
        Sampling(logprobs=5),
    ]
    found = sample(logits, samplings)
    expected = logits.double().log_softmax(-1)
    assert found.logprobs is not None
    assert found.logprobs.tolist()[:2] == pytest.approx(
        [expected[i, found.tokens[i]].item() for i in range(2)], abs=1e-5
    )
    ids, values = found.tops[0]
    assert ids[0].tolist() == logits[1].topk(5).indices.tolist()
    assert values[0].tolist() == pytest.approx(expected[1].topk(5).values.tolist(), abs=1e-5)
    assert values[1].tolist() == [0.0] + [ops.LOWEST_LOGPROB] * 4
    assert torch.isfinite(values).all()


def test_processed_logprobs_are_those_that_tokens_are_drawn_from() -> None:
    logits = logits_of(4)
    samplings = [
        Sampling(temperature=0.5, top_k=3, seed=1, logprobs=5),
        Sampling(bias=((5, 100.0),), logprobs=0),
        Sampling(temperature=1.0, seed=2),
        Sampling(repetition_penalty=1.5, logprobs=5),
    ]
    histories = [[1], [2], [3], [int(logits[3].argmax())]]
    rows = added(samplings, histories)
    sampler = TokenSampler(rows, logprobs_mode=LogprobsMode.PROCESSED)
    batch = rows.select(np.arange(4), torch.arange(4))
    found = sampler.sample(logits, batch, torch.full((4,), 2))
    assert found.logprobs is not None and batch.wanted is not None
    ids, values = found.tops[0]
    best = logits[0].topk(3)
    assert ids[0, :3].tolist() == best.indices.tolist()
    assert values[0, :3].tolist() == pytest.approx((best.values / 0.5).log_softmax(0).tolist(), abs=1e-5)
    assert values[0, 3:].tolist() == [ops.LOWEST_LOGPROB] * 2
    assert found.logprobs[1].item() == pytest.approx(0.0, abs=1e-5)
    penalised = logits[3].clone()
    for token in (0, histories[3][0]):
        penalised[token] = penalised[token] / 1.5 if penalised[token] > 0 else penalised[token] * 1.5
    assert values[1].tolist() == pytest.approx(penalised.log_softmax(0).topk(5).values.tolist(), abs=1e-5)


def test_top_logprobs_of_rows_with_different_counts_come_in_batch_order() -> None:
    logits = logits_of(4)
    samplings = [Sampling(logprobs=n) for n in (2, 0, 3, 2)]
    rows = SamplingRows(4, V, CPU, torch.from_numpy)
    rows.add([AddRow(i, "", 0, 1, u32([0]), 0, (), s, 9) for i, s in enumerate(samplings)])
    batch = rows.select(np.arange(4), torch.arange(4))
    sampled = TokenSampler(rows).sample(logits, batch, torch.ones(4, dtype=torch.int64))
    assert batch.wanted is not None
    top = top_logprobs_of(batch.wanted, [(ids.numpy(), values.numpy()) for ids, values in sampled.tops])
    assert top is not None and top.index.tolist() == [0, 2, 3] and top.counts.tolist() == [2, 3, 2]
    assert top.ids.tolist() == [t for i, n in ((0, 2), (2, 3), (3, 2)) for t in logits[i].topk(n).indices.tolist()]


# The CPU's ways against the reference


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), p=st.floats(0.001, 0.9999), scale=st.sampled_from([0.01, 1.0, 5.0]))
def test_quick_top_p_equals_the_reference(seed: int, p: float, scale: float) -> None:
    scores = ops.temper(logits_of(3, seed, 1000, scale), torch.ones(3))
    top_p = torch.tensor([p, 0.5, 0.99])
    assert torch.equal(cpu.keep_top_p(scores, top_p), reference.keep_top_p(scores, top_p))
    keys = torch.arange(3)
    noise = ops.gumbel(keys, keys, keys, 1000)
    assert torch.equal(cpu.draw(scores, noise), reference.draw(scores, noise))


def test_outcome_words_mark_fault_before_stop_before_length() -> None:
    words = post_update.outcome_words(
        torch.tensor([5, 6, 5, 7]),
        torch.arange(4) << 32,
        stop_ids=torch.tensor([[5, 5]] * 4),
        lengths=torch.tensor([9, 9, 9, 3]),
        limits=torch.tensor([9, 9, 9, 9]),
        bad=torch.tensor([False, False, True, False]),
        stop_bit=2 << 52,
        length_bit=4 << 52,
        fault_bit=8 << 52,
    )
    tokens, rows, flags = unpack_words(words.numpy().view(np.uint64))
    assert tokens.tolist() == [5, 6, 5, 7] and rows.tolist() == [0, 1, 2, 3] and flags.tolist() == [2, 4, 8, 0]
