"""Which experts tokens go to: noted in one run of a model, imposed on another.

Where two experts are about as good, rounding decides between them, and what follows is then another function of the prompt: neither
run is wrong, and no tolerance for their difference is right. With the same experts imposed, a model with experts may differ by
what rounding does to one without; and how often the choices differ is counted by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lockstep_kernels import moe

DRAWS = 16  # of noise


@dataclass(frozen=True)
class Route:
    """What the tokens [T] of a sequence were given in one layer."""

    ids: torch.Tensor  # int32 [T, k]
    weights: torch.Tensor  # float32 [T, k]
    unsure: torch.Tensor  # [T]: how likely noise changes the choice

    def of(self, start: int, end: int) -> Route:
        return Route(self.ids[start:end], self.weights[start:end], self.unsure[start:end])


@dataclass
class Tally:
    """Choices, those that differed, and how many were expected to."""

    chosen: int = 0
    differed: int = 0
    expected: float = 0.0

    def check(self) -> None:
        """Not more than four standard deviations above what noise would do."""
        allowed = self.expected + 4 * self.expected**0.5
        assert self.differed <= allowed, (
            f"{self.differed} of {self.chosen} choices differ, {self.expected:.1f} expected"
        )


@dataclass
class Routes:
    """A stand-in for `moe.choose`. Without `imposed` it notes what is chosen, else a forward's i-th choice becomes imposed[i]."""

    noise: float  # standard deviation of the logits that a choice must be expected to bear
    noted: list[Route] = field(default_factory=list)
    imposed: list[Route] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    @contextmanager
    def active(self) -> Iterator[None]:
        real = moe.choose

        def choose(x: torch.Tensor, gate: moe.Gate, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            ids, weights = real(x, gate, **options)
            if not self.imposed:
                self.noted.append(Route(ids, weights, self._unsure(x, gate, ids, options)))
                return ids, weights
            return self._impose(self.imposed.pop(0), ids)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe, "choose", choose)
            yield

    def impose(self, parts: Sequence[Sequence[Route]], device: torch.device) -> None:
        """For the next forward: the routes of its tokens, a list of layers for each chunk."""
        self.imposed = [
            Route(*(torch.cat([getattr(r, name) for r in layer]).to(device) for name in ("ids", "weights", "unsure")))
            for layer in zip(*parts, strict=True)
        ]

    def take(self, tokens: int) -> list[Route]:
        """What was noted since, of the first `tokens` tokens of a pass; others pad it."""
        noted, self.noted = self.noted, []
        return [route.of(0, tokens) for route in noted]

    def _impose(self, route: Route, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(route.ids)
        assert count <= len(ids)
        self.tally.chosen += count
        self.tally.differed += int(_differ(ids[:count], route.ids).sum())
        self.tally.expected += float(route.unsure.sum())
        pad = torch.nn.functional.pad
        padding = (0, 0, 0, len(ids) - count)
        return pad(route.ids, padding, value=-1), pad(route.weights, padding)

    def _unsure(self, x: torch.Tensor, gate: moe.Gate, ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        logits = moe.gate_logits(x, gate, norm=options.get("norm"))
        generator = torch.Generator().manual_seed(len(self.noted))
        changed = torch.zeros(len(ids))
        for _ in range(DRAWS):
            noisy = logits + self.noise * torch.randn(logits.shape, generator=generator)
            others = moe.route(noisy, gate.routing, correction=gate.correction, shared=options.get("shared", 0))[0]
            changed += _differ(others, ids)
        return changed / DRAWS


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[T] bool: not the same experts, in whatever order."""
    return (a.sort(-1).values != b.sort(-1).values).any(-1)
