"""Every family on two ranks that share its sequences beside transformers on one: mirrored prompts, a prefix, generated tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.kernels import test_oracles, test_oracles_deepseek, test_oracles_moe
from tests.kernels.oracles import LENGTH, TOLERANCE, build, expected, prompt
from tests.sharing import Setting, decode, prefill

ORACLES = test_oracles.ORACLES | test_oracles_deepseek.ORACLES | test_oracles_moe.ORACLES
CUTS = (0, 37, 70)


@pytest.mark.parametrize("name", ORACLES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, values = ORACLES[name]
    want = expected(build(family, values, tmp_path), prompt())
    passes = [prefill((0, start, end), every=True) for start, end in itertools.pairwise(CUTS)]
    passes += [decode((0, position, position + 1)) for position in range(CUTS[-1], LENGTH)]
    for outcome in Setting(tmp_path, [prompt()]).run(2, passes):
        torch.testing.assert_close(torch.cat(outcome.logits), want, rtol=0, atol=TOLERANCE)
