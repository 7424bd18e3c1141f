"""The offline workloads: so many requests at once, all of one prompt length and one answer length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep_common.errors import ConfigError
from lockstep_common.steps import U32

_MARGIN = 10  # ids at both ends of the vocabulary are left to special tokens
_OWN = re.compile(r"(\w+)=(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` prompts of `prompt` tokens, each answered by exactly `output` tokens."""

    name: str
    requests: int
    prompt: int
    output: int

    @property
    def metric(self) -> str:
        """The column that the workload is about."""
        if self.output == 1:
            return "in_tok_s"
        return "ms_per_tok" if self.requests == 1 else "out_tok_s"

    @property
    def length(self) -> int:
        return self.prompt + self.output


WORKLOADS = {
    work.name: work
    for work in (
        Workload("decode_b1", 1, 128, 256),
        Workload("decode_b64", 64, 1024, 128),
        Workload("mixed_256", 256, 512, 256),
        Workload("prefill_4k", 32, 4096, 1),
        Workload("mixed_512", 512, 512, 256),
    )
}
STANDARD = ("decode_b1", "decode_b64", "mixed_256", "prefill_4k")


def parse(words: Sequence[str]) -> list[Workload]:
    """Names of the above, or NAME=REQUESTSxPROMPTxOUTPUT for one of your own; ConfigError for anything else."""
    found = []
    for word in words:
        if own := _OWN.fullmatch(word):
            requests, prompt, output = (int(part) for part in own.groups()[1:])
            if min(requests, prompt, output) < 1:
                raise ConfigError(f"--work {word}: requests, prompt and output must be at least 1")
            found.append(Workload(own[1], requests, prompt, output))
        elif word in WORKLOADS:
            found.append(WORKLOADS[word])
        else:
            raise ConfigError(f"--work {word!r}: give {', '.join(WORKLOADS)} or NAME=REQUESTSxPROMPTxOUTPUT")
    return found


def prompts(rng: np.random.Generator, requests: int, length: int, vocab_size: int) -> list[U32]:
    """`requests` different prompts of random ids."""
    if vocab_size <= 2 * _MARGIN:
        raise ConfigError(f"a vocabulary of {vocab_size} tokens is too small for random prompts")
    return list(rng.integers(_MARGIN, vocab_size - _MARGIN, (requests, length), np.uint32))
