"""The Llama family on the GPU against itself on CPU in float32, from the same weights; and the bits of its deterministic form.

Tolerance: a rounding errs by up to 2^-9 of a value in bfloat16 and 2^-12 in float16. About six roundings a layer on the way of
a residual stream whose parts are of one size add up to some 2^-6 (2^-9) of the logits' spread, which is about 1: that is
what the mean square may be, twice over; the largest of thousands is some six times that.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from lockstep_common.steps import Kind
from lockstep_worker.inputs import StepInputs
from lockstep_worker.models import Model, load_model
from tests.kernels.device import DEVICE, requires_gpu
from tests.kernels.oracles import VOCAB, build
from tests.kernels.sequences import EVERY, Chunk, Sequences
from tests.kernels.test_oracles import BASE, ORACLES

pytestmark = [requires_gpu, pytest.mark.gpu]

RMS = {torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float32: 2**-12}
LENGTHS = (200, 65, 130)
PROMPTS = (150, 40, 64)  # tokens of these that are prompts, where it counts
FAMILIES = ORACLES | {
    "as-smollm2": (
        "Llama",
        BASE | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536},
    ),
    "wide-heads": ("Qwen3", BASE | {"hidden_size": 256, "head_dim": 128, "intermediate_size": 512}),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    build(*FAMILIES[request.param], path, torch.float16)
    return path


def load(directory: Path, dtype: torch.dtype, device: torch.device, deterministic: bool) -> Model:
    return load_model(directory, dtype=dtype, device=device, deterministic=deterministic)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def on_cpu(directory: Path) -> list[torch.Tensor]:
    model = load(directory, torch.float32, torch.device("cpu"), True)
    return [Sequences(model, [t]).run(Kind.PREFILL, [(0, 0, len(t))], wanted=EVERY) for t in prompts()]


def check(dtype: torch.dtype, got: torch.Tensor, want: torch.Tensor) -> None:
    error = got.cpu() - want
    assert got.dtype == torch.float32 and bool(error.isfinite().all())
    assert error.square().mean().sqrt() < RMS[dtype] and error.abs().max() < 8 * RMS[dtype]


@pytest.mark.parametrize("dtype", RMS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_chunks_and_steps(directory: Path, dtype: torch.dtype, deterministic: bool) -> None:
    want, model = on_cpu(directory), load(directory, dtype, DEVICE, deterministic)
    whole = Sequences(model, prompts(), block_size=64, device=DEVICE)
    check(dtype, whole.run(Kind.PREFILL, [(i, 0, n) for i, n in enumerate(LENGTHS)], wanted=EVERY), torch.cat(want))
    sequences = Sequences(model, prompts(), block_size=16, device=DEVICE)
    for start, end in itertools.pairwise((0, 13, 40, 50)):
        got = sequences.run(Kind.PREFILL, [(i, start, end) for i in range(3)], wanted=EVERY)
        check(dtype, got, torch.cat([rows[start:end] for rows in want]))
    for position in range(50, max(LENGTHS)):
        live = [i for i, n in enumerate(LENGTHS) if position < n]
        got = sequences.run(Kind.DECODE, [(i, position, position + 1) for i in live])
        check(dtype, got, torch.stack([want[i][position] for i in live]))


def check_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    different = (got != want).any(1).nonzero()[:, 0].tolist()
    assert not different, (
        f"{what}: {len(different)} of {len(got)} rows differ, {different[:8]} first, by up to {(got - want).abs().max():.2e}"
    )


def computed_alone(model: Model, tokens: list[int], prompt: int, block_size: int) -> torch.Tensor:
    """[n, vocab]: the prompt whole, then step by step."""
    sequences = Sequences(model, [tokens], block_size=block_size, device=DEVICE)
    steps = [(Kind.PREFILL, 0, prompt), *((Kind.DECODE, at, at + 1) for at in range(prompt, len(tokens)))]
    return torch.cat([sequences.run(kind, [(0, start, end)], wanted=EVERY) for kind, start, end in steps])


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_deterministic_bits(directory: Path, dtype: torch.dtype, block_size: int) -> None:
    """Alone or beside others, prompts whole or in chunks, lengths on the host or not, steps as they come or replayed."""
    model = load(directory, dtype, DEVICE, True)
    assert model.deterministic and not model.generated_reusable
    alone = [computed_alone(model, t, n, block_size) for t, n in zip(prompts(), PROMPTS, strict=True)]

    def fresh(seed: int) -> Sequences:
        return Sequences(model, prompts(), PROMPTS, block_size=block_size, seed=seed, device=DEVICE)

    def rows(chunks: list[Chunk]) -> torch.Tensor:
        return torch.cat([alone[i][start:end] for i, start, end in chunks])

    whole: list[Chunk] = [(i, 0, n) for i, n in enumerate(PROMPTS)]
    check_bits(fresh(1).run(Kind.PREFILL, whole, wanted=EVERY), rows(whole), "prompts together")
    captured = fresh(2)
    got = captured.step(captured.captured(whole, padding=5))
    check_bits(got[: sum(PROMPTS)], rows(whole), "prompts as a graph has them")

    stepped = fresh(3)
    for start, end in itertools.pairwise((0, 1, 17, 64, max(PROMPTS))):
        chunks = [(i, start, min(end, n)) for i, n in enumerate(PROMPTS) if start < n]
        check_bits(stepped.run(Kind.PREFILL, chunks, wanted=EVERY), rows(chunks), f"chunks from {start}")
    for step in range(max(LENGTHS) - min(PROMPTS)):
        chunks = [
            (i, p + step, p + step + 1) for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True)) if p + step < n
        ]
        if not chunks:
            break
        inputs = stepped.inputs(Kind.DECODE, chunks)
        check_bits(stepped.step(inputs), rows(chunks), f"step {step} together")
        table = torch.tensor([stepped.tables[i] for i, _, _ in chunks], device=DEVICE)
        unknown = dataclasses.replace(
            inputs, query_lens=(), host_seq_lens=(), max_seq_len=model.max_model_len, block_tables=(table,)
        )
        check_bits(stepped.step(unknown), rows(chunks), f"step {step} as a graph has it")

    everything: list[Chunk] = [(i, 0, n) for i, n in enumerate(LENGTHS)]
    check_bits(fresh(4).fill(everything, wanted=EVERY), rows(everything), "replayed at once")
    resumed = fresh(5)
    for cut in ([(0, 0, 160), (1, 0, 30)], [(0, 160, 200), (1, 30, 50), (2, 0, 129)]):
        check_bits(resumed.fill(cut, wanted=EVERY), rows(cut), f"replayed as {cut}")
    last: list[Chunk] = [(1, 50, 51), (2, 129, 130)]
    check_bits(resumed.run(Kind.DECODE, last), rows(last), "steps after a replay")


@pytest.mark.parametrize("rows", [1, 3])
def test_a_captured_step_follows_the_lengths_on_the_device(directory: Path, rows: int) -> None:
    want, model = on_cpu(directory), load(directory, torch.bfloat16, DEVICE, False)
    sequences = Sequences(model, prompts(), block_size=64, device=DEVICE)
    sequences.run(Kind.PREFILL, [(i, 0, 30) for i in range(3)])

    def captured(position: int) -> StepInputs:
        """As the host of a captured step knows them: no lengths, and tables of full width."""
        inputs = sequences.inputs(Kind.DECODE, [(i, position, position + 1) for i in range(rows)])
        table = torch.tensor(sequences.tables[:rows], device=DEVICE)
        return dataclasses.replace(
            inputs, query_lens=(), host_seq_lens=(), max_seq_len=model.max_model_len, block_tables=(table,)
        )

    static = captured(30)
    sequences.step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = sequences.step(static)
    for position in range(30, 65):
        inputs = captured(position)
        for field in ("token_ids", "positions", "seq_lens"):
            getattr(static, field).copy_(getattr(inputs, field))
        static.slots[0].copy_(inputs.slots[0])
        graph.replay()
        check(torch.bfloat16, logits, torch.stack([want[i][position] for i in range(rows)]))
