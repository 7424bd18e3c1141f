"""FBGEMM's product with a packed float16 weight: float32 in, sums and out.

float16 holds every bfloat16 weight of its range exactly but those below 2^-14, whose error is at most 2^-25. The kernel
reads weights at nearly the speed of memory where oneDNN's reaches half of it (49152 x 576, one row: 1.6 ms against 2.5 ms on
Zen 4), and adds a row in the same order for any number of rows. It has no bfloat16 arithmetic, so many rows cost twice
oneDNN's time: it is for the head, which sees one row a sequence, and not for the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = 65504.0  # of float16


@dataclass(frozen=True, slots=True)
class Half:
    """A weight [out_features, in_features] in FBGEMM's opaque layout."""

    weight: torch.ScriptObject
    out_features: int
    in_features: int


def can_pack(weight: torch.Tensor) -> bool:
    """True if this machine has the product and float16 the weight's range."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and "fbgemm" in torch.backends.quantized.supported_engines
        and bool(weight.abs().max() <= LARGEST)
    )


def pack(weight: torch.Tensor) -> Half:
    """See the public function."""
    out_features, in_features = weight.shape
    return Half(torch.ops.quantized.linear_prepack_fp16(weight.float(), None), out_features, in_features)


def lm_head(hidden: torch.Tensor, weight: Half) -> torch.Tensor:
    """See the public function."""
    if hidden.shape[0] == 0:
        return torch.empty(0, weight.out_features)
    return torch.ops.quantized.linear_dynamic_fp16(hidden.float(), weight.weight)  # type: ignore[no-any-return]
