"""What a step leaves behind, in plain torch: outcome words, with the ends that the device itself decides."""

from __future__ import annotations

import torch


def outcome_words(
    tokens: torch.Tensor,
    row_bits: torch.Tensor,
    *,
    stop_ids: torch.Tensor | None,
    lengths: torch.Tensor,
    limits: torch.Tensor | None,
    bad: torch.Tensor | None,
    stop_bit: int,
    length_bit: int,
    fault_bit: int,
) -> torch.Tensor:
    """[B] int64: token | row_bits | the bit of the row's end, if it ends: fault before stop before length.

    tokens [B] int64, just sampled; row_bits [B] int64; stop_ids [B, s] int64 (pad: repeat, or -1); lengths [B] int64 with the
    new token; limits [B] int64; bad [B] bool. None: no row of the batch can end that way.
    """
    words = tokens | row_bits
    end: torch.Tensor | None = None
    if limits is not None:
        end = (lengths >= limits) * length_bit
    if stop_ids is not None:
        stopped = (tokens[:, None] == stop_ids).any(1)
        end = stopped * stop_bit if end is None else end.masked_fill_(stopped, stop_bit)
    if bad is not None:
        end = bad * fault_bit if end is None else end.masked_fill_(bad, fault_bit)
    return words if end is None else words | end
