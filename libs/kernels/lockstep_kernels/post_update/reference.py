"""What a step leaves behind, in plain torch: outcome words, with the ends that the device itself decides."""

from __future__ import annotations

from typing import Final

import torch

from lockstep_kernels.post_update.state import RowState

NO_WORD: Final = -1  # in place of the outcome word of a row that is not alive


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


def finish(
    index: torch.Tensor,
    tokens: torch.Tensor,
    bad: torch.Tensor | None,
    state: RowState,
    ring: torch.Tensor,
    cursor: torch.Tensor,
    bits: tuple[int, int, int, int],
) -> None:
    """`bits`: row_shift, stop_bit, length_bit, fault_bit."""
    row_shift, stop_bit, length_bit, fault_bit = bits
    live = state.alive[index]
    line = ring[cursor % len(ring)]  # a copy
    line[0, : len(index)] = NO_WORD
    places = live.nonzero()[:, 0]
    rows, tokens = index[places], tokens[places]
    lengths = state.lengths[rows]
    words = outcome_words(
        tokens,
        rows << row_shift,
        stop_ids=state.stop_ids[rows],
        lengths=lengths + 1,
        limits=state.limits[rows],
        bad=None if bad is None else bad[places],
        stop_bit=stop_bit,
        length_bit=length_bit,
        fault_bit=fault_bit,
    )
    line[0, places] = words
    ring[cursor % len(ring)] = line
    cursor += 1
    state.history[rows, lengths.clamp(max=state.history.shape[1] - 1)] = tokens
    state.last[rows] = tokens
    state.lengths[rows] = lengths + 1
    state.alive[rows] = (words & (stop_bit | length_bit | fault_bit)) == 0
    if state.counts is not None:
        state.counts[rows, tokens] += 1
