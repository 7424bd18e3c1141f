"""Every family on two ranks that share its sequences beside transformers on one: mirrored prompts, a prefix, generated tokens.

On a GPU beside the same model on one rank there: two threads share it, and gather through the host's memory.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.kernels import test_oracles, test_oracles_deepseek, test_oracles_moe
from tests.kernels.device import DEVICE, requires_gpu
from tests.kernels.oracles import LENGTH, TOLERANCE, build, expected, prompt
from tests.moe_model import MoeShape, make_tiny_moe
from tests.sharing import Setting, decode, prefill
from tests.tiny_model import Shape, make_tiny_model

ORACLES = test_oracles.ORACLES | test_oracles_deepseek.ORACLES | test_oracles_moe.ORACLES
CUTS = (0, 37, 70)
PASSES = [prefill((0, start, end), every=True) for start, end in itertools.pairwise(CUTS)]
PASSES += [decode((0, position, position + 1)) for position in range(CUTS[-1], LENGTH)]
RMS = 2**-5  # of the logits' spread, in bfloat16: some six roundings a layer


@pytest.mark.parametrize("name", ORACLES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, values = ORACLES[name]
    want = expected(build(family, values, tmp_path), prompt())
    for outcome in Setting(tmp_path, [prompt()]).run(2, PASSES):
        torch.testing.assert_close(torch.cat(outcome.logits), want, rtol=0, atol=TOLERANCE)


@requires_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", ["dense", "qwen3-moe", "deepseek-v3"])
def test_logits_on_a_gpu_are_those_of_one_rank(form: str, ranks: int, tmp_path: Path) -> None:
    if form == "dense":
        make_tiny_model(tmp_path, shape=Shape(hidden=128))
    else:
        make_tiny_moe(tmp_path, form=form, shape=MoeShape(hidden=128, expert_width=64))  # type: ignore[arg-type]
    shared = Setting(tmp_path, [prompt()], dtype=torch.bfloat16, device=DEVICE, own=16)
    shared.run(1, PASSES[:1] + PASSES[-1:])  # compiles what threads should not compile at once
    (one,), many = shared.run(1, PASSES), shared.run(ranks, PASSES)
    want = torch.cat(one.logits)
    for outcome in many:
        assert (torch.cat(outcome.logits) - want).square().mean().sqrt() < RMS * want.std()
