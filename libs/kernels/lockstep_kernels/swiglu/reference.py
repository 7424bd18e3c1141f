"""What `swiglu` means."""

from __future__ import annotations

import torch


def swiglu(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the public function; the weights are plain [i, d]."""
    gated = torch.nn.functional.silu(torch.nn.functional.linear(x, gate, gate_bias))
    return gated * torch.nn.functional.linear(x, up, up_bias)
