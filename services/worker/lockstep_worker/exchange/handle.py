"""What is known of a dispatch: who sent which rows, and where they lie. The fields are those of DeepEP's handles.

R ranks hold P physical expert slots, S = P / R each; rank r has the slots [r S, (r + 1) S). T tokens of k chosen slots each are
sent, N rows arrive: a token once for each rank that has at least one of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import torch

from lockstep_kernels.gather_sum import gather_sum


@dataclass(frozen=True, slots=True)
class Layout:
    """How arrived rows lie.

    Deduplicated: a row for each token and rank, with the token's local slots [k] (-1: elsewhere) and their weights. By rank it
    came from, and the tokens of a rank in their order.
    Expanded: a row for each token and local slot, grouped by slot, with one weight; every group begins at a multiple of
    `alignment`. The rows between groups are undefined, or with `zero_padding` zero.
    """

    expand: bool = False
    alignment: int = 1
    zero_padding: bool = False


DEDUPLICATED: Final = Layout()
EXPANDED: Final = Layout(expand=True)


class Handle(Protocol):
    """Belongs to one dispatch, and leads `combine` back. int32 tensors on the device of the rows; see `Dispatched`."""

    @property
    def do_expand(self) -> bool: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def expert_alignment(self) -> int: ...
    @property
    def num_max_tokens_per_rank(self) -> int: ...
    @property
    def topk_idx(self) -> torch.Tensor: ...
    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor: ...
    @property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor: ...
    @property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor: ...
    @property
    def num_recv_tokens_per_expert_list(self) -> list[int]: ...
    @property
    def recv_src_metadata(self) -> torch.Tensor: ...
    @property
    def num_recv_tokens(self) -> int: ...
    @property
    def num_expanded_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a dispatch with counts sends to each rank and gets from each, known to the host."""

    sources: torch.Tensor  # int64 [sum(sent)] tokens in the order they were sent: by rank, ascending
    arrived: torch.Tensor  # int32 [N] token of the rank it came from
    came: torch.Tensor  # int32 [R] rows from each rank
    returns: torch.Tensor  # int32 [T, k], see `Dispatched.returns`
    sent: tuple[int, ...]  # rows
    received: tuple[int, ...]
    sent_pairs: tuple[int, ...]  # of a token and a slot
    received_pairs: tuple[int, ...]


@dataclass(frozen=True)
class Dispatched:
    """A handle whose fields follow, when they are asked for, from what came.

    Without `traffic` there are rows for num_max_tokens_per_rank tokens of each rank, in their order, whichever have come.
    """

    num_experts: int  # P
    ranks: int
    num_max_tokens_per_rank: int  # the same on all ranks
    layout: Layout
    topk_idx: torch.Tensor  # [T, k] physical slots, -1: none
    recv_topk_idx: torch.Tensor  # [N, k] local slots, -1: none
    traffic: Traffic | None = None

    @property
    def do_expand(self) -> bool:
        return self.layout.expand

    @property
    def expert_alignment(self) -> int:
        return self.layout.alignment

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.ranks

    @property
    def num_recv_tokens(self) -> int:
        """N; where the host does not know how many came, the room for them."""
        return self.recv_topk_idx.shape[0]

    @cached_property
    def recv_src(self) -> torch.Tensor:
        """[N]: the token of the rank that it came from."""
        if self.traffic is not None:
            return self.traffic.arrived
        rows = torch.arange(self.num_recv_tokens, dtype=torch.int32, device=self.recv_topk_idx.device)
        return rows.remainder_(max(1, self.num_max_tokens_per_rank))

    @cached_property
    def num_recv_tokens_per_rank(self) -> torch.Tensor:
        """[R]"""
        if self.traffic is not None:
            return self.traffic.came
        like = self.recv_topk_idx
        return torch.full((self.ranks,), self.num_max_tokens_per_rank, dtype=torch.int32, device=like.device)

    @cached_property
    def returns(self) -> torch.Tensor:
        """[T, k]: where a token's parts lie in what comes back, ranks ascending, -1: there is none."""
        if self.traffic is not None:
            return self.traffic.returns
        ranks = ranks_of(self.topk_idx, self.num_local_experts)
        token = torch.arange(len(ranks), device=ranks.device)[:, None]
        return torch.where(ranks < 0, -1, ranks * self.num_max_tokens_per_rank + token).int()

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """[R]: inclusive sums of the rows that came from each rank; the last is N."""
        return self.num_recv_tokens_per_rank.cumsum(0, dtype=torch.int32)

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """[S]: rows for each local slot."""
        local = self.recv_topk_idx.flatten().long() + 1
        counts = torch.zeros(self.num_local_experts + 1, dtype=torch.int32, device=local.device)
        return counts.scatter_add_(0, local, torch.ones_like(local, dtype=torch.int32))[1:]

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """[S], of n_i rows for slot i, with ceil to the alignment.

        Deduplicated: psum_i = ceil(n_0) + ... + ceil(n_i). Expanded: group i ends at psum_i = start_i + n_i, and begins at
        start_i = ceil(psum_{i-1}).
        """
        counts = self.num_unaligned_recv_tokens_per_expert
        ends = aligned(counts, self.expert_alignment).cumsum(0, dtype=torch.int32)
        return ends - (aligned(counts, self.expert_alignment) - counts) if self.do_expand else ends

    @cached_property
    def num_recv_tokens_per_expert_list(self) -> list[int]:
        """[S] on the host: rows for each local slot, rounded up to the alignment. Waits for the device."""
        return [int(n) for n in aligned(self.num_unaligned_recv_tokens_per_expert, self.expert_alignment).tolist()]

    @property
    def num_expanded_tokens(self) -> int:
        """Rows of the expanded layout, those between groups too. Waits for the device, unless it was a dispatch with counts and
        there are none between groups."""
        if self.traffic is not None and self.expert_alignment == 1:
            return sum(self.traffic.received_pairs)
        return sum(self.num_recv_tokens_per_expert_list)

    @property
    def pair_returns(self) -> torch.Tensor:
        """[T, k]: where the result of each of a token's slots lies if they come back apart, -1: it has none."""
        tokens, chosen = self.topk_idx.shape
        slots = self.topk_idx.flatten().long()
        if self.traffic is None:
            pair = torch.arange(tokens * chosen, device=slots.device)
            rank = slots.div(self.num_local_experts, rounding_mode="floor")
            places = rank * self.num_max_tokens_per_rank * chosen + pair
        else:
            rank = torch.where(slots < 0, self.ranks, slots.div(self.num_local_experts, rounding_mode="floor"))
            order = rank.argsort(stable=True)
            places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return torch.where(slots < 0, -1, places).view(tokens, chosen).int()

    @cached_property
    def pairs(self) -> torch.Tensor:
        """int64: the (row, column) pairs of recv_topk_idx that are one, flat and ascending. Waits for the device unless it was a
        dispatch with counts."""
        absent = self.recv_topk_idx.flatten() < 0
        if self.traffic is None:
            return (~absent).nonzero().squeeze(1)
        return absent.to(torch.uint8).argsort(stable=True)[: sum(self.traffic.received_pairs)]

    @cached_property
    def slots(self) -> torch.Tensor:
        """[N, k]: where the rows of an arrived token lie in the expanded layout, -1: nowhere."""
        flat = self.recv_topk_idx.flatten().long()
        sorted_ids, order = torch.where(flat < 0, self.num_local_experts, flat).sort(stable=True)
        counts = self.num_unaligned_recv_tokens_per_expert
        padding = aligned(counts, self.expert_alignment) - counts
        before = torch.nn.functional.pad(padding.cumsum(0, dtype=torch.int32), (1, 0))  # of all earlier groups
        places = torch.arange(len(order), dtype=torch.int32, device=order.device) + before[sorted_ids]
        slots = torch.empty_like(places).scatter_(0, order, places)
        return torch.where(flat < 0, -1, slots).view(self.recv_topk_idx.shape)

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """[N, 2 + k]: the token it was, counted over all ranks (rank * num_max_tokens_per_rank + token); its row among those
        that its rank sent here; and where its rows lie (expanded: `slots`; deduplicated: its own row, for each local slot)."""
        rows = torch.arange(self.num_recv_tokens, dtype=torch.int32, device=self.recv_src.device)
        ends = self.psum_num_recv_tokens_per_scaleup_rank
        rank = torch.searchsorted(ends, rows, right=True, out_int32=True)
        first = (ends - self.num_recv_tokens_per_rank)[rank.clamp(max=self.ranks - 1)]
        token = rank * self.num_max_tokens_per_rank + self.recv_src
        places = self.slots if self.do_expand else torch.where(self.recv_topk_idx < 0, -1, rows[:, None])
        return torch.cat((torch.stack((token, rows - first), 1), places), 1).int()


def ranks_of(ids: torch.Tensor, local: int) -> torch.Tensor:
    """int64 [T, k]: the ranks of `local` slots each that have at least one of a token's slots ids [T, k], ascending, each once;
    between them -1."""
    ranks = ids.long().div(local, rounding_mode="floor").sort(1).values
    ranks[:, 1:].masked_fill_(ranks[:, 1:] == ranks[:, :-1], -1)
    return ranks


def aligned(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Rounded up to multiples of the alignment."""
    return (counts + alignment - 1).div(alignment, rounding_mode="floor") * alignment


def expanded(x: torch.Tensor, weights: torch.Tensor, handle: Dispatched) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [M, d], weights [M]) of arrived rows x [N, d] and weights [N, k] in the handle's expanded layout."""
    pairs, chosen = handle.pairs, max(1, handle.recv_topk_idx.shape[1])
    places = handle.slots.flatten()[pairs].long()
    make = torch.zeros if handle.layout.zero_padding else torch.empty
    rows = make(handle.num_expanded_tokens, x.shape[1], dtype=x.dtype, device=x.device)
    factors = make(rows.shape[0], dtype=weights.dtype, device=x.device)
    rows[places] = x[pairs.div(chosen, rounding_mode="floor")]
    factors[places] = weights.flatten()[pairs]
    return rows, factors


def added(rows: torch.Tensor, index: torch.Tensor, plus: torch.Tensor, then: torch.Tensor | None) -> torch.Tensor:
    """plus [T, d], then its rows[index[t]], then `then` [T, d], in float32: like plus. Rows may be wider than plus."""
    if then is not None:
        last = torch.arange(len(rows), len(rows) + len(then), dtype=torch.int32, device=index.device)
        rows, index = torch.cat((rows, then.to(rows.dtype))), torch.cat((index, last[:, None]), 1)
    return gather_sum(rows, index, plus=plus.to(rows.dtype)).to(plus.dtype)
