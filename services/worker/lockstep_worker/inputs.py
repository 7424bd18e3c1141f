"""`StepInputs`: everything one forward pass reads, gathered from the rows. Frozen; the model and the sampler see only this."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lockstep_common.steps import Kind
from lockstep_worker.scoring import Scored


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T tokens of B sequences, of which S tokens need logits. Device tensors unless said otherwise.

    With `scored`, the last of these S are needed for that; all before them sample.

    A decode step has T = B = S (one token a sequence). A prefill pass has the chunks one after the other; only a chunk
    that reaches the end of its row's tokens needs logits. A placeholder has T = B = S = 0. In a captured step the host knows no
    lengths: query_lens and host_seq_lens are empty, block tables are as wide as rows have them; in a captured prefill pass the
    last tokens, sequences and rows of logits_index may be nobody's.

    Ranks that keep sequences together (context parallelism) have the same inputs but for the slots: a token's is 0, in the null
    block, on all ranks but the one that keeps it. An entry of a block table then stands for a block on each of them.
    """

    kind: Kind
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, position of each token in its sequence
    rows: torch.Tensor  # [B] int64, row of each sequence
    query_starts: torch.Tensor  # [B + 1] int64, first token of each sequence in the batch
    seq_lens: torch.Tensor  # [B] int64, tokens of the sequence in the KV cache after this pass
    block_tables: tuple[torch.Tensor, ...]  # one [B, W] int64 a KV group, W covers max_seq_len; unused entries are null
    slots: tuple[torch.Tensor, ...]  # one [T] int64 a KV group: block * block_size + offset where the token's KV goes
    logits_index: torch.Tensor  # [S] int64 into T
    query_lens: tuple[int, ...]  # [B] host
    host_seq_lens: tuple[int, ...]  # [B] host
    max_seq_len: int  # host: the largest of seq_lens, or a bound on it
    live: torch.Tensor | None = (
        None  # [T] bool: tokens of rows that are alive; None: all. Others are routed to no expert
    )
    logits_live: torch.Tensor | None = None  # [S] bool: rows of logits_index that are needed; None: all
    scored: Scored | None = None
    expert_rows: int = 0  # host: the most tokens that any rank brings to its experts, as all ranks know; 0: none knows
    dual_batch: bool = False  # host: all ranks compute the pass as two halves that take turns, see `overlap`


def one_token_each(inputs: StepInputs) -> StepInputs:
    """The same pass over sequences of one new token each, as a decode step has them: every token is the last of its own.

    So tokens that were generated before are computed again as they were then. All of a layer's keys and values must be written
    before it attends.
    """
    tokens, sequences = inputs.token_ids.shape[0], inputs.seq_lens.shape[0]
    if tokens == sequences:
        return inputs
    device = inputs.token_ids.device
    owner = torch.repeat_interleave(
        torch.arange(sequences, device=device), inputs.query_starts.diff(), output_size=tokens
    )
    lens = zip(inputs.query_lens, inputs.host_seq_lens, strict=True)
    return replace(
        inputs,
        rows=inputs.rows[owner],
        query_starts=torch.arange(tokens + 1, device=device),
        seq_lens=inputs.positions + 1,
        block_tables=tuple(table[owner] for table in inputs.block_tables),
        query_lens=(1,) * tokens,
        host_seq_lens=tuple(length for new, total in lens for length in range(total - new + 1, total + 1)),
    )
