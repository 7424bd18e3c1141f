"""What is asked of a simulated group: requests by time, from a JSONL file or drawn from distributions with a seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep_common.errors import ConfigError

DISTRIBUTIONS = ("fixed", "uniform", "lognormal")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its prompt's first `prefix_tokens` are those of every request with the same `prefix`; it ends by itself after
    `output` tokens, or at `max_tokens` (0: exactly `output`)."""

    arrival: float  # seconds
    prompt: int
    output: int
    prefix: int = -1
    prefix_tokens: int = 0
    max_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.prompt, self.output) < 1 or self.arrival < 0 or not math.isfinite(self.arrival):
            raise ConfigError(f"a request needs an arrival of 0 or later and at least a token each way: {self}")
        if not 0 <= self.prefix_tokens <= self.prompt or self.max_tokens < 0:
            raise ConfigError(f"a prefix is a part of its prompt, and max_tokens is not negative: {self}")

    @property
    def limit(self) -> int:
        """The most tokens that it may generate, as its scheduler is told."""
        return self.max_tokens or self.output

    @property
    def generates(self) -> int:
        return min(self.output, self.limit)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of mean `mean`: all the same; uniform from mean (1 - spread) to mean (1 + spread); or lognormal whose
    logarithm has the standard deviation `spread`."""

    kind: str
    mean: float
    spread: float = 0.0

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        match self.kind:
            case "fixed":
                values = np.full(count, self.mean)
            case "uniform":
                values = rng.uniform(self.mean * (1 - self.spread), self.mean * (1 + self.spread), count)
            case "lognormal":
                values = rng.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread, count)
            case _:
                raise ConfigError(f"lengths are {', '.join(DISTRIBUTIONS)}, not {self.kind!r}")
        counts: npt.NDArray[np.int64] = np.maximum(1, np.rint(values)).astype(np.int64)
        return counts

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`512`, `uniform:512:0.5`, `lognormal:512:0.8`; ConfigError for anything else."""
        words = text.split(":")
        try:
            if len(words) == 1:
                found = cls("fixed", float(words[0]))
            else:
                found = cls(words[0], float(words[1]), float(words[2]) if len(words) > 2 else 0.5)
        except (ValueError, IndexError):
            found = cls("", 0.0)
        if found.kind not in DISTRIBUTIONS or not found.mean >= 1 or not 0 <= found.spread <= 4:
            raise ConfigError(f"lengths {text!r}: give TOKENS, uniform:MEAN:SPREAD or lognormal:MEAN:SIGMA")
        return found


@dataclass(frozen=True, slots=True)
class Drawn:
    """Requests to draw. `rate` a second at Poisson times (0: all at once). The first `prefix_share` of a prompt is one of
    `prefixes` that requests have in common. With `staggered` > 0 so many requests come first that are in mid-answer, as they are
    found in a group that has been running: longer answers more often, at a uniform point of each."""

    count: int
    prompt: Lengths
    output: Lengths
    rate: float = 0.0
    prefix_share: float = 0.0
    prefixes: int = 1
    max_tokens: int = 0
    staggered: int = 0
    seed: int = 0
    longest: int = 0  # prompt and answer together are cut to so many tokens; 0: not


def draw(drawn: Drawn) -> list[Asked]:
    """The same requests for the same `drawn`, in order of arrival."""
    rng = np.random.default_rng(drawn.seed)
    times = np.cumsum(rng.exponential(1 / drawn.rate, drawn.count)) if drawn.rate > 0 else np.zeros(drawn.count)
    prompts, outputs = drawn.prompt.draw(rng, drawn.count), drawn.output.draw(rng, drawn.count)
    if drawn.longest:
        outputs = np.minimum(outputs, drawn.longest - 1)
        prompts = np.minimum(prompts, drawn.longest - outputs)
    shared = np.rint(prompts * drawn.prefix_share).astype(np.int64)
    which = rng.integers(0, max(1, drawn.prefixes), drawn.count)
    asked = [
        Asked(t, p, o, w if s else -1, s, drawn.max_tokens)
        for t, p, o, w, s in zip(
            times.tolist(), prompts.tolist(), outputs.tolist(), which.tolist(), shared.tolist(), strict=True
        )
    ]
    if not drawn.staggered:
        return asked
    picked = rng.choice(drawn.count, drawn.staggered, p=outputs / outputs.sum())
    done = (rng.random(drawn.staggered) * outputs[picked]).astype(np.int64)
    early = [
        replace(asked[i], arrival=0.0, prompt=asked[i].prompt + d, output=asked[i].output - d)
        for i, d in zip(picked.tolist(), done.tolist(), strict=True)
    ]
    return early + asked


def read(path: Path) -> list[Asked]:
    """A JSONL file, a request a line: {"arrival": 0.5, "prompt_tokens": 512, "output_tokens": 64}, and if there is one "prefix"
    (any name) with "prefix_tokens", and "max_tokens". ConfigError names the line that is wrong."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from None
    prefixes: dict[str, int] = {}
    asked = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            prefix = data.get("prefix")
            asked.append(
                Asked(
                    arrival=float(data["arrival"]),
                    prompt=int(data["prompt_tokens"]),
                    output=int(data["output_tokens"]),
                    prefix=-1 if prefix is None else prefixes.setdefault(str(prefix), len(prefixes)),
                    prefix_tokens=0 if prefix is None else int(data["prefix_tokens"]),
                    max_tokens=int(data.get("max_tokens", 0)),
                )
            )
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise ConfigError(f"--trace {path}, line {number}: {error}") from None
    if not asked:
        raise ConfigError(f"--trace {path}: no request in it")
    return sorted(asked, key=lambda a: a.arrival)


def write(path: Path, asked: Sequence[Asked]) -> None:
    """As `read` reads it."""
    path.write_text("".join(json.dumps(line) + "\n" for line in _lines(asked)))


def _lines(asked: Sequence[Asked]) -> Iterator[dict[str, object]]:
    for a in asked:
        line: dict[str, object] = {"arrival": a.arrival, "prompt_tokens": a.prompt, "output_tokens": a.output}
        if a.prefix >= 0:
            line |= {"prefix": a.prefix, "prefix_tokens": a.prefix_tokens}
        yield line | ({"max_tokens": a.max_tokens} if a.max_tokens else {})
