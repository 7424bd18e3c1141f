"""The DeepEP backend against a recorded `deep_ep`: every call with the arguments that its interface documents, and what comes
back taken as it documents it."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep_worker.exchange import Exchange, Layout
from lockstep_worker.overlap import last_of

TOKENS, HIDDEN, CHOSEN, SLOTS = 3, 8, 2, 4
Recorded = tuple[str, dict[str, Any]]


class Event:
    def __init__(self, calls: list[Recorded]) -> None:
        self._calls = calls

    def current_stream_wait(self) -> None:
        self._calls.append(("wait", {}))


class ElasticBuffer:
    """Signatures as documented; one rank of two, whose peer sends the same rows."""

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self.calls: list[Recorded] = []
        self.events = 0
        self._note("init")

    def capture(self) -> int:
        self.events += 1
        self.calls.append(("capture", {"event": self.events}))
        return self.events

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Any = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, ...]:
        self._note("dispatch")
        assert topk_idx is not None and topk_weights is not None and num_max_tokens_per_rank is not None
        assert x.dtype == torch.bfloat16 and topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
        assert x.shape == (len(topk_idx), HIDDEN) and topk_idx.shape == topk_weights.shape and len(x) > 0
        assert len(x) <= num_max_tokens_per_rank
        local = torch.where(topk_idx < SLOTS // 2, topk_idx, -1)  # this is rank 0
        rows, ids, weights = torch.cat((x, x)), torch.cat((local, local)), torch.cat((topk_weights, topk_weights))
        if not do_cpu_sync:  # the worst case's room, of which only the first rows are written
            room = 2 * num_max_tokens_per_rank - len(rows)
            rows = torch.cat((rows, torch.full((room, HIDDEN), torch.nan, dtype=x.dtype)))
            ids = torch.cat((ids, torch.full((room, CHOSEN), 7)))
            weights = torch.cat((weights, torch.full((room, CHOSEN), torch.nan)))
        sums = torch.tensor([len(x), 2 * len(x)], dtype=torch.int32)
        made = SimpleNamespace(do_expand=do_expand, psum_num_recv_tokens_per_scaleup_rank=sums)
        return rows, None if do_expand else ids, weights, made, Event(self.calls)

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, Event]:
        self._note("combine")
        assert isinstance(bias, torch.Tensor) and bias.dtype == x.dtype == torch.bfloat16
        assert previous_event is None or allocate_on_comm_stream, "documented: the one needs the other"
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[0])
        return bias + x[:count], None, Event(self.calls)

    def destroy(self) -> None:
        self.calls.append(("destroy", {}))

    def _note(self, name: str) -> None:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        self.calls.append((name, {k: v for k, v in frame.f_back.f_locals.items() if k != "self"}))


@pytest.fixture
def group() -> Any:
    return SimpleNamespace(rank=lambda: 0, size=lambda: 2)


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch, group: Any) -> Exchange:
    module: Any = ModuleType("deep_ep")
    module.ElasticBuffer, module.topk_idx_t = ElasticBuffer, torch.int64
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    from lockstep_worker.exchange.deepep import DeepEp

    return DeepEp(group, SLOTS, tokens=16, hidden=HIDDEN, chosen=CHOSEN)


def calls(exchange: Any) -> list[Recorded]:
    recorded: list[Recorded] = exchange._buffer.calls
    return recorded


def brought(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[0, 3], [1, -1], [2, 3]], dtype=torch.int32)[:tokens]
    x = torch.arange(float(tokens * HIDDEN)).view(tokens, HIDDEN).bfloat16()
    return x, ids, torch.ones(tokens, CHOSEN)


def test_the_buffer_is_made_for_the_largest_pass(exchange: Exchange, group: Any) -> None:
    (name, made), *others = calls(exchange)
    assert name == "init" and not others
    wanted = {"group": group, "num_max_tokens_per_rank": 16, "hidden": HIDDEN, "num_topk": CHOSEN}
    assert wanted.items() <= made.items() and made["deterministic"] and made["explicitly_destroy"]
    assert not made["use_fp8_dispatch"] and made["num_bytes"] is None
    exchange.close()
    assert calls(exchange)[-1][0] == "destroy"


def test_a_dispatch_with_counts_waits_for_the_host(exchange: Exchange) -> None:
    x, ids, weights = brought()
    stages = exchange.dispatch("e", x, ids, weights)
    next(stages)
    name, given = calls(exchange)[-1]
    arrived = last_of(stages)
    assert calls(exchange)[-1][0] == "wait"
    assert name == "dispatch" and given["do_cpu_sync"] is True and given["num_max_tokens_per_rank"] == 16
    assert given["num_experts"] == SLOTS and given["expert_alignment"] == 1 and not given["do_expand"]
    assert given["handle"] is None and given["topk_idx"].tolist() == ids.tolist()
    assert given["async_with_compute_stream"] and given["allocate_on_comm_stream"], "what is computed goes on meanwhile"
    assert arrived.ids is not None and arrived.ids.dtype == torch.int32
    assert arrived.ids.tolist() == 2 * [[0, -1], [1, -1], [-1, -1]] and arrived.x.shape == (6, HIDDEN)


def test_a_captured_dispatch_reads_nothing_behind_what_came(exchange: Exchange) -> None:
    x, ids, weights = brought()
    arrived = last_of(exchange.dispatch("e", x, ids, weights, capacity=5))
    given = dict(calls(exchange))["dispatch"]
    assert given["do_cpu_sync"] is False and given["num_max_tokens_per_rank"] == 5
    assert arrived.ids is not None and arrived.x.shape == (10, HIDDEN)
    assert arrived.ids.tolist() == 2 * [[0, -1], [1, -1], [-1, -1]] + 4 * [[-1, -1]]
    with pytest.raises(ValueError, match="3 tokens, but all ranks agreed on at most 2"):
        last_of(exchange.dispatch("e", x, ids, weights, capacity=2))


def test_the_expanded_layout_is_asked_for_as_it_is(exchange: Exchange) -> None:
    arrived = last_of(exchange.dispatch("e", *brought(), layout=Layout(expand=True, alignment=128, zero_padding=True)))
    given = dict(calls(exchange))["dispatch"]
    assert given["do_expand"] and given["do_zero_padding"] and given["expert_alignment"] == 128
    assert arrived.ids is None and arrived.handle.do_expand


def test_results_travel_while_what_is_added_to_them_is_computed(exchange: Exchange) -> None:
    arrived = last_of(exchange.dispatch("e", *brought()))
    finish = exchange.combine("e", arrived.x, arrived.handle)
    plus = torch.ones(TOKENS, HIDDEN)  # of another dtype than the rows
    got = finish(plus)
    names = [name for name, _ in calls(exchange)]
    assert names == ["init", "dispatch", "wait", "capture", "capture", "combine", "wait"]
    given = dict(calls(exchange))["combine"]
    assert given["previous_event"] == 1, "the rows, and not what was begun since"
    assert given["previous_event_before_epilogue"] == 2
    assert given["async_with_compute_stream"] and given["handle"] is arrived.handle and given["topk_weights"] is None
    assert got.dtype == torch.float32 and torch.equal(got, 1 + brought()[0].float())
    again = exchange.combine("e", arrived.x, arrived.handle)(plus, then=2 * plus)
    assert torch.equal(again, 3 + brought()[0].float())
    with pytest.raises(ValueError, match="cannot keep them apart"):
        exchange.combine("e", arrived.x, arrived.handle, apart=True)


def test_a_rank_without_tokens_sends_one_that_goes_nowhere(exchange: Exchange) -> None:
    x, ids, weights = brought(0)
    arrived = last_of(exchange.dispatch("e", x, ids, weights))
    assert dict(calls(exchange))["dispatch"]["topk_idx"].tolist() == [[-1, -1]]
    assert exchange.combine("e", arrived.x, arrived.handle)(x).shape == (0, HIDDEN)
