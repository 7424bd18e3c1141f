"""What `linear` means."""

from __future__ import annotations

import torch


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = False,
    times: torch.Tensor | None = None,
    plus: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the public function; `weight` is plain [out, in]."""
    y = torch.nn.functional.linear(x, weight, bias)
    if silu:
        return torch.nn.functional.silu(y)
    if times is not None:
        return y * times
    return y if plus is None else y + plus
