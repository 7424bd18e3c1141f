"""Which sequences a pass of latent attention serves, where their latents lie, and the weights that expand them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep_kernels.checks import check_shape


@dataclass(frozen=True, slots=True)
class LatentBatch:
    """B sequences with the new tokens of each one after the other: query_lens[i] of them, the last of seq_lens[i] positions.

    Position p of sequence i lies in slot block_table[i, p // block_size] * block_size + p % block_size. In a decode step
    every sequence has one new token; there the host's lengths are not asked for, and may be empty.
    A captured prefill pass has `query_starts`, `tokens` and `cached`, and nothing on the host: sequence i has the new tokens
    query_starts[i] .. query_starts[i + 1], which may be none; rows from query_starts[B] up to `tokens` belong to no sequence
    and become zeros. All its sequences together have at most `cached` positions before their new tokens.

    Not `causal`, for `attend` only: all positions are earlier than the new tokens, whose own latents are elsewhere, and each new
    token sees all of them. A sequence may then have no position, and so may one of a decode step.
    """

    decode: bool
    query_lens: tuple[int, ...]
    host_seq_lens: tuple[int, ...]
    seq_lens: torch.Tensor  # [B] int64, on the device
    block_table: torch.Tensor  # [B, W] int64
    block_size: int
    query_starts: torch.Tensor | None = None  # [B + 1] int64
    tokens: int = 0
    cached: int = 0
    causal: bool = True

    def __post_init__(self) -> None:
        if not self.seq_lens.shape[0] == self.block_table.shape[0]:
            raise ValueError("seq_lens and block_table disagree about the number of sequences")
        if not len(self.query_lens) == len(self.host_seq_lens):
            raise ValueError("query_lens and host_seq_lens disagree about the number of sequences")
        if self.query_starts is not None:
            check_shape("query_starts", self.query_starts, (self.seq_lens.shape[0] + 1,))
            if self.decode or self.tokens <= 0 or self.query_lens or not self.causal:
                raise ValueError(
                    "a captured prefill pass is causal, has query_starts and tokens, and no lengths on the host"
                )
        elif not self.decode and len(self.query_lens) != self.seq_lens.shape[0]:
            raise ValueError("a prefill pass needs the lengths of all its sequences on the host")
        if self.decode and any(new != 1 for new in self.query_lens):
            raise ValueError(f"a decode step has one new token a sequence, not {self.query_lens}")
        for new, total in zip(self.query_lens, self.host_seq_lens, strict=True):
            fits = total >= 0 if self.decode or not self.causal else new <= total
            if not (new > 0 and fits and total <= self.block_table.shape[1] * self.block_size):
                raise ValueError(f"a sequence of {total} positions with {new} new ones does not fit its block table")


@dataclass(frozen=True, slots=True)
class Expansion:
    """The product that turns a latent into keys and values: weight [H, nope + value, rank] (kv_b_proj, head by head).

    Of each head the first `nope` rows give the part of the key that is not rotated, the others the value. Expanded keys are
    keys @ latent; absorbed, the same weights meet the query instead: q . (keys @ latent) = (q @ keys) . latent.
    """

    weight: torch.Tensor
    nope: int

    @property
    def heads(self) -> int:
        return self.weight.shape[0]

    @property
    def value(self) -> int:
        """Width of a value."""
        return self.weight.shape[1] - self.nope

    @property
    def rank(self) -> int:
        """Width of a latent, without the rotated key beside it."""
        return self.weight.shape[2]

    @property
    def keys(self) -> torch.Tensor:
        """[H, nope, rank], a view."""
        return self.weight[:, : self.nope]

    @property
    def values(self) -> torch.Tensor:
        """[H, rank, value], a view."""
        return self.weight[:, self.nope :].transpose(1, 2)


def takes_width(width: int) -> bool:
    """Whether CUDA kernels take a part of a latent, compressed or rotated, of that width."""
    return width >= 16 and not width & (width - 1)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all layers of a pass share: angles and slots of its tokens, and the device's plan of the work."""

    cos: torch.Tensor  # float32 [T, rope / 2]
    sin: torch.Tensor
    slots: torch.Tensor  # [T] int64
    interleaved: bool
    plan: object
