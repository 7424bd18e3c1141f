"""How much memory the KV cache gets: what weights, the largest pass and the graphs leave of what this worker may use."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind
from lockstep_worker import sampling
from lockstep_worker.context import bytes_held
from lockstep_worker.graphs import captures
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache, KvSpec
from lockstep_worker.models import Model
from lockstep_worker.prefill_graphs import bucket_sizes
from lockstep_worker.scoring import rehearse

log = logging.getLogger(__name__)

GIB: Final = 1 << 30
_TOKENS_A_ROW: Final = 2048  # that the CPU's default has room for
_GRAPH_BYTES: Final = 16 << 20  # of one captured step, beside what all of them share
_FLOAT_BYTES: Final = 4
_TOKEN_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the rows of a worker need room for."""

    block_size: int
    max_rows: int
    max_model_len: int
    max_batched_tokens: int
    cp: int = 1  # workers that keep a sequence together

    @property
    def block_tokens(self) -> int:
        """Of a sequence that go with a block: each worker keeps its part."""
        return self.block_size * self.cp

    @property
    def least_blocks(self) -> int:
        """Of one sequence, with the null block."""
        return 1 + -(-self.max_model_len // self.block_tokens)


def default_limits(gpu_bytes: int) -> tuple[int, int]:
    """(rows, tokens of a prefill pass) of a worker that was told neither, on a GPU with so much memory; 0: on a CPU.

    Neither ever falls as memory grows. A large GPU is kept busy only by many rows and long passes; on a small one their
    activations, graphs and sampling tables would take what the KV cache needs.
    """
    if gpu_bytes >= 70 * GIB:
        return 256, 8192
    return (128 if gpu_bytes >= 20 * GIB else 64), 2048


def kv_blocks_on_cpu(specs: Sequence[KvSpec], sizes: Sizes, vocab_size: int, memory_gb: float) -> int:
    """Blocks of the KV cache with the null block; logs what went where. ConfigError if not even one sequence fits."""
    rows = _row_bytes(sizes, vocab_size)
    per_block = sum(spec.bytes_per_block(sizes.block_size) for spec in specs)
    free, total = _host_memory()
    tokens = min(sizes.max_model_len, _TOKENS_A_ROW)
    if memory_gb:
        blocks, why = int(memory_gb * GIB) // per_block, f"{memory_gb:g} GiB as set"
    else:
        wanted = max(sizes.least_blocks, 1 + sizes.max_rows * -(-tokens // sizes.block_tokens))
        blocks = min(wanted, max(0, total // 4 - rows) // per_block)
        why = f"{sizes.max_rows} rows of {tokens} tokens, at most a quarter of the memory with all that rows may take"
    log.info("memory: %.2f of %.2f GiB free with the weights loaded", free / GIB, total / GIB)
    return _checked(blocks, per_block, sizes, why, "lower max_model_len or raise kv_cache_memory_gb")


def kv_blocks_on_cuda(
    model: Model, sizes: Sizes, device: torch.device, *, graphs: bool, memory_gb: float, utilization: float
) -> int:
    """As above, after a pass of the largest size has shown what activations take.

    graphs: steps will be captured; utilization: share of the device's memory that this process may use. What other
    processes hold counts as used.
    """
    specs = model.kv_specs()
    per_block = sum(spec.bytes_per_block(sizes.block_size) for spec in specs)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    try:
        peak = _largest_pass(model, sizes, device) - weights
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"no memory for a prefill pass of {sizes.max_batched_tokens} tokens beside {weights / GIB:.2f} GiB of weights: "
            f"lower max_num_batched_tokens ({error})"
        ) from None
    captured = _captured_bytes(model, sizes, peak) if graphs else 0
    exchanged = _exchange_bytes(model, sizes, captured=graphs)
    shared = bytes_held(sizes.cp, specs, sizes.block_size, sizes.max_batched_tokens) if sizes.cp > 1 else 0
    rows = _row_bytes(sizes, model.vocab_size)
    budget = int(total * utilization) - (total - free) - peak - captured - rows - exchanged - shared
    blocks, why = budget // per_block, f"gpu_memory_utilization {utilization:g}"
    if memory_gb:
        blocks, why = int(memory_gb * GIB) // per_block, f"{memory_gb:g} GiB as set"
    log.info(
        "memory on %s: %.2f GiB in all, %.2f used (weights %.2f), activations of %d tokens %.2f, graphs %.2f, rows %.2f, "
        "tokens on their way to experts and back %.2f, keys and values gathered from other workers %.2f",
        device,
        total / GIB,
        (total - free) / GIB,
        weights / GIB,
        sizes.max_batched_tokens,
        peak / GIB,
        captured / GIB,
        rows / GIB,
        exchanged / GIB,
        shared / GIB,
    )
    return _checked(
        blocks,
        per_block,
        sizes,
        why,
        "lower max_model_len, max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization",
    )


def _row_bytes(sizes: Sizes, vocab_size: int) -> int:
    """Of the rows' tokens, and of what they may ask of sampling."""
    entries = sizes.max_rows + 1  # with the scratch row
    tokens, tables = entries * _TOKEN_BYTES * sizes.max_model_len, entries * sampling.bytes_a_row(vocab_size)
    log.info(
        "rows: %.2f GiB for tokens of %d rows, %.2f for their stop ids, biases and counts of %d tokens of the vocabulary",
        tokens / GIB,
        sizes.max_rows,
        tables / GIB,
        vocab_size,
    )
    return tokens + tables


def _captured_bytes(model: Model, sizes: Sizes, peak: int) -> int:
    """Of captured steps: halved ones too where tokens travel, and prefill passes, whose activations (`peak` at most) are their own."""
    decode = captures(sizes.max_rows, halved=model.experts is not None)
    prefill = len(bucket_sizes(model, sizes.max_batched_tokens, cp=sizes.cp))
    log.info("steps to be captured: at most %d of decode and %d prefill passes", decode, prefill)
    logits = 2 * sizes.max_rows * model.vocab_size * _FLOAT_BYTES
    return (decode + prefill) * _GRAPH_BYTES + logits + (peak if prefill else 0)


def _exchange_bytes(model: Model, sizes: Sizes, *, captured: bool) -> int:
    """For experts on other workers: what prefill passes take if experts are equally busy, and captured steps always."""
    if model.experts is None:
        return 0
    experts, passes = model.experts, 0
    decode = experts.exchange_bytes(sizes.max_rows, captured=True) if captured else 0
    if captured:  # they share memory with each other only where that came free in time
        buckets = bucket_sizes(model, sizes.max_batched_tokens, cp=sizes.cp)
        passes = sum(experts.exchange_bytes(tokens, captured=True) for tokens in buckets)
    prefill = experts.exchange_bytes(sizes.max_batched_tokens, captured=False)
    log.info(
        "experts on other workers: tokens on their way take %.2f GiB in captured decode steps, %.2f in captured prefill passes, "
        "%.2f in other prefill passes if experts are equally busy, and up to %.1f times as much on a rank whose experts are busier "
        "(that is not set aside)",
        decode / GIB,
        passes / GIB,
        prefill / GIB,
        experts.most_over_equal,
    )
    return decode + passes + prefill


def _checked(blocks: int, per_block: int, sizes: Sizes, why: str, knobs: str) -> int:
    if blocks < sizes.least_blocks:
        raise ConfigError(
            f"the KV cache has room for {max(0, blocks - 1) * sizes.block_tokens} tokens ({why}), less than max_model_len "
            f"{sizes.max_model_len}: {knobs}; one sequence takes {sizes.least_blocks * per_block / GIB:.2f} GiB"
        )
    log.info(
        "KV cache: %.2f GiB = %d blocks of %d tokens (%s)",
        blocks * per_block / GIB,
        blocks,
        sizes.block_tokens,
        why,
    )
    return blocks


@torch.inference_mode()
def _largest_pass(model: Model, sizes: Sizes, device: torch.device) -> int:
    """Bytes allocated at the peak of a prefill pass of `max_batched_tokens` tokens; its KV cache is not counted."""
    inputs, blocks = _prefill_inputs(sizes, len(model.kv_specs()), device)
    kv = KvCache(model.kv_specs(), num_blocks=blocks, block_size=sizes.block_size, device=device)
    cache = sum(spec.bytes_per_block(sizes.block_size) for spec in model.kv_specs()) * blocks
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):  # the first one compiles and makes workspaces
        hidden = model.forward(inputs, kv)
        model.logits(hidden)
        rehearse(model.logits, model.vocab_size, hidden)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - cache
    del kv
    torch.cuda.empty_cache()
    return peak


def _prefill_inputs(sizes: Sizes, groups: int, device: torch.device) -> tuple[StepInputs, int]:
    """A pass over sequences as long as they can be, each in blocks of its own, and the number of blocks."""
    size, longest, total = sizes.block_size, sizes.max_model_len, sizes.max_batched_tokens
    lens = [longest] * (total // longest) + ([total % longest] if total % longest else [])
    width = -(-max(lens) // size)
    table = 1 + torch.arange(len(lens) * width, device=device).view(len(lens), width)
    positions = torch.cat([torch.arange(n, device=device) for n in lens])
    owner = torch.repeat_interleave(torch.arange(len(lens), device=device), torch.tensor(lens, device=device))
    slots = table[owner, positions // size] * size + positions % size
    ends = torch.tensor(lens, device=device).cumsum(0)
    starts = torch.nn.functional.pad(ends, (1, 0))
    inputs = StepInputs(
        kind=Kind.PREFILL,
        token_ids=torch.zeros_like(positions),
        positions=positions,
        rows=torch.arange(len(lens), device=device),
        query_starts=starts,
        seq_lens=torch.tensor(lens, device=device),
        block_tables=(table,) * groups,
        slots=(slots,) * groups,
        logits_index=ends - 1,
        query_lens=tuple(lens),
        host_seq_lens=tuple(lens),
        max_seq_len=max(lens),
    )
    return inputs, 1 + len(lens) * width


def _host_memory() -> tuple[int, int]:
    """(free, total) bytes of the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
