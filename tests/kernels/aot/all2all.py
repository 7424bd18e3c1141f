"""Variants of the exchange between windows: the models' widths, two ranks and eight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lockstep_kernels.all2all import Peers, State, cut, kernel, window_bytes
from tests.kernels import launches


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    shapes = (
        (2048, 8, 2, False, 10**10),
        (2048, 8, 2, False, 10**6),
        (7168, 8, 8, False, 10**10),
        (2048, 6, 4, True, 10**10),
    )
    for hidden, chosen, ranks, apart, limit in shapes:
        name = f"{hidden} wide, {chosen} slots, {ranks} ranks{', apart' if apart else ''}, at most {limit} ns"
        call = partial(exchange, hidden, chosen, ranks, apart, limit)
        yield from launches.variants(name, call, 5)


def exchange(hidden: int, chosen: int, ranks: int, apart: bool, limit: int, tokens: int = 4) -> None:
    """The four parts, the last one with and without a last summand."""
    dtype = torch.bfloat16
    size = window_bytes(ranks, tokens, hidden, chosen, dtype, apart=apart)
    windows = tuple(
        cut(torch.empty(size, dtype=torch.uint8), ranks, tokens, hidden, chosen, dtype, apart=apart)
        for _ in range(ranks)
    )
    counters, failed, fault = (torch.zeros(n, dtype=torch.int32) for n in (3, 1, 1))
    peers = Peers(windows, 1, 16, apart, State(counters, failed, fault), limit)
    x, ids = torch.empty(tokens, hidden, dtype=dtype), torch.empty(tokens, chosen, dtype=torch.int32)
    results = torch.empty(ranks * tokens, *([chosen] if apart else []), hidden, dtype=dtype)
    kernel.send_tokens(x, ids, torch.empty(tokens, chosen), peers, tokens, pdl=True)
    kernel.wait(peers, pdl=True, clock=True)
    kernel.send_results(results, peers, tokens, pdl=True)
    for then in (None, x):
        kernel.add_results(ids, x, then, peers, tokens, pdl=True, clock=True)
