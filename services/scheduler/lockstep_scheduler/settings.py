"""How a shard behaves, and the engine group that it drives."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep_common.steps import WorkerFacts
from lockstep_scheduler.eplb import EplbPolicy
from lockstep_scheduler.vote import DualBatch


@dataclass(frozen=True, slots=True)
class Settings:
    """How the loop behaves; see config.py for what each option means."""

    max_batched_tokens: int = 2048  # 0: the group's
    max_window: int = 16
    max_waiting: int = 1024
    vote_interval: float = 0.0  # seconds; 0: by device
    a: int = 0
    b: int = 0
    watermark: float = 0.95
    max_prefill_tokens_per_point: int = 0
    attention_span: int = 4096
    prefix_caching: bool = True
    worker_timeout: float = 60.0
    reform_timeout: float = 60.0
    grace: float = 10.0
    eplb: EplbPolicy = field(default_factory=EplbPolicy)
    dual: DualBatch | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """A formed engine group, as one of its shards sees it."""

    epoch: int
    term: int
    dp: int
    facts: WorkerFacts
    max_rows: int
    max_model_len: int
    ranks: range = range(0)  # the DP ranks that this shard drives; empty: all
    cp: int = 1  # workers of a DP rank
    kept: tuple[int, ...] = ()  # by DP rank of the group: the epoch whose plans filled its caches; 0: not kept
    max_batched_tokens: int = 0  # of a prefill pass, as the workers were told; needed where the settings leave it open

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", range(self.dp))
