"""What `lm_head` means."""

from __future__ import annotations

import torch


def lm_head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See the public function; `weight` is plain [vocab, d]."""
    return hidden.float() @ weight.float().T
