"""The worker's model alone, without rows, sampling or wire: what the machine gives before anything is served.

python -m lockstep_bench.worker_alone MODEL_DIR [--dtype bfloat16] [--context 128] [--batch 1 8] [--prompt 512]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep_common.steps import Kind
from lockstep_worker.inputs import StepInputs

BLOCK_SIZE = 16


def step_inputs(
    kind: Kind, chunks: Sequence[tuple[Sequence[int], int]], tables: Sequence[Sequence[int]], block_size: int
) -> StepInputs:
    """One pass over `chunks` of (tokens, position of the first); each chunk's last token gets logits."""
    lens = tuple(start + len(tokens) for tokens, start in chunks)
    width = -(-max(lens, default=1) // block_size)
    table = torch.zeros(len(chunks), width, dtype=torch.int64)
    for row, blocks in zip(table, tables, strict=True):
        kept = torch.tensor(blocks[:width], dtype=torch.int64)
        row[: len(kept)] = kept
    sizes = [len(tokens) for tokens, _ in chunks]
    starts = torch.tensor([0, *sizes]).cumsum(0)
    positions = torch.cat([torch.arange(start, end) for (_, start), end in zip(chunks, lens, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(sizes))
    return StepInputs(
        kind=kind,
        token_ids=torch.tensor([token for tokens, _ in chunks for token in tokens]),
        positions=positions,
        rows=torch.arange(len(chunks)),
        query_starts=starts,
        seq_lens=torch.tensor(lens),
        block_tables=(table,),
        slots=(table[owner, positions // block_size] * block_size + positions % block_size,),
        logits_index=starts[1:] - 1,
        query_lens=tuple(sizes),
        host_seq_lens=lens,
        max_seq_len=max(lens),
    )
