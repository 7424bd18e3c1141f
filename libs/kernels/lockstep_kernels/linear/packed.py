"""The packed weight."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class Layout(enum.Enum):
    PLAIN = "plain"  # a tensor [out, in]
    ONEDNN = "onednn"  # an opaque tensor of oneDNN's, float32 or bfloat16
    HALF = "half"  # an opaque object of FBGEMM's: float16 weights, float32 in, sums and out


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [out_features, in_features] as `linear` wants it. `dtype` is that of its operands and results."""

    weight: torch.Tensor | torch.ScriptObject
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    layout: Layout
    dtype: torch.dtype
