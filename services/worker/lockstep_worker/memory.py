"""How much memory the KV cache gets."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Final

import torch

from lockstep_common.errors import ConfigError
from lockstep_worker.kv import KvSpec

log = logging.getLogger(__name__)

GIB: Final = 1 << 30
_TOKENS_A_ROW: Final = 2048  # that the CPU's default has room for
_CUDA_SHARE: Final = 0.9


def num_blocks(
    specs: Sequence[KvSpec],
    *,
    block_size: int,
    max_rows: int,
    max_model_len: int,
    memory_gb: float,
    device: torch.device,
) -> int:
    """Blocks of the KV cache with the null block; logs what went where. ConfigError if not even one sequence fits."""
    per_block = sum(spec.bytes_per_block(block_size) for spec in specs)
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else _host_memory()
    needed = 1 + -(-max_model_len // block_size)
    per_row = -(-min(max_model_len, _TOKENS_A_ROW) // block_size)
    if memory_gb:
        blocks, why = int(memory_gb * GIB) // per_block, f"{memory_gb:g} GiB as set"
    elif device.type == "cuda":
        blocks, why = int(free * _CUDA_SHARE) // per_block, f"{_CUDA_SHARE:.0%} of what is free"
    else:
        blocks = min(max(needed, 1 + max_rows * per_row), total // 4 // per_block)
        why = f"{max_rows} rows of {min(max_model_len, _TOKENS_A_ROW)} tokens, at most a quarter of the memory"
    if blocks < needed:
        raise ConfigError(
            f"the KV cache has room for {max(0, blocks - 1) * block_size} tokens ({why}), less than max_model_len "
            f"{max_model_len}: lower max_model_len or raise kv_cache_memory_gb to {needed * per_block / GIB:.2f}"
        )
    log.info(
        "memory on %s: %.2f of %.2f GiB free with the weights loaded; KV cache %.2f GiB = %d blocks of %d tokens (%s)",
        device,
        free / GIB,
        total / GIB,
        blocks * per_block / GIB,
        blocks,
        block_size,
        why,
    )
    return blocks


def _host_memory() -> tuple[int, int]:
    """(free, total) bytes of the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
