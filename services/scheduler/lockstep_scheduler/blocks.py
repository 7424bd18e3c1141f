"""Paged KV blocks of one DP rank: who owns them, and which hold a prefix that others may share. Pure bookkeeping.

Every block is in exactly one of three states, and free + cached + owned = total at all times (block 0, the null block, is
outside):

- owned:  referenced by at least one choice;
- cached: referenced by none, but its content is known by a key and can be shared again; evicted in LRU order;
- free:   content unknown.

A key names a block's content *and* everything before it: keys are chained (`chain`), so that a lookup of the longest prefix
is a walk. The root of a chain is typed and length-prefixed, hence a model, an adapter and a tenant's salt never meet.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from lockstep_common.steps import U32

Key = bytes

_SECRET = secrets.token_bytes(32)  # nobody outside can compute a key, so nobody can aim for a collision


def root(model: str, weights_epoch: int, adapter: str, salt: str) -> Key:
    """The key before the first block: everything that makes equal tokens have different KV."""
    digest = hashlib.blake2b(digest_size=16, key=_SECRET)
    for kind, value in (("model", model), ("weights", str(weights_epoch)), ("adapter", adapter), ("salt", salt)):
        data = value.encode()
        digest.update(f"{kind}:{len(data)}:".encode() + data)
    return digest.digest()


def chain(start: Key, tokens: U32, block_size: int) -> list[Key]:
    """Keys of the full blocks of `tokens`, the first chained to `start`."""
    data = tokens.astype("<u4", copy=False).tobytes()
    width = 4 * block_size
    keys, key = [], start
    for i in range(0, len(data) - width + 1, width):
        key = hashlib.blake2b(key + data[i : i + width], digest_size=16, key=_SECRET).digest()
        keys.append(key)
    return keys


class BlockPool:
    """Blocks 1 .. num_blocks - 1. Raises AssertionError on misuse: the callers are ours."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 1 and block_size > 0
        self.block_size = block_size
        self.total = num_blocks - 1
        self._refs = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._by_key: dict[Key, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack; low numbers first
        self._news: list[tuple[int, Key]] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def owned(self) -> int:
        return self.total - self.available

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return len(self._free) + len(self._cached)

    @property
    def known(self) -> Mapping[Key, int]:
        """The block of each known key: a live view, to ask many pools for one key."""
        return self._by_key

    @property
    def usage(self) -> float:
        return self.owned / self.total

    def lookup(self, keys: Sequence[Key], limit: int) -> list[int]:
        """Blocks of the longest known prefix of `keys`, at most `limit`. Takes no reference."""
        blocks = []
        for key in keys[:limit]:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def revived(self, blocks: Iterable[int]) -> int:
        """How many of these blocks `share` would take from what is available."""
        return sum(1 for block in blocks if self._refs[block] == 0)

    @property
    def references(self) -> list[int]:
        """References to each block, by number; for checks."""
        return list(self._refs)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block (cached or owned)."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def take(self, count: int) -> list[int]:
        """New blocks of unknown content with one reference each; cached blocks are evicted, oldest first."""
        assert count <= self.available, f"asked for {count} blocks of {self.available}"
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _none = self._cached.popitem(last=False)
                self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block of a choice's table. Tails become eviction's first choice: a prefix without its
        tail is still useful, a tail without its prefix never is."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is not owned"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, key: Key) -> None:
        """An owned block's content is (or will be, when the plan just sent has run) what `key` says. If another block has
        the key already, that one stays the shared one."""
        assert self._refs[block] > 0
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block
            self._news.append((block, key))

    def take_news(self) -> list[tuple[int, Key]]:
        """What was published since the last call."""
        news, self._news = self._news, []
        return news

    def retract(self, published: Iterable[tuple[int, Key]]) -> None:
        """The plan that would have filled these blocks has not run to its end: what they hold is unknown."""
        for block, key in published:
            if self._keys[block] == key:
                self._forget(block)
                if self._refs[block] == 0:
                    del self._cached[block]
                    self._free.append(block)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """The content of owned blocks turned out not to be what their keys say."""
        for block in blocks:
            assert self._refs[block] > 0
            self._forget(block)

    def cut(self, num_blocks: int) -> None:
        """Gives up the blocks from `num_blocks` on, if there are any. None may be owned."""
        assert self.owned == 0 and 1 < num_blocks <= self.total + 1
        for block in range(num_blocks, self.total + 1):
            self._cached.pop(block, None)
            self._forget(block)
        self._free = [block for block in self._free if block < num_blocks]
        del self._refs[num_blocks:], self._keys[num_blocks:]
        self.total = num_blocks - 1

    def check(self) -> None:
        """The invariants; for tests and idle moments."""
        owned = {b for b in range(1, self.total + 1) if self._refs[b] > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & owned or cached & owned), "a block is in two states"
        assert len(free) + len(cached) + len(owned) == self.total, "a block is lost"
        assert self._refs[0] == 0 and min(self._refs) >= 0
        assert all(self._keys[b] is not None for b in cached) and all(self._keys[b] is None for b in free)
        assert {key: block for block, key in enumerate(self._keys) if key is not None} == self._by_key

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
