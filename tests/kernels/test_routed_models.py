"""Models with experts in bfloat16, on the GPU if there is one, against themselves on CPU in float32, with the same experts.

Tolerance: bfloat16 keeps 8 bits, so a rounding errs by up to 2^-9 of a value. About six roundings a layer on the way of a residual
stream whose parts are of one size add up to some 2^-6 of the logits' spread, which is 1: that is what the mean square may be,
twice over; the largest of thousands is some six times that. A router's logits are spread twice as far (see `randomize`), and err
by as much of that.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep_common.steps import Kind
from lockstep_worker.inputs import StepInputs
from lockstep_worker.models import Model
from tests.kernels.device import DEVICE, requires_gpu
from tests.kernels.oracles import VOCAB, exact_and_served
from tests.kernels.routes import Route, Routes
from tests.kernels.sequences import EVERY, Chunk, Sequences
from tests.kernels.test_oracles_deepseek import V2, V2_LITE, V3

RMS, LARGEST, NOISE = 2**-5, 2**-2.5, 2**-5
LENGTHS = (200, 65, 130)
WIDTHS = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", V2 | WIDTHS),
    "v2-lite": ("DeepseekV2", V2_LITE | WIDTHS),
    "v3": ("DeepseekV3", V3 | WIDTHS),
}


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """The model in float32 on CPU, and in bfloat16 where it is served."""
    return exact_and_served(*CASES[request.param], tmp_path_factory.mktemp("model"), DEVICE)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


class Compared:
    """Passes of a model whose tokens go where they went in float32, each checked."""

    def __init__(self, exact: Model, model: Model, block_size: int) -> None:
        self.sequences = Sequences(model, prompts(), block_size=block_size, device=DEVICE)
        self.routes = Routes(NOISE)
        self.want: list[torch.Tensor] = []
        self.noted: list[list[Route]] = []
        with self.routes.active():
            for tokens in prompts():
                alone = Sequences(exact, [tokens])
                self.want.append(alone.run(Kind.PREFILL, [(0, 0, len(tokens))], wanted=EVERY))
                self.noted.append(self.routes.take(len(tokens)))
        assert all(len(layers) == 2 for layers in self.noted), "the first of three layers is dense"

    def run(self, kind: Kind, chunks: list[Chunk], *, on_device: bool = False) -> None:
        """`on_device`: the host knows no lengths, as in a graph."""
        parts = [[route.of(start, end) for route in self.noted[i]] for i, start, end in chunks]
        self.routes.impose(parts, DEVICE)
        with self.routes.active():
            got = self.sequences.step(self._inputs(kind, chunks, on_device))
        assert not self.routes.imposed
        error = got.float().cpu() - torch.cat([self.want[i][start:end] for i, start, end in chunks])
        assert error.isfinite().all()
        assert error.abs().max() < LARGEST, f"{kind.name} of {chunks}: off by {error.abs().max():.3f}"
        assert error.square().mean().sqrt() < RMS, f"{kind.name} of {chunks}"

    def _inputs(self, kind: Kind, chunks: list[Chunk], on_device: bool) -> StepInputs:
        if on_device and kind is Kind.PREFILL:
            return self.sequences.captured(chunks, padding=7)
        inputs = self.sequences.inputs(kind, chunks, wanted=EVERY)
        if not on_device:
            return inputs
        tables = torch.tensor([self.sequences.tables[i] for i, _, _ in chunks], device=DEVICE)
        longest = self.sequences.model.max_model_len
        return replace(inputs, query_lens=(), host_seq_lens=(), max_seq_len=longest, block_tables=(tables,))


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=requires_gpu)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_prompts_chunks_and_steps(pair: tuple[Model, Model], block_size: int, on_device: bool) -> None:
    compared = Compared(*pair, block_size)
    compared.run(Kind.PREFILL, [(i, 0, n) for i, n in enumerate(LENGTHS)], on_device=on_device)
    chunked = Compared(*pair, block_size)
    for start, end in itertools.pairwise((0, 13, 40, 50)):
        chunked.run(Kind.PREFILL, [(i, start, end) for i in range(3)], on_device=on_device)
    for position in range(50, max(LENGTHS)):
        chunks = [(i, position, position + 1) for i, n in enumerate(LENGTHS) if position < n]
        chunked.run(Kind.DECODE, chunks, on_device=on_device)
    for tally in (compared.routes.tally, chunked.routes.tally):
        assert tally.chosen == 2 * sum(LENGTHS)
        tally.check()


def test_what_other_experts_make_of_a_prompt_is_noticed(pair: tuple[Model, Model]) -> None:
    compared = Compared(*pair, 16)
    compared.noted = [[replace(r, ids=r.ids.roll(1, 0)) for r in layers] for layers in compared.noted]
    with pytest.raises(AssertionError, match="off by"):
        compared.run(Kind.PREFILL, [(i, 0, n) for i, n in enumerate(LENGTHS)])
    with pytest.raises(AssertionError, match="choices differ"):
        compared.routes.tally.check()
