"""A prompt that R workers of a DP rank compute together: who computes what, and who keeps which token.

Both are asked of the worker's own functions: `mirror.local_rows`, `mirror.causal_work`, and `Share`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from lockstep_bench.pictures.svg import Drawing
from lockstep_kernels.prepare import Share
from lockstep_worker import mirror

TOKENS: Final = 64
BLOCK: Final = 4  # tokens of a block on each worker
RANKS: Final = (2, 4)


def chunks(ranks: int) -> list[tuple[int, int, int]]:
    """(worker, start, end) of each chunk, in the order of tokens."""
    found = []
    for rank in range(ranks):
        _, positions = mirror.local_rows(np.array([TOKENS], np.int64), ranks, rank)
        for chunk in np.split(positions, 2):
            found.append((rank, int(chunk[0]), int(chunk[-1]) + 1))
    return sorted(found, key=lambda chunk: chunk[1])


def kept(ranks: int) -> list[tuple[int, int, int]]:
    """(worker, start, end) of each run of tokens that lie in one worker's KV cache, in the order of tokens."""
    keeper = np.full(TOKENS, -1, np.int64)
    for rank in range(ranks):
        keeper[Share(ranks, rank).holds(np.arange(TOKENS), BLOCK * ranks)] = rank
    edges = [0, *(np.flatnonzero(np.diff(keeper)) + 1).tolist(), TOKENS]
    return [(int(keeper[start]), start, end) for start, end in itertools.pairwise(edges)]


_CELL, _ROW = 6.0, 4.6  # units of a token as a key, and as a query
_SIDE, _HEIGHT = TOKENS * _CELL, TOKENS * _ROW
_LEFT, _TOP, _PANEL = 48, 92, 436
_TRIANGLE = _TOP + 34
_STRIPS = _TRIANGLE + _HEIGHT + 36


def draw() -> str:
    picture = Drawing(
        _STRIPS + 122,
        "Mirrored chunks: a prompt that several workers compute together",
        "For 2 and for 4 workers: causal triangles cut into chunks of equal work, and strips of tokens computed and kept.",
    )
    words = f"{TOKENS} tokens in 2R chunks; worker r computes number r and number 2R - 1 - r, so that all have the same work"
    picture.text(24, 54, words, "dim")
    for column, ranks in enumerate(RANKS):
        left = _LEFT + column * (_PANEL + 20)
        picture.text(left, _TOP, f"R = {ranks}", "head")
        picture.text(left + 52, _TOP, f"chunks of {TOKENS // (2 * ranks)} tokens, blocks of {ranks} x {BLOCK}", "dim")
        _draw_triangle(picture, left, ranks)
        _draw_work(picture, left, ranks)
        _draw_strip(picture, left, _STRIPS, "computed by", chunks(ranks), 0)
        _draw_strip(picture, left, _STRIPS + 46, "kept by", kept(ranks), BLOCK * ranks)
    picture.legend(_LEFT, _STRIPS + 104, [(f"rank{rank}", f"worker {rank}") for rank in range(max(RANKS))])
    return picture.render()


def _draw_triangle(picture: Drawing, left: float, ranks: int) -> None:
    """A query a line, the keys that it sees to the right of its start: each chunk is a band of the worker that computes it."""
    picture.text(left, _TRIANGLE - 8, "keys", "dim small")
    picture.text(left - 6, _TRIANGLE + _HEIGHT / 2, "query", "dim small end")
    picture.text(left - 6, _TRIANGLE + 12, "0", "dim small end")
    picture.text(left - 6, _TRIANGLE + _HEIGHT, f"{TOKENS - 1}", "dim small end")
    for number, (rank, start, end) in enumerate(chunks(ranks)):
        top, bottom = _TRIANGLE + start * _ROW, _TRIANGLE + end * _ROW
        corners = [(left, top), (left + start * _CELL, top), (left + end * _CELL, bottom), (left, bottom)]
        picture.polygon(corners, f"chunk rank{rank}")
        middle = (top + bottom) / 2 + (0 if start else (bottom - top) / 8)
        picture.text(left + 8, middle + 4, f"chunk {number}" if start else "0", "on bold small")
    picture.line([(left + _SIDE, _TRIANGLE), (left, _TRIANGLE), (left, _TRIANGLE + _HEIGHT)], "line")


def _draw_work(picture: Drawing, left: float, ranks: int) -> None:
    """Pairs of queries and keys of each worker, as bars in the empty half of the triangle's square."""
    work = mirror.causal_work(np.array([TOKENS], np.int64), ranks)
    x, y, height = left + 0.56 * _SIDE, _TRIANGLE + 4, 16
    picture.text(x, y + 10, "pairs of a query and a key", "dim small")
    for rank, pairs in enumerate(work.tolist()):
        width = 110 * pairs / work.max()
        picture.rect(x, y + 18 + rank * (height + 4), width, height, f"rank{rank}", f"{pairs} pairs")
        picture.text(x + width + 6, y + 30 + rank * (height + 4), f"{pairs}", "small")


def _draw_strip(
    picture: Drawing, left: float, y: float, words: str, parts: Sequence[tuple[int, int, int]], block: int
) -> None:
    picture.text(left, y - 5, words, "dim small")
    for rank, start, end in parts:
        picture.rect(
            left + start * _CELL, y, (end - start) * _CELL, 18, f"token rank{rank}", f"tokens {start} to {end - 1}"
        )
    if block:
        for start in range(0, TOKENS + 1, block):
            picture.line([(left + start * _CELL, y - 3), (left + start * _CELL, y + 24)], "line")
        picture.text(left + block * _CELL / 2, y + 34, "a block", "dim small middle")
