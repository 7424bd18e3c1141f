"""Which rank computes which token of a prompt that R of them prefill together.

Later tokens attend to more keys, so equal runs of tokens would be unequal work. A prompt's n new tokens are padded to 2R chunks of
c = ceil(n / 2R), of which rank r computes number r, the *low* one, and number 2R - 1 - r, the *high* one, its mirror image: the
pairs of queries and keys of both are 2R c^2 + c, whatever r. All ranks compute 2c rows, padding included, so what they gather has
one shape: row by row rank 0's, rank 1's, ...; of each rank every prompt's low, then high chunk.

Positions here are counted among a prompt's new tokens. Pure functions of lengths that all ranks know.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep_worker.protocol import spans

I64 = npt.NDArray[np.int64]


def chunk_sizes(lens: I64, ranks: int) -> I64:
    """c of each prompt; lens [B] of at least 1."""
    sizes: I64 = -(-lens // (2 * ranks))
    return sizes


def local_rows(lens: I64, ranks: int, rank: int) -> tuple[I64, I64]:
    """What a rank computes, row by row: (prompts, positions), each [2 sum(c)]. A position from lens on is padding."""
    sizes = chunk_sizes(lens, ranks)
    prompts, rows = spans(np.zeros_like(sizes), 2 * sizes)
    size = sizes[prompts]
    high = rows >= size
    positions: I64 = np.where(high, (2 * ranks - 1 - rank) * size + rows - size, rank * size + rows)
    return prompts, positions


def gathered_rows(lens: I64, ranks: int) -> tuple[I64, I64]:
    """The same of all ranks, in the order in which they are gathered: each [R * 2 sum(c)]."""
    prompts, positions = zip(*(local_rows(lens, ranks, rank) for rank in range(ranks)), strict=True)
    return np.concatenate(prompts), np.concatenate(positions)


def gathered_index(lens: I64, ranks: int) -> I64:
    """Where among the gathered rows each token is, token by token and prompt by prompt: [sum(lens)]."""
    sizes = chunk_sizes(lens, ranks)
    prompts, positions = spans(np.zeros_like(lens), lens)
    chunk, offset = np.divmod(positions, sizes[prompts])
    rank = np.minimum(chunk, 2 * ranks - 1 - chunk)
    first = 2 * (np.cumsum(sizes) - sizes)[prompts]
    index: I64 = rank * 2 * sizes.sum() + first + (chunk >= ranks) * sizes[prompts] + offset
    return index


def causal_work(lens: I64, ranks: int) -> I64:
    """Pairs of a new token and a new key that it sees, by the rank that computes them: [R]. Padding is not counted."""
    work = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        prompts, positions = local_rows(lens, ranks, rank)
        work[rank] = (positions + 1)[positions < lens[prompts]].sum()
    return work


@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighbouring prompts' tokens in the KV cache, small enough to be gathered at once.

    Of prompt first + i: counts[i] entries of its block table from starts[i] on, in which it has tokens[i] tokens.
    """

    first: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: tuple[int, ...]


def prefix_pieces(prefixes: I64, block_size: int, most_blocks: int) -> tuple[Piece, ...]:
    """Cuts the tokens that prompts have in the KV cache, prefixes[i] of each, into pieces of at most `most_blocks` blocks.

    A block has block_size tokens, on all ranks together. Every token is in one piece; pieces are in the order of prompts and of
    positions, and all but the last are full.
    """
    found: list[Piece] = []
    parts: list[tuple[int, int, int, int]] = []  # prompt, start, count, tokens
    room = most_blocks
    for prompt, tokens in enumerate(prefixes.tolist()):
        start, blocks = 0, -(-tokens // block_size)
        while start < blocks:
            count = min(room, blocks - start)
            parts.append((prompt, start, count, min(tokens - start * block_size, count * block_size)))
            start, room = start + count, room - count
            if room == 0:
                found.append(_piece(parts))
                parts, room = [], most_blocks
    return (*found, _piece(parts)) if parts else tuple(found)


def _piece(parts: list[tuple[int, int, int, int]]) -> Piece:
    first, last = parts[0][0], parts[-1][0]
    columns = np.zeros((3, last - first + 1), np.int64)  # prompts without a prefix between others stay 0
    for prompt, *values in parts:
        columns[:, prompt - first] = values
    starts, counts, tokens = (tuple(column) for column in columns.tolist())
    return Piece(first, starts, counts, tokens)
