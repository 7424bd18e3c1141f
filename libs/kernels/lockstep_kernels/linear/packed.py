"""The packed weight."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class Layout(enum.Enum):
    PLAIN = "plain"  # a tensor [out, in]
    ONEDNN = "onednn"  # an opaque tensor of oneDNN's, float32 or bfloat16
    HALF = "half"  # an opaque object of FBGEMM's: float16 weights, float32 in, sums and out
    CUBLAS = "cublas"  # a tensor [out, in] on CUDA; few rows go through an own kernel
    TILES = "tiles"  # the same, always multiplied in tiles of one shape: equal bits for every number of rows
    FP8 = "fp8"  # e4m3 [out, in] on CUDA, with `Packed.scale`; few rows go through an own kernel
    FP8_TILES = "fp8 tiles"  # the same, always in tiles

    @property
    def on_cuda(self) -> bool:
        return self in (Layout.CUBLAS, Layout.TILES, Layout.FP8, Layout.FP8_TILES)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [out_features, in_features] as `linear` wants it. `dtype` is that of its operands and results.

    A bfloat16 weight on a CPU has two forms: this one for float32 operands, which is the faster one for a few rows, and
    `prompt` for bfloat16 operands, which is the faster one for many. They differ in bits, so what chooses must be a property
    of the token, never of the batch: prompt tokens go through the one, generated tokens through the other.
    """

    weight: torch.Tensor | torch.ScriptObject
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    layout: Layout
    dtype: torch.dtype
    prompt: Packed | None = None
    scale: torch.Tensor | None = None  # float32, see `lockstep_kernels.fp8.Fp8Weight`

    @property
    def for_prompts(self) -> Packed:
        """The form that prompt tokens go through; without a second one it is this."""
        return self if self.prompt is None else self.prompt

    def form(self, dtype: torch.dtype) -> Packed:
        """The form for operands of `dtype`; ValueError if there is none."""
        for packed in (self, self.for_prompts):
            if packed.dtype == dtype:
                return packed
        raise ValueError(f"x is {dtype}, this weight takes {self.dtype}")
