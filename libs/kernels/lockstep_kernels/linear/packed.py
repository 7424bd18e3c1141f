"""The packed weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [out_features, in_features] as `linear` wants it; `reordered` means an opaque layout of oneDNN."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    reordered: bool
