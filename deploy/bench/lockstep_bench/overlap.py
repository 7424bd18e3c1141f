"""What dual-batch overlap hides: passes as one and as two halves over a link that takes a fixed time, a process a rank.

The link is artificial: whatever is sent arrives `delay_ms` after all ranks have begun it at the earliest, however much it is,
and what is begun meanwhile travels beside it. So is the device: a small model whose attention and experts wait as long as large
ones would compute. What a pass takes more than over a link without delay is what shows of the exchange.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lockstep_bench import ranks
from lockstep_bench.report import Goal
from lockstep_bench.worker_alone import BLOCK_SIZE, step_inputs
from lockstep_common.steps import Kind
from lockstep_worker.collectives import Communicator, Group
from lockstep_worker.exchange.layer import ShardedExperts
from lockstep_worker.exchange.placement import Sharding
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache
from lockstep_worker.models import Model, load_model
from lockstep_worker.models.attention import AttentionPass

CONTEXT = 64  # tokens of a prompt, and before a generated one
WAYS = {"prefill, with counts": (Kind.PREFILL, 3), "decode, with a capacity": (Kind.DECODE, 2)}  # exchanges in a layer
LEAST_OF_WHAT_CAN = 0.8  # of what can be hidden is, is the goal


@dataclass(frozen=True, slots=True)
class Settings:
    """`tokens` of each rank in a pass, whose attention and experts take so long in a layer; a half takes half of it."""

    delay_ms: float = 5.0
    attention_ms: float = 12.0
    experts_ms: float = 20.0
    tokens: int = 64
    ranks: int = 2
    layers: int = 4
    hidden: int = 64
    experts: int = 16
    chosen: int = 4
    repeats: int = 15


def run(settings: Settings) -> list[dict[str, Any]]:
    """A row for each way, of rank 0. DeadlineExceeded if the ranks do not answer, Unavailable if one of them failed."""
    rows = ranks.run(settings.ranks, 1, _on_rank, settings)
    return rows[: len(WAYS)]


def hideable(exchanges: int, layers: int) -> float:
    """The share of the link's time that two halves can hide at most, if each part computes for longer than the link takes.

    Two things wait with nothing to compute: the second half's counts in each layer, as only its numbers are between what the
    first half does with its own; and the second half's results of the last layer.
    """
    shown = layers * (exchanges == 3) + 1
    return 1 - shown / (exchanges * layers)


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    return [
        Goal(f"{row['way']}: hidden, of what can be", row["hidden"] / row["can be hidden"], LEAST_OF_WHAT_CAN, True)
        for row in rows
    ]


def _on_rank(group: Group, device: torch.device, settings: Settings) -> list[dict[str, Any]]:
    link = _Link(group.world)
    group.world = link
    model = _model(settings, group)
    model.join(group)
    slow = _Device()
    with (
        mock.patch.object(AttentionPass, "attend", slow.computing(AttentionPass.attend, settings.attention_ms)),
        mock.patch.object(ShardedExperts, "_results", slow.computing(ShardedExperts._results, settings.experts_ms)),
    ):
        return [_measure(settings, model, link, slow, way) for way in WAYS]


class _Device:
    """What is computed on it takes a time of its own; `parts`: in how many parts a pass comes."""

    def __init__(self) -> None:
        self.parts = 1

    def computing(self, inner: Callable[..., torch.Tensor], ms: float) -> Callable[..., torch.Tensor]:
        def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
            done = time.monotonic() + ms / 1e3 / self.parts
            result = inner(*args, **kwargs)
            time.sleep(max(0.0, done - time.monotonic()))
            return result

        return compute


def _measure(settings: Settings, model: Model, link: _Link, device: _Device, way: str) -> dict[str, Any]:
    kind, exchanges = WAYS[way]
    inputs, blocks = _inputs(settings, kind)
    kv = KvCache(model.kv_specs(), num_blocks=1 + blocks, block_size=BLOCK_SIZE, device="cpu")
    seconds: dict[tuple[bool, bool], list[float]] = {
        (dual, slow): [] for dual in (False, True) for slow in (False, True)
    }
    for _ in range(settings.repeats + 1):
        for (dual, slow), found in seconds.items():  # in turn, so that the machine's moods meet all of them
            link.seconds, device.parts = slow * settings.delay_ms / 1e3, 1 + dual
            link.maximum("together", torch.zeros(1))
            started = time.perf_counter()
            model.forward(replace(inputs, dual_batch=dual), kv)
            found.append(time.perf_counter() - started)
    ms = {case: 1e3 * min(found[1:]) for case, found in seconds.items()}
    shown = {dual: ms[dual, True] - ms[dual, False] for dual in (False, True)}
    return {
        "way": way,
        "link (ms)": settings.delay_ms * exchanges * settings.layers,
        "one, no delay (ms)": ms[False, False],
        "one (ms)": ms[False, True],
        "halves, no delay (ms)": ms[True, False],
        "halves (ms)": ms[True, True],
        "shows of one (ms)": shown[False],
        "shows of halves (ms)": shown[True],
        "hidden": 1 - shown[True] / shown[False],
        "can be hidden": hideable(exchanges, settings.layers),
    }


def _model(settings: Settings, group: Group) -> Model:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 1024,
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_experts": settings.experts,
        "num_experts_per_tok": settings.chosen,
        "moe_intermediate_size": settings.hidden,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2 * CONTEXT,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        return load_model(
            Path(name),
            dtype=torch.float32,
            device=torch.device("cpu"),
            deterministic=False,
            dummy_weights=True,
            sharding=Sharding(group.place.size, group.place.rank),
        )


def _inputs(settings: Settings, kind: Kind) -> tuple[StepInputs, int]:
    """A pass, and the blocks that it takes."""
    new = 1 if kind is Kind.DECODE else CONTEXT
    sequences, wide = settings.tokens // new, -(-2 * CONTEXT // BLOCK_SIZE)
    chunks = [([1 + (7 * i + t) % 1000 for t in range(new)], CONTEXT - new) for i in range(sequences)]
    tables = [range(1 + i * wide, 1 + (i + 1) * wide) for i in range(sequences)]
    inputs = step_inputs(kind, chunks, tables, BLOCK_SIZE)
    return replace(inputs, expert_rows=settings.tokens if kind is Kind.DECODE else 0), sequences * wide


class _Link:
    """A communicator on whose way everything takes at least so many seconds from when the last rank has begun it.

    When each began it travels along: the ranks are on one machine, and its clock is theirs.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner, self.rank, self.size, self.seconds = inner, inner.rank, inner.size, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather_later(self, name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._slow(name, self._inner.all_gather_later(name, x))

    def swap_later(self, name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._slow(name, self._inner.swap_later(name, x))

    def all_to_all_later(
        self, name: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        return self._slow(name, self._inner.all_to_all_later(name, x, sent, received))

    def _slow(self, name: str, finish: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        now = torch.tensor([time.monotonic()], dtype=torch.float64)
        begun = self._inner.all_gather_later(f"{name}, begun", now)

        def finish_late() -> torch.Tensor:
            result, arrives = finish(), float(begun().max()) + self.seconds
            time.sleep(max(0.0, arrives - time.monotonic()))
            return result

        return finish_late
