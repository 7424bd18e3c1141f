"""DeepSeek on the GPU in bfloat16 against itself on CPU in float32, from the same weights.

bfloat16 keeps 8 bits, so a rounding errs by up to 2^-9 of a value. About six roundings a layer on the way of a residual stream whose
parts are of one size add up to some 2^-6 of the logits' spread, which is 1: that is what the mean square may be, and the largest
of thousands some six times that. Where a token's experts are nearly as good as others, rounding may choose the others: some
tokens are then off by as much as an expert counts, and so are tokens that attend to them.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from lockstep_common.steps import Kind
from lockstep_worker.inputs import StepInputs
from lockstep_worker.models import Model
from tests.kernels.device import DEVICE, requires_gpu
from tests.kernels.oracles import VOCAB, exact_and_served
from tests.kernels.sequences import EVERY, Chunk, Sequences
from tests.kernels.test_oracles_deepseek import V2_LITE, V3

RMS, LARGEST = 2**-5, 2**-2.5
OFF = 0.5  # the share of tokens that other experts may have touched
LENGTH = 200
ALL_WIDTHS = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("DeepseekV2", V2_LITE | ALL_WIDTHS),
    "v3": ("DeepseekV3", V3 | ALL_WIDTHS),
    "v3 with heads for two programs": (
        "DeepseekV3",
        V3 | ALL_WIDTHS | {"num_attention_heads": 40, "num_key_value_heads": 40},
    ),
    "dense v2-lite": ("DeepseekV2", V2_LITE | ALL_WIDTHS | {"first_k_dense_replace": 3}),
    "dense v3": ("DeepseekV3", V3 | ALL_WIDTHS | {"first_k_dense_replace": 3}),
}

pytestmark = requires_gpu


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model, Model]:
    """The model on CPU and on the GPU."""
    return request.param, *exact_and_served(*CASES[request.param], tmp_path_factory.mktemp("model"), DEVICE)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (LENGTH, 65, 130)]


def on_cpu(model: Model) -> list[torch.Tensor]:
    return [Sequences(model, [t]).run(Kind.PREFILL, [(0, 0, len(t))], wanted=EVERY) for t in prompts()]


def check(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """[n, vocab] each."""
    error = got.float().cpu() - want
    assert error.isfinite().all()
    off = error.abs().amax(1) > LARGEST
    if name.startswith("dense"):
        assert not off.any(), f"largest error {error.abs().max():.3f}"
    assert off.float().mean() <= OFF, f"{off.sum()} of {len(off)} tokens are off"
    untouched = error[~off].square().mean(1)  # among them some that other experts have touched a little
    assert untouched.median().sqrt() < RMS


def test_whole_prompts(pair: tuple[str, Model, Model]) -> None:
    name, cpu, gpu = pair
    sequences = Sequences(gpu, prompts(), block_size=64, device=DEVICE)
    got = sequences.run(Kind.PREFILL, [(i, 0, len(t)) for i, t in enumerate(prompts())], wanted=EVERY)
    check(name, got, torch.cat(on_cpu(cpu)))


def test_captured_prompts_follow_the_lengths_on_the_device(pair: tuple[str, Model, Model]) -> None:
    """One graph replayed for chunks of other lengths, with and without cached positions before them."""
    name, cpu, gpu = pair
    want = on_cpu(cpu)
    sequences = Sequences(gpu, prompts(), block_size=64, device=DEVICE)
    passes = [[(0, 0, 70), (1, 0, 20)], [(0, 70, 71), (1, 20, 65)], [(2, 0, 50), (0, 71, 100)]]
    size = 128

    def described(chunks: list[Chunk]) -> StepInputs:
        inputs = sequences.captured(chunks, padding=size - sum(end - start for _, start, end in chunks))
        return dataclasses.replace(inputs, logits_index=torch.arange(size, device=DEVICE))

    static = described(passes[0])
    sequences.step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = sequences.step(static)
    for chunks in passes:
        inputs = described(chunks)
        for field in ("token_ids", "positions", "query_starts", "seq_lens", "live"):
            getattr(static, field).copy_(getattr(inputs, field))
        static.slots[0].copy_(inputs.slots[0])
        static.block_tables[0].copy_(inputs.block_tables[0])
        graph.replay()
        every = torch.cat([want[i][start:end] for i, start, end in chunks])
        check(name, logits[: len(every)].clone(), every)


@pytest.mark.parametrize("block_size", [16, 64])
def test_chunks_and_decode_steps(pair: tuple[str, Model, Model], block_size: int) -> None:
    """Cached positions expanded for chunks and absorbed in steps: both against whole prompts on CPU."""
    name, cpu, gpu = pair
    want = on_cpu(cpu)
    sequences = Sequences(gpu, prompts(), block_size=block_size, device=DEVICE)
    got: list[list[torch.Tensor]] = [[], [], []]
    for start, end in itertools.pairwise((0, 13, 40, 50)):
        rows = sequences.run(Kind.PREFILL, [(i, start, end) for i in range(3)], wanted=EVERY)
        for i in range(3):
            got[i].append(rows[i * (end - start) : (i + 1) * (end - start)])
    for position in range(50, LENGTH):
        live = [i for i, t in enumerate(prompts()) if position < len(t)]
        rows = sequences.run(Kind.DECODE, [(i, position, position + 1) for i in live])
        for row, i in zip(rows, live, strict=True):
            got[i].append(row[None])
    for rows_of, expected in zip(got, want, strict=True):
        check(name, torch.cat(rows_of), expected)


def test_a_captured_step_follows_the_lengths_on_the_device(pair: tuple[str, Model, Model]) -> None:
    name, cpu, gpu = pair
    want = on_cpu(cpu)
    sequences = Sequences(gpu, prompts(), block_size=64, device=DEVICE)
    sequences.run(Kind.PREFILL, [(i, 0, 30) for i in range(3)])

    def captured(position: int) -> StepInputs:
        """As the host of a captured step knows them: no lengths, and tables of full width."""
        inputs = sequences.inputs(Kind.DECODE, [(i, position, position + 1) for i in range(3)])
        table = torch.tensor(sequences.tables, device=DEVICE)
        return dataclasses.replace(
            inputs, query_lens=(), host_seq_lens=(), max_seq_len=gpu.max_model_len, block_tables=(table,)
        )

    static = captured(30)
    sequences.step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = sequences.step(static)
    got = []
    for position in range(30, 65):
        inputs = captured(position)
        for field in ("token_ids", "positions", "seq_lens"):
            getattr(static, field).copy_(getattr(inputs, field))
        static.slots[0].copy_(inputs.slots[0])
        graph.replay()
        got.append(logits.clone())
    for i, rows in enumerate(want):
        check(name, torch.stack(got)[:, i], rows[30:65])
