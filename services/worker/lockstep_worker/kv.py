"""The paged KV cache: groups of layers that keep the same things, blocks of token slots, block 0 the null block."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep_common.errors import ConfigError
from lockstep_kernels import blocks as ops


@dataclass(frozen=True, slots=True)
class KvSpec:
    """What the layers of one KV group keep of each token: `planes` vectors for each head."""

    kind: str  # "full": every position, paged; "latent": the same, one compressed vector for keys and values
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    planes: int = 2  # keys and values; 1 for latents

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes that one block takes over all layers of the group."""
        return self.planes * self.layers * self.kv_heads * self.head_dim * block_size * self.dtype.itemsize


class KvCache:
    """The blocks of all groups on one device. Who owns which block is the scheduler's business.

    A layer's cache is [num_blocks, planes, kv_heads, block_size, head_dim]: a block's keys, then its values, head by head, as
    attention reads one head's tokens in a row. Everything starts as zero.
    Block 0 is the null block: rows that must not write write there, and nothing reads it.
    """

    def __init__(
        self, specs: Sequence[KvSpec], *, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
    ) -> None:
        """Raises ConfigError if the sizes are not positive or the memory is not there."""
        if num_blocks < 2 or block_size < 1:
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks of {block_size} tokens has no room beside the null block"
            )
        self.specs = tuple(specs)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._groups = tuple(_allocate(spec, num_blocks, block_size, torch.device(device)) for spec in specs)
        self._layers = tuple(group.unbind(0) for group in self._groups)

    def layer(self, group: int, layer: int) -> torch.Tensor:
        """The cache of one layer of a group: [num_blocks, planes, kv_heads, block_size, head_dim], contiguous, a view."""
        return self._layers[group][layer]

    def zero(self, group: int, blocks: torch.Tensor) -> None:
        """Fills `blocks` (int64) with zeros, in every layer."""
        ops.zero(self._groups[group], blocks)

    def copy(self, group: int, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies block src[i] over block dst[i] (int64), in every layer; no block is both source and destination."""
        ops.copy(self._groups[group], src, dst)


def _allocate(spec: KvSpec, num_blocks: int, block_size: int, device: torch.device) -> torch.Tensor:
    shape = (spec.layers, num_blocks, spec.planes, spec.kv_heads, block_size, spec.head_dim)
    try:
        if device.type == "cpu":  # pages that nobody has written yet cost neither memory nor start-up time
            memory = mmap.mmap(-1, math.prod(shape) * spec.dtype.itemsize)
            return torch.frombuffer(memory, dtype=spec.dtype).view(shape)
        return torch.zeros(shape, dtype=spec.dtype, device=device)
    except (RuntimeError, OSError) as error:
        gib = math.prod(shape) * spec.dtype.itemsize / 2**30
        raise ConfigError(f"no memory for a KV cache of {num_blocks} blocks ({gib:.1f} GiB): {error}") from None
