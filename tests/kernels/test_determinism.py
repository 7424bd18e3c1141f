"""The same bits of logits whatever happens around a sequence: batch mates, chunking, decode or prefill, preemption, blocks, threads."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_common.steps import Kind
from lockstep_worker.inputs import StepInputs, one_token_each
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model, load_model
from tests.kernels.device import CPU_DIFFERS, requires_equal_bits
from tests.kernels.sequences import EVERY, NONE, Chunk, Sequences
from tests.tiny_model import Shape, make_tiny_model

SHAPES = {
    "grouped": Shape(max_model_len=256),
    "many heads": Shape(hidden=48, heads=6, kv_heads=6, ffn=80, max_model_len=256),
    "as SmolLM2": Shape(hidden=576, heads=9, kv_heads=3, ffn=1536, max_model_len=256),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@functools.cache
def model_of(shape: str, dtype: str) -> Model:
    with tempfile.TemporaryDirectory() as directory:
        path = make_tiny_model(Path(directory), shape=SHAPES[shape])
        return load_model(path, dtype=DTYPES[dtype], device=torch.device("cpu"), deterministic=True)


def random_tokens(model: Model, rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(model.vocab_size) for _ in range(length)]


def alone(model: Model, tokens: list[int], prompt: int) -> torch.Tensor:
    """[n, vocab]: one sequence, as few passes as can be, one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Sequences(model, [tokens], [prompt]).fill([(0, 0, len(tokens))], wanted=EVERY)
    finally:
        torch.set_num_threads(before)


def some_step(rng: random.Random, done: list[int], lens: list[int], least: list[int]) -> tuple[Kind, list[Chunk]]:
    """The next position of some unfinished sequences that are at `least` so far, or chunks of some."""
    open_ones = [i for i, (at, n) in enumerate(zip(done, lens, strict=True)) if at < n]
    chosen = rng.sample(open_ones, rng.randint(1, len(open_ones)))
    started = [i for i in chosen if done[i] >= least[i]]
    if started and rng.random() < 0.7:
        return Kind.DECODE, [(i, done[i], done[i] + 1) for i in started]
    borders = (1, 15, 16, 17, 63, 64, 65)
    chunks = []
    for i in chosen:
        left = lens[i] - done[i]
        count = min(left, rng.choice([rng.randint(1, left), rng.choice(borders), left]))
        chunks.append((i, done[i], done[i] + count))
    return Kind.PREFILL, chunks


@requires_equal_bits
@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(list(SHAPES)),
    dtype=st.sampled_from(list(DTYPES)),
    threads=st.sampled_from([1, 2]),
    count=st.integers(1, 9),
    block_size=st.sampled_from([4, 16, 64]),
    seed=st.integers(0, 2**31),
)
def test_any_schedule_gives_the_same_bits(
    shape: str, dtype: str, threads: int, count: int, block_size: int, seed: int
) -> None:
    rng = random.Random(seed)
    model = model_of(shape, dtype)
    lens = [rng.choice([1, 2, 16, 17, 63, 64, 65, 128, 129, rng.randint(1, 140)]) for _ in range(count)]
    tokens = [random_tokens(model, rng, n) for n in lens]
    prompts = [rng.randint(1, n) for n in lens]
    want = [alone(model, t, prompt) for t, prompt in zip(tokens, prompts, strict=True)]
    sequences = Sequences(model, tokens, prompts, block_size=block_size, seed=seed)
    decodes_from = [1] * count if model.generated_reusable else prompts
    done, preemptions, passes = [0] * count, 0, 0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        while done != lens and passes < 60:
            kind, chunks = some_step(rng, done, lens, decodes_from)
            logits = sequences.run(kind, chunks) if kind is Kind.DECODE else sequences.fill(chunks)
            for row, (i, start, end) in zip(logits, chunks, strict=True):
                assert torch.equal(row, want[i][end - 1]), f"{kind.name} of {start}..{end} of {lens[i]} among {chunks}"
                done[i] = end
            passes += 1
            if preemptions < 2 and rng.random() < 0.1:
                victim = rng.randrange(count)
                sequences.move(victim)
                done[victim], preemptions = 0, preemptions + 1
    finally:
        torch.set_num_threads(before)


@requires_equal_bits
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_decode_alone_and_among_seven_others(dtype: str) -> None:
    rng = random.Random(5)
    model = model_of("as SmolLM2", dtype)
    lens = [100, 3, 64, 65, 200, 17, 128, 31]
    tokens = [random_tokens(model, rng, n + 8) for n in lens]
    want = alone(model, tokens[0], lens[0])
    lonely, crowd = Sequences(model, tokens[:1], lens[:1]), Sequences(model, tokens, lens, seed=9)
    lonely.run(Kind.PREFILL, [(0, 0, lens[0])])
    crowd.run(Kind.PREFILL, [(i, 0, n) for i, n in enumerate(lens)])
    for step in range(8):
        chunks = [(i, n + step, n + step + 1) for i, n in enumerate(lens)]
        assert torch.equal(lonely.run(Kind.DECODE, chunks[:1])[0], want[lens[0] + step])
        assert torch.equal(crowd.run(Kind.DECODE, chunks)[0], want[lens[0] + step])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_tokens_replayed_as_sequences_of_their_own_have_the_same_bits(dtype: str) -> None:
    """As on CUDA, where one kernel then serves a step and the replay of many."""
    model, rng = model_of("grouped", dtype), random.Random(7)
    lens, prompts = [90, 30, 70], [40, 29, 3]
    tokens = [random_tokens(model, rng, n) for n in lens]
    together, apart = (Sequences(model, tokens, prompts, seed=seed) for seed in (1, 2))
    for sequences in (together, apart):
        sequences.run(Kind.PREFILL, [(i, 0, n) for i, n in enumerate(prompts)])
    inputs = together.inputs(Kind.DECODE, [(i, n, lens[i]) for i, n in enumerate(prompts)], wanted=EVERY)
    counts = [n - prompt for n, prompt in zip(lens, prompts, strict=True)]
    got = torch.split(together.step(one_token_each(inputs)), counts)
    for i, rows in enumerate(got):
        want = torch.cat([apart.run(Kind.DECODE, [(i, at, at + 1)]) for at in range(prompts[i], lens[i])])
        torch.testing.assert_close(rows, want, rtol=0, atol=1e-4 if CPU_DIFFERS else 0)


@requires_equal_bits
def test_a_pass_that_wants_no_logits_writes_its_keys_and_values() -> None:
    model = model_of("grouped", "float32")
    tokens = random_tokens(model, random.Random(6), 40)
    sequences = Sequences(model, [tokens])
    assert sequences.run(Kind.PREFILL, [(0, 0, 39)], wanted=NONE).shape == (0, model.vocab_size)
    assert torch.equal(sequences.run(Kind.DECODE, [(0, 39, 40)])[0], alone(model, tokens, 40)[39])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_placeholder_has_no_logits_and_writes_nothing(dtype: str) -> None:
    model = model_of("grouped", dtype)
    none, lens = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    inputs = StepInputs(
        kind=Kind.DECODE, token_ids=none, positions=none, rows=none, query_starts=lens, seq_lens=none,
        block_tables=(none.view(0, 0),), slots=(none,), logits_index=none, query_lens=(), host_seq_lens=(), max_seq_len=0,
    )  # fmt: skip
    kv = KvCache(model.kv_specs(), num_blocks=3, block_size=16)
    kv.layer(0, 0).fill_(7)
    with torch.inference_mode():
        logits = model.logits(model.forward(inputs, kv))
    assert logits.shape == (0, model.vocab_size) and logits.dtype == torch.float32
    assert bool((kv.layer(0, 0) == 7).all())
