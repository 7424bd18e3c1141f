"""The block pool against a model, and what its keys keep apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lockstep_scheduler.blocks import BlockPool, chain, root

BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Tables of choices that share prefixes; the model keeps each block's content by name and its references."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS + 1, 2)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what a key, once published, promises
        self.released: list[int] = []  # cached blocks in the order of their eviction

    @rule(names=st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=5))
    def admit(self, names: list[bytes]) -> None:
        keys = [b"".join(names[: i + 1]) for i in range(len(names))]
        hits = self.pool.lookup(keys, len(keys))
        assert [self.content[b] for b in hits] == keys[: len(hits)], "a hit on another content"
        new = len(keys) - len(hits)
        if new + self.pool.revived(hits) > self.pool.available:
            return
        self.pool.share(hits)
        before = self.pool.free
        taken = self.pool.take(new)
        evicted = max(0, new - before)
        self.released = [b for b in self.released if b not in hits]
        assert set(taken) >= set(self.released[:evicted]), "eviction is not in LRU order"
        self.released = self.released[evicted:]
        for block, key in zip(taken, keys[len(hits) :], strict=True):
            self.pool.publish(block, key)
            self.content[block] = key if self.pool._keys[block] == key else b""
        self.tables.append(hits + taken)

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 100))
    def release(self, pick: int) -> None:
        table = self.tables.pop(pick % len(self.tables))
        self.pool.release(table)
        still = {b for t in self.tables for b in t}
        self.released += [b for b in reversed(table) if b not in still and self.content[b]]

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 100))
    def withdraw(self, pick: int) -> None:
        table = self.tables[pick % len(self.tables)]
        self.pool.withdraw(table)
        for block in table:
            self.content[block] = b""

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        owned = {b for t in self.tables for b in t}
        assert self.pool.owned == len(owned)
        assert self.pool.free + self.pool.cached + self.pool.owned == self.pool.total == BLOCKS
        assert self.pool.cached == len(self.released)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_tails_are_evicted_before_their_prefix() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.take(3)
    for block, key in zip(blocks, (b"1", b"12", b"123"), strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    pool.take(1)
    assert pool.lookup([b"1", b"12", b"123"], 3) == blocks[:2]


def test_keys_are_typed_and_length_prefixed() -> None:
    roots = [
        root("m", 0, "", ""),
        root("m", 0, "x", ""),
        root("m", 0, "", "x"),
        root("m", 1, "", ""),
        root("mx", 0, "", ""),
        root("m", 0, "xs", ""),
        root("m", 0, "x", "s"),
    ]
    assert len(set(roots)) == len(roots)


def test_chains_do_not_collide_by_joining() -> None:
    start = root("m", 0, "", "")
    one = chain(start, np.array([1, 23, 4, 5], np.uint32), 2)
    two = chain(start, np.array([12, 3, 4, 5], np.uint32), 2)
    assert not set(one) & set(two)
    assert chain(start, np.array([1, 23, 4, 5, 6], np.uint32), 2) == one
    assert chain(one[0], np.array([4, 5], np.uint32), 2) == one[1:]


def test_misuse_is_an_error() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.take(2)
    with pytest.raises(AssertionError):
        pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


@pytest.mark.parametrize("num_blocks", [9, 6, 2])
def test_a_pool_that_is_cut_knows_only_its_first_blocks(num_blocks: int) -> None:
    pool = BlockPool(9, 4)
    keys = [bytes([i]) for i in range(8)]
    blocks = pool.take(6)
    for block, key in zip(blocks, keys, strict=False):
        pool.publish(block, key)
    pool.release(blocks)
    pool.cut(num_blocks)
    pool.check()
    assert pool.available == pool.total == num_blocks - 1
    assert pool.lookup(keys, 6) == [b for b in blocks if b < num_blocks]
    assert sorted(pool.take(num_blocks - 1)) == list(range(1, num_blocks))
