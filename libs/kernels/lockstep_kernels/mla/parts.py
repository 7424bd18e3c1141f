"""The parts of latent attention on CUDA that are called one by one where a sequence's latents lie in several caches.

Decode is absorbed, as in `lockstep_kernels.mla.cuda`. Of prompts all keys, those of the pass too, come from the cache: they are
gathered and expanded in pieces of bounded size, each merged into the result by log-sum-exp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from lockstep_kernels import dependent
from lockstep_kernels.mla import cuda, kernel
from lockstep_kernels.mla.batch import Expansion, LatentBatch
from lockstep_kernels.rms_norm import Norm


@dataclass(frozen=True, slots=True)
class KeysPlan:
    """The work of a pass whose keys all lie in one cache."""

    tiling: cuda.Tiling
    pieces: tuple[cuda.Piece, ...]


def plan(batch: LatentBatch, expansion: Expansion, dtype: torch.dtype) -> cuda.DecodePlan | KeysPlan:
    """See the public function."""
    if batch.decode:
        split = cuda.choose_split(expansion.heads, batch.block_size, dtype, batch.seq_lens.device)
        return cuda.plan_decode(batch.seq_lens, batch.block_table, batch.block_size, expansion, split)
    return plan_keys(batch, expansion, dtype, cuda.choose_tiling(dtype))


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: cuda.DecodePlan | KeysPlan,
    expansion: Expansion,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """See the public function `attend`."""
    if isinstance(plan, cuda.DecodePlan):
        cuda.decode(q, absorb(q, expansion), cache, plan, expansion, scale, out, lse=lse)
        return
    tokens, heads, _ = q.shape
    if out.dtype == torch.float32 and out.is_contiguous():
        state = out[:tokens]
    else:
        state = torch.empty(tokens, heads * expansion.value, dtype=torch.float32, device=q.device)
    state.zero_()
    if lse is None:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    lse.fill_(-torch.inf)
    rows = cache.view(-1, cache.shape[-1])
    for piece in plan.pieces:
        cuda.launch(q, rows[piece.slots], piece.spans, plan.tiling, expansion, scale, state, lse, state, True)
    lse.mul_(math.log(2))
    if state.data_ptr() != out.data_ptr():
        out[:tokens].copy_(state)


def plan_keys(
    batch: LatentBatch, expansion: Expansion, dtype: torch.dtype, tiling: cuda.Tiling, piece: int | None = None
) -> KeysPlan:
    """As `plan_prompts`. A query is in no span whose keys it does not see, so that each span has a key for all its queries."""
    if piece is None:
        piece = max(1, cuda.PIECE_BYTES // (expansion.weight[..., 0].numel() * dtype.itemsize))
    pieces: list[list[cuda.Span]] = []
    owners = [(i, total) for i, total in enumerate(batch.host_seq_lens) if total]
    first, room = 0, 0
    for new, total in zip(batch.query_lens, batch.host_seq_lens, strict=True):
        position = 0
        while position < total:
            if not room:
                pieces.append([])
                room = piece
            count = min(total - position, room)
            blind = max(0, position - (total - new)) if batch.causal else 0  # queries before these keys
            seen = total - new + blind + 1 - position if batch.causal else count
            pieces[-1] += cuda.tiles(tiling.rows, first + blind, new - blind, piece - room, count, seen)
            position, room = position + count, room - count
        first += new
    spans = cuda.uploaded(pieces, batch.seq_lens.device)
    slots = torch.split(cuda.cached_slots(batch, owners), piece) if owners else ()
    return KeysPlan(tiling, tuple(cuda.Piece(*pair) for pair in zip(slots, spans, strict=True)))


def finish_latents(latents: torch.Tensor, norm: Norm, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """See the public function."""
    _finish_alone(None, latents, norm, cos, sin, interleaved)


def rotate_queries(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """See the public function."""
    _finish_alone(q, None, None, cos, sin, interleaved)


def _finish_alone(
    q: torch.Tensor | None,
    latents: torch.Tensor | None,
    norm: Norm | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> None:
    """Norm and rotation of latents, or rotation of queries, without a cache."""
    tokens, rope = cos.shape[0], 2 * cos.shape[1]
    heads, width, q_token, q_head = (1, rope, 0, 0) if q is None else (*q.shape[1:], *q.stride()[:2])
    gain, eps = norm if norm is not None else (None, 0.0)
    pdl = dependent.supported(cos.device)
    kernel.finish_kernel[(tokens,)](
        q, latents, gain, cos, sin, None, None, None, None,
        tokens, q_token, q_head, 0 if latents is None else latents.stride(0), 0, eps,
        HEADS=heads, BLOCK_H=triton.next_power_of_2(heads), NOPE=width - rope, BLOCK_NOPE=16, ROPE=rope,
        RANK=16 if gain is None else gain.shape[0], INTERLEAVED=interleaved, ROWS=16, COLUMNS=16, PRECISION="ieee",
        PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip


def absorb(q: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    """[T, H, rank]: finished queries times the weights that would expand keys."""
    tokens, heads, _ = q.shape
    rank, nope = expansion.rank, expansion.nope
    absorbed = torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
    rows, columns = cuda.absorbed_tile(tokens, rank)
    pdl = dependent.supported(q.device)
    kernel.absorb_kernel[(triton.cdiv(tokens, rows) * heads * (rank // columns),)](
        q, expansion.weight, absorbed, tokens, q.stride(0), q.stride(1), expansion.weight.stride(0),
        HEADS=heads, NOPE=nope, BLOCK_NOPE=max(16, triton.next_power_of_2(nope)), RANK=rank, ROWS=rows,
        COLUMNS=columns, PRECISION=cuda.precision(q), PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    return absorbed
