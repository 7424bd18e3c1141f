"""Log probabilities of prompts: any chunking gives the bits of one pass, and rows that do not ask get nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch

from lockstep_common.steps import PromptChunk, PromptScores, Sampling
from lockstep_worker import scoring
from lockstep_worker.rows import ChunkPass
from lockstep_worker.scoring import Scored, score
from tests.unit.worker.toy import VOCAB, Choice, Mode, PlanDriver, ToyModel, hashed_logits, make_runner

PROMPTS = [(4, 5, 6, 7, 8, 9, 10, 3, 2), (1, 2, 3), (9,), (3, 3, 3, 3, 1)]
WIDTHS = [3, -1, 2, 0]


def choices() -> dict[int, Choice]:
    return {
        row: Choice(prompt, Sampling(prompt_logprobs=width), limit=20)
        for row, (prompt, width) in enumerate(zip(PROMPTS, WIDTHS, strict=True))
    }


def of_row(found: Sequence[PromptChunk], row: int) -> PromptScores:
    """The scores of a row's prompt, which came without a gap."""
    mine = [chunk for chunk in found if chunk.row == row]
    at = 1
    for chunk in mine:
        assert chunk.start == at
        at += len(chunk.scores)
    return PromptScores.joined([chunk.scores for chunk in mine])


def expected(prompt: Sequence[int], width: int) -> PromptScores:
    logits = torch.from_numpy(np.stack([hashed_logits(tuple(prompt[:i])) for i in range(1, len(prompt))]))
    logprobs = logits.double().log_softmax(-1)
    targets = torch.tensor(prompt[1:])
    values, ids = logprobs.topk(width)
    chosen = logprobs.gather(1, targets[:, None])
    return PromptScores(chosen[:, 0].numpy(), ((logprobs > chosen).sum(1) + 1).numpy(), ids.numpy(), values.numpy())


def same(a: PromptScores, b: PromptScores) -> None:
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    np.testing.assert_allclose(a.values, b.values, atol=1e-5)
    assert a.ranks.tolist() == b.ranks.tolist() and a.ids.tolist() == b.ids.tolist()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("chunk", [1000, 4, 3, 1])
def test_scores_in_any_chunking(chunk: int, mode: Mode) -> None:
    driver = PlanDriver(make_runner(ToyModel(), mode=mode))
    driver.add(choices(), chunk=chunk)
    driver.settle()
    assert {chunk.row for chunk in driver.prompts} == {0, 3}, "one token, or nothing asked: nothing to score"
    for row in (0, 3):
        same(of_row(driver.prompts, row), expected(PROMPTS[row], WIDTHS[row]))
        assert of_row(driver.prompts, row).ids.shape == (len(PROMPTS[row]) - 1, WIDTHS[row])


def test_scoring_changes_no_token_and_nothing_is_scored_while_decoding() -> None:
    plain = {row: Choice(choice.prompt, limit=20) for row, choice in choices().items()}
    outputs = []
    for rows in (choices(), plain):
        driver = PlanDriver(make_runner(ToyModel()), window=4)
        driver.add(rows, chunk=4)
        driver.prompts.clear()
        driver.finish()
        assert driver.prompts == []
        outputs.append([choice.output for choice in rows.values()])
    assert outputs[0] == outputs[1]


def test_a_row_that_comes_back_is_scored_again_only_if_it_asks() -> None:
    """As after a preemption: generated tokens are none of the prompt's."""
    driver = PlanDriver(make_runner(ToyModel()), window=3)
    driver.add({0: Choice(PROMPTS[0], Sampling(prompt_logprobs=1), limit=20)})
    driver.decode()
    choice = driver.remove(0)
    driver.prompts.clear()
    driver.add({1: choice}, chunk=5)
    driver.settle()
    same(of_row(driver.prompts, 1), expected(PROMPTS[0], 1))


def test_captured_passes_are_for_rows_that_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    class Captured:
        """Replays nothing, but says what it was asked for."""

        asked: ClassVar[list[list[int]]] = []

        def logits(self, chunks: ChunkPass, size: int) -> None:
            self.asked.append(chunks.rows.tolist())

    runner = make_runner(ToyModel())
    monkeypatch.setattr(runner, "_prefill_graphs", Captured())
    driver = PlanDriver(runner)
    driver.add({0: Choice((1, 2, 3), Sampling(prompt_logprobs=0), limit=20), 1: Choice((4, 5), limit=20)})
    driver.add({2: Choice((1, 2, 3), limit=20)})
    assert Captured.asked == [[2]]


def test_more_best_tokens_than_there_are() -> None:
    driver = PlanDriver(make_runner(ToyModel()))
    driver.add({0: Choice((1, 2), Sampling(prompt_logprobs=VOCAB + 5), limit=20)})
    driver.settle()
    assert of_row(driver.prompts, 0).ids.shape == (1, VOCAB)


def test_logits_are_made_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden

    hidden = torch.randn(10, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = np.array([3, 5])
    scored = Scored(rows, np.array([1, 4]), np.array([6, 4]), np.array([2, 4]), torch.arange(10))
    whole = score(logits_of, VOCAB, hidden, scored).chunks()
    monkeypatch.setattr(scoring, "_MOST_LOGITS", 4 * VOCAB)
    monkeypatch.setattr(scoring, "_LEAST_ROWS", 1)
    parts = score(logits_of, VOCAB, hidden, scored).chunks()
    assert sizes == [10, 4, 4, 2]
    assert [(c.row, c.start, c.scores.ids.shape) for c in parts] == [(3, 1, (6, 2)), (5, 4, (4, 4))]
    for a, b in zip(whole, parts, strict=True):
        for x, y in zip(
            *((c.scores.logprobs, c.scores.ranks, c.scores.ids, c.scores.values) for c in (a, b)), strict=True
        ):
            assert x.tobytes() == y.tobytes()
