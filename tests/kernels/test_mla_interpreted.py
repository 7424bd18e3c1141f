"""The CUDA path of latent attention within a whole model, interpreted: the logits of the CPU path."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep_common.steps import Kind
from tests.kernels.device import ON_GPU

from lockstep_kernels import mla  # isort: skip
from lockstep_kernels.mla import Expansion, LatentBatch, Prepared, cuda  # isort: skip
from lockstep_kernels.rms_norm import Norm  # isort: skip
from lockstep_worker.models import load_model  # isort: skip
from tests.kernels.sequences import EVERY, Sequences  # isort: skip
from tests.kernels.oracles import VOCAB, build  # isort: skip
from tests.kernels.test_oracles_deepseek import V2_LITE, V3  # isort: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ON_GPU, reason="kernels are compiled here: see test_mla_model"),
]

WIDTHS = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "num_hidden_layers": 2}


def prepare(
    batch: LatentBatch,
    expansion: Expansion,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
    dtype: torch.dtype,
) -> Prepared:
    plan: object
    if batch.decode:
        split = cuda.Split(3, 16, 32, 1, warps=4, stages=2)
        plan = cuda.plan_decode(batch.seq_lens, batch.block_table, batch.block_size, expansion, split)
    elif batch.query_starts is not None:
        plan = cuda.plan_captured(
            batch, batch.query_starts, expansion, 2 * cos.shape[1], dtype, cuda.Tiling(32, 32, 4, 2)
        )
    else:
        plan = cuda.plan_prompts(batch, expansion, dtype, cuda.Tiling(32, 32, 4, 2), 23)
    return Prepared(cos, sin, slots, interleaved, plan)


def attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    norm: Norm,
    cache: torch.Tensor,
    prepared: Prepared,
    expansion: Expansion,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    cuda.attention(q, latents, norm, cache, prepared, expansion, scale, out, lse)


@pytest.mark.parametrize(("family", "values"), [("DeepseekV2", V2_LITE), ("DeepseekV3", V3)])
def test_a_model(family: str, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts in chunks, captured ones too, then steps whose lengths the host does not know."""
    build(family, values | WIDTHS, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), deterministic=True)
    generator = torch.Generator().manual_seed(4)
    tokens = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (43, 38)]
    want = [Sequences(model, [t]).run(Kind.PREFILL, [(0, 0, len(t))], wanted=EVERY) for t in tokens]
    monkeypatch.setattr(mla, "prepare", prepare)
    monkeypatch.setattr(mla, "attention", attention)
    sequences = Sequences(model, tokens)
    for chunks in ([(0, 0, 40), (1, 0, 9)], [(1, 9, 35)]):
        rows = sequences.run(Kind.PREFILL, chunks)
        for row, (i, _, end) in zip(rows, chunks, strict=True):
            torch.testing.assert_close(row, want[i][end - 1], rtol=0, atol=1e-5)
    captured = Sequences(model, tokens)
    for chunks in ([(0, 0, 21), (1, 0, 9)], [(1, 9, 33), (0, 21, 43)]):
        rows = captured.step(captured.captured(chunks, padding=5))
        every = torch.cat([want[i][start:end] for i, start, end in chunks])
        torch.testing.assert_close(rows, every, rtol=0, atol=1e-5)
    for step in range(2):
        inputs = sequences.inputs(Kind.DECODE, [(0, 40 + step, 41 + step), (1, 35 + step, 36 + step)])
        inputs = dataclasses.replace(
            inputs, query_lens=(), host_seq_lens=(), block_tables=(torch.tensor(sequences.tables),)
        )
        expected = torch.stack((want[0][40 + step], want[1][35 + step]))
        torch.testing.assert_close(sequences.step(inputs), expected, rtol=0, atol=1e-5)
