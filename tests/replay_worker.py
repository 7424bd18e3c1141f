"""A real worker that says what was recorded: forward passes and log probabilities are the model's, the tokens a trace's.

    python -m tests.replay_worker --model DIR --replay trace.json

So two builds, or two numeric forms of a model, can be compared token by token on one and the same text. A trace is a JSON list of
{"seed": 7, "choice": 0, "prompt": 12, "tokens": [5, 6]}: a request finds its recording by its seed and choice; `prompt` is the number
of its prompt's tokens. Where a recording ends, or there is none, tokens are sampled. Steps are not captured, as a captured step
samples by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep_common import config
from lockstep_common.config import setting
from lockstep_kernels.sampling import Int
from lockstep_worker.__main__ import load, run
from lockstep_worker.config import WorkerConfig
from lockstep_worker.loaded import Loaded
from lockstep_worker.sampling import Choose, LogprobsMode, SamplingBatch, SamplingRows, TokenSampler


@dataclass(frozen=True)
class ReplayConfig(WorkerConfig):
    """A worker that replays a trace."""

    replay: str = setting("", "JSON file of the trace", metavar="FILE")


@dataclass(frozen=True)
class Recording:
    """What one choice said."""

    seed: int
    choice: int
    prompt: int
    tokens: tuple[int, ...]

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Recording:
        return cls(entry["seed"], entry["choice"], entry["prompt"], tuple(entry["tokens"]))


class ReplaySampler(TokenSampler):
    """Tokens of recordings where there are some, with the log probabilities that the model gives them."""

    def __init__(
        self, rows: SamplingRows, trace: list[Recording], *, logprobs_mode: LogprobsMode = LogprobsMode.RAW
    ) -> None:
        super().__init__(rows, logprobs_mode=logprobs_mode)
        self._choose = _Forced(self._choose, rows, trace)


class _Forced:
    def __init__(self, choose: Choose, rows: SamplingRows, trace: list[Recording]) -> None:
        """The trace is one table on the device: of each position the recorded token, or -1."""
        longest = max((r.prompt + len(r.tokens) for r in trace), default=0) + 1
        table = torch.full((len(trace) + 1, longest), -1, dtype=torch.int64)
        keys = torch.zeros(len(trace), 2, dtype=torch.int64)
        for i, recording in enumerate(trace):
            table[i, recording.prompt : recording.prompt + len(recording.tokens)] = torch.tensor(recording.tokens)
            keys[i] = torch.tensor([recording.seed, recording.choice])
        self._choose, self._rows = choose, rows
        self._table, self._keys = table.to(rows.device), keys.to(rows.device)

    def __call__(
        self, logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, bad = self._choose(logits, batch, positions)
        own = self._rows.ints[batch.index][:, [Int.SEED, Int.CHOICE]]
        found = (own[:, None] == self._keys).all(-1)  # [B, recordings]
        none = torch.ones_like(found[:, :1] if len(self._keys) else own[:, :1], dtype=torch.bool)
        recording = torch.cat((found, none), 1).to(torch.uint8).argmax(1)
        recorded = self._table[recording, positions.clamp(max=self._table.shape[1] - 1)]
        return torch.where(recorded < 0, tokens, recorded), bad


def replaying(
    load: Callable[[Callable[[float, str], None]], Loaded], trace: list[Recording], mode: LogprobsMode
) -> Any:
    """`load`, with the sampler that replays."""
    sampler = partial(ReplaySampler, trace=trace, logprobs_mode=mode)
    return lambda progress: replace(load(progress), make_sampler=sampler, graphs=False)


def main() -> None:
    settings = config.load(ReplayConfig, prog="tests.replay_worker", env_prefix="LOCKSTEP_WORKER_")
    trace = [Recording.from_json(entry) for entry in json.loads(Path(settings.replay).read_text())]
    run(settings, replaying(partial(load, settings), trace, LogprobsMode(settings.logprobs_mode)))


if __name__ == "__main__":
    main()
