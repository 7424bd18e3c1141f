"""Layers and whole models whose ranks write into each other's windows: what they give over the communicator, as one pass and as two
halves. Ranks are threads, so their windows are tensors that all of them have."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch

from lockstep_worker.collectives import Group, SharedMemory
from lockstep_worker.exchange import backends
from lockstep_worker.exchange.placement import Sharding
from lockstep_worker.exchange.symmetric import Symmetric
from tests.kernels import test_dual_batch as dual
from tests.kernels.test_dual_batch import directory  # noqa: F401  (a fixture)
from tests.kernels.test_sharded_experts import PATTERNS, ROUTINGS, Layer, hidden_states, tokens_of
from tests.ranks import run_ranks

MOST = 12  # tokens of a rank


@pytest.fixture(autouse=True)
def windows_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`share_memory` between threads."""
    calls: Counter[int] = Counter()
    memory: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    lock = threading.Lock()

    def shared(group: Group, nbytes: int, device: torch.device) -> SharedMemory:
        with lock:
            number = calls[group.place.rank]
            calls[group.place.rank] += 1
            if not memory[number]:
                memory[number] += [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(group.place.size)]
        return SharedMemory(memory[number])

    monkeypatch.setattr(backends, "share_memory", shared)


@pytest.mark.parametrize("backend", ["symmetric", "auto"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_gives_what_the_whole_one_does(size: int, backend: str) -> None:
    layer = Layer.drawn(ROUTINGS["softmax"])
    whole = layer.whole()

    def work(group: Group) -> None:
        rank = group.place.rank
        layers = layer.sharded(Sharding(size, rank, 4, backend=backend, max_rows=MOST))
        layers.join(group)
        assert isinstance(layers.layers[0].exchange, Symmetric)
        assert layers.exchange_bytes(MOST, captured=True) >= layers._room(MOST).held
        for pattern in PATTERNS:
            for seed in range(2):
                for capacity in (
                    MOST,
                    0,
                    MOST + 3,
                ):  # through windows, with counts, and more than windows have room for
                    x, live = hidden_states(rank, seed, pattern)
                    got = layers.layers[seed](x.clone(), tokens_of(x, live, layers, capacity=capacity))
                    torch.testing.assert_close(got[live], whole(x, live)[live], rtol=1e-5, atol=1e-5)

    run_ranks(size, 1, work)


@pytest.mark.parametrize("deterministic", [True, False])
def test_halves_are_one_pass(directory: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Two exchanges are under way at a time there; results come back apart where bits must not depend on places."""
    monkeypatch.setattr(dual, "Sharding", partial(Sharding, backend="symmetric", max_rows=MOST))

    def work(group: Group) -> float:
        difference, _ = dual.differences(directory, group, dual.WORK[group.place.rank], deterministic=deterministic)
        group.check()
        group.close()
        return difference

    assert max(run_ranks(2, 1, work)) <= (0.0 if deterministic else dual.CLOSE)
