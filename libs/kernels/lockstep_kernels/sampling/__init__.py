"""How a token is chosen from the logits of a row. Each op is defined in `reference`; here the fastest equal one is chosen."""

from __future__ import annotations

import torch

from lockstep_kernels.checks import check_shape
from lockstep_kernels.sampling import cpu, reference
from lockstep_kernels.sampling.reference import (
    LOWEST_LOGPROB,
    add_bias,
    apply_bitmask,
    gumbel,
    keep_min_p,
    keep_top_k,
    penalise,
    suppress,
    temper,
)
from lockstep_kernels.sampling.state import Feature, Float, Int, RowTables

__all__ = [
    "LOWEST_LOGPROB",
    "Feature",
    "Float",
    "Int",
    "RowTables",
    "add_bias",
    "apply_bitmask",
    "draw",
    "greedy",
    "gumbel",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "logprobs",
    "penalise",
    "processed",
    "sample_greedy",
    "sample_rows",
    "suppress",
    "temper",
]


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [n] int64, values [n]): the first largest logit of each row [n, V]. A NaN counts as the largest."""
    if logits.is_cuda:
        from lockstep_kernels.sampling import kernel

        return kernel.argmax(logits)[:2]
    return cpu.greedy(logits) if logits.device.type == "cpu" else reference.greedy(logits)


def sample_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [n] int64, bad [n] bool): the first largest logit of each row [n, V]; bad rows have NaN or no finite largest."""
    if logits.is_cuda:
        from lockstep_kernels.sampling import kernel

        tokens, _, bad = kernel.argmax(logits)
        return tokens, bad
    tokens, best = greedy(logits)
    return tokens, ~torch.isfinite(best)


def sample_rows(
    logits: torch.Tensor,
    index: torch.Tensor,
    tables: RowTables,
    *,
    positions: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [n] int64, bad [n] bool): the next token of the rows `index` [n] int64, each as its row of `tables` asks for.

    logits [n, V] float32 (float16 and bfloat16 on CUDA too) may be overwritten. Bad rows have NaN or no finite largest logit: their
    token is void. positions [n] int64: index in its sequence of the token to draw; None: the rows' lengths, which are not
    read otherwise.
    mask [n, ceil(V / 32)] int32: only tokens whose bit is set are possible (see `apply_bitmask`).
    Nothing is read on the host, so a CUDA graph can hold it. A row's token depends neither on the other rows nor on n.
    """
    n, vocab_size = logits.shape
    check_shape("index", index, (n,))
    if positions is not None:
        check_shape("positions", positions, (n,))
    if mask is not None:
        check_shape("mask", mask, (n, -(-vocab_size // 32)))
    if tables.counts is not None:
        check_shape("counts", tables.counts, (tables.counts.shape[0], vocab_size))
    if logits.is_cuda:
        from lockstep_kernels.sampling.rows import kernel as rows

        return rows.sample_rows(logits, index, tables, positions, mask)
    places = tables.lengths[index] if positions is None else positions
    return reference.sample_rows(logits, index, tables, places, mask)


def processed(logits: torch.Tensor, index: torch.Tensor, tables: RowTables, positions: torch.Tensor) -> torch.Tensor:
    """[n, V] float32: the scores that `sample_rows` draws from, up to a constant a row. Greedy rows have temperature 1."""
    return reference.filter_rows(reference.shape_rows(logits, index, tables, positions, None), index, tables)


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities [n] of tokens [n] int64 under logits [n, V], and the `count` best tokens: ids and values [n, count].

    Best first; of equally good tokens any may come first. Log-probabilities are at least LOWEST_LOGPROB.
    """
    check_shape("tokens", tokens, (logits.shape[0],))
    if logits.is_cuda:
        from lockstep_kernels.sampling import kernel

        return kernel.logprobs(logits, tokens, count)
    return reference.logprobs(logits, tokens, count)


def draw(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """[n] int64: a token of softmax(scores [n, V]), given Gumbel noise [n, V]."""
    return cpu.draw(scores, noise) if scores.device.type == "cpu" else reference.draw(scores, noise)


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the fewest best tokens whose probability reaches top_p [n], and those equal to the last of them."""
    return cpu.keep_top_p(scores, top_p) if scores.device.type == "cpu" else reference.keep_top_p(scores, top_p)
