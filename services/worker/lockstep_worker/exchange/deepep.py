"""Dispatch and combine by DeepEP's `ElasticBuffer` (its second version), where the module `deep_ep` is installed.

Its kernels read and write the other GPUs' memory. Rows are bfloat16. What is written here follows its documented interface.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep_worker.exchange import DEDUPLICATED, Arrived, Finish, Handle, Layout
from lockstep_worker.overlap import Stages


class DeepEp:
    """See `lockstep_worker.exchange.Exchange`."""

    def __init__(self, group: Any, slots: int, *, tokens: int, hidden: int, chosen: int) -> None:
        """`group`: torch's process group of all workers, over NCCL; `tokens`: the most that any rank ever brings at once."""
        import deep_ep  # type: ignore[import-not-found]

        self._slots = slots
        self._tokens = tokens
        self._id_dtype = deep_ep.topk_idx_t
        self._buffer = deep_ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=tokens,
            hidden=hidden,
            num_topk=chosen,
            deterministic=True,
            explicitly_destroy=True,
        )

    def dispatch(
        self,
        name: str,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        capacity: int = 0,
        layout: Layout = DEDUPLICATED,
    ) -> Stages[Arrived]:
        most = capacity or self._tokens
        if len(ids) > most:
            raise ValueError(f"{name}: {len(ids)} tokens, but all ranks agreed on at most {most}")
        if not len(ids):  # its kernels want a token of everybody; this one goes nowhere
            x, ids, weights = (
                x.new_zeros(1, x.shape[1]),
                ids.new_full((1, ids.shape[1]), -1),
                weights.new_zeros(1, ids.shape[1]),
            )
        rows, here, factors, handle, done = self._buffer.dispatch(
            x,
            topk_idx=ids.to(self._id_dtype),
            topk_weights=weights,
            num_experts=self._slots,
            num_max_tokens_per_rank=most,
            expert_alignment=layout.alignment,
            do_cpu_sync=not capacity,
            do_expand=layout.expand,
            do_zero_padding=layout.zero_padding,
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
        )
        yield
        done.current_stream_wait()
        if layout.expand:
            return Arrived(rows, None, factors, handle)
        if capacity:  # behind the rows that came is room that nobody wrote
            came = torch.arange(len(rows), device=rows.device) < handle.psum_num_recv_tokens_per_scaleup_rank[-1]
            here = torch.where(came[:, None], here, -1)
        return Arrived(rows, here.int(), factors, handle)

    def combine(self, name: str, rows: torch.Tensor, handle: Handle, *, apart: bool = False) -> Finish:
        if apart:
            raise ValueError("DeepEP adds a token's results by rank: it cannot keep them apart")
        rows_done = self._buffer.capture()

        def finish(plus: torch.Tensor, then: torch.Tensor | None = None) -> torch.Tensor:
            tokens = len(plus)
            total = plus if then is None else plus + then
            bias = total if tokens else rows.new_zeros(1, rows.shape[1])
            y, _, done = self._buffer.combine(
                rows,
                handle,
                bias=bias.to(rows.dtype),
                previous_event=rows_done,  # it sends while what `plus` waits for is still computed
                previous_event_before_epilogue=self._buffer.capture(),
                async_with_compute_stream=True,
                allocate_on_comm_stream=True,
            )
            done.current_stream_wait()
            return y[:tokens].to(plus.dtype)  # type: ignore[no-any-return]

        return finish

    def close(self) -> None:
        """Gives back the memory that other ranks reach. All ranks do."""
        self._buffer.destroy()
