"""Settings of the scheduler."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass

from lockstep_common.config import setting
from lockstep_common.errors import ConfigError
from lockstep_common.rpc import Security


@dataclass(frozen=True)
class SchedulerConfig:
    """Lockstep scheduler: decides every step of one engine group."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8002, "port of the gRPC interface (0: any free one)")
    advertise: str = setting("", "host:port under which routers reach this process (default: host and port)")
    workers: tuple[str, ...] = setting(
        (), "host:port of each worker, by DP rank; several workers step together", metavar="LIST"
    )
    shards: tuple[str, ...] = setting(
        (), "host:port of each scheduler of the group, the coordinator first (default: this one alone)", metavar="LIST"
    )
    shard: int = setting(0, "this scheduler's place in --shards; each drives a part of the DP ranks")
    vote_timeout: float = setting(60.0, "seconds that a vote may wait for other shards before the group is given up")
    shard_id: str = setting("", "name of this scheduler in the registry and in records (default: host name and port)")
    lockstep: str = setting(
        "auto",
        "always: let several workers step together even if the model has no routed experts",
        choices=("auto", "always"),
    )
    max_num_seqs: int = setting(0, "rows of each worker: choices that run at once on a DP rank (0: the workers' least)")
    max_model_len: int = setting(0, "longest prompt and answer together (0: what the model and its KV cache allow)")
    max_num_batched_tokens: int = setting(
        0, "prompt tokens of one prefill step on a DP rank; longer prompts go in chunks (0: the workers' least)"
    )
    max_waiting: int = setting(1024, "choices that may wait; beyond, requests are refused with 429")
    vote_interval_ms: float = setting(
        0.0, "time between two points at which prefill may begin while rows decode (0: 40, with workers on CPUs 160)"
    )
    prefill_attempt_interval: int = setting(0, "the same in steps (A): prefill if all ranks want to; 0: by time")
    prefill_any_attempt_interval: int = setting(
        0, "steps (B) after which one rank is enough; a multiple of A (default 4 A)"
    )
    max_window: int = setting(16, "most decode steps of one plan")
    max_prefill_tokens_per_point: int = setting(
        0, "prompt tokens after which a decode window is owed (0: one full step)"
    )
    attention_span: int = setting(
        4096, "context behind which attention takes a prompt token as long as the rest of the model, in tokens"
    )
    watermark: float = setting(0.95, "share of KV blocks in use above which nothing is admitted beside running rows")
    enable_prefix_caching: bool = setting(True, "requests share the KV blocks of equal beginnings")
    enable_eplb: bool = setting(False, "move routed experts between the workers of the group so that loads are even")
    eplb_window: int = setting(1000, "forward passes in which what is known of an expert's load fades to a third")
    eplb_interval_s: float = setting(60.0, "seconds between two plans of where experts lie")
    eplb_threshold: float = setting(
        1.1, "load of the heaviest worker over the mean above which a layer's experts are planned anew"
    )
    eplb_prefill_weight: float = setting(1.0, "what a token of prefill counts in these loads; one of decode counts 1")
    eplb_nodes: int = setting(1, "nodes that the workers stand on, equally many in a row on each: groups stay on one")
    expert_load_interval_s: float = setting(
        1.0, "seconds between two reports of expert loads, for the metrics too (0: none)"
    )
    enable_dbo: bool = setting(
        False, "dual-batch overlap: large steps are computed as two halves, and tokens of one travel under the other"
    )
    dbo_decode_token_threshold: int = setting(32, "rows of the largest rank from which on decode steps are")
    dbo_prefill_token_threshold: int = setting(512, "prompt tokens of the largest rank from which on prefill steps are")
    worker_timeout: float = setting(60.0, "seconds without an outcome after which a worker is given up")
    load_timeout: float = setting(1800.0, "seconds that a worker may take to load its model")
    reform_timeout: float = setting(
        60.0, "seconds that requests wait for a group that has lost a worker to form again; then they end"
    )
    session_grace: float = setting(10.0, "seconds that requests outlive the session of their router")
    redis_url: str = setting("none", "Redis for the ledger and the registry, or none", metavar="URL")
    ledger_ttl: int = setting(600, "seconds that a finished request's record stays in Redis")
    model: str = setting("", "name of the model in the registry (default: what the worker loaded)")
    metrics_port: int = setting(0, "port of the Prometheus page (0: off)")
    log_level: str = setting("INFO", "DEBUG, INFO, WARNING or ERROR")
    tls_cert: str = setting("", "certificate of the internal gRPC ports", metavar="FILE")
    tls_key: str = setting("", "its key", metavar="FILE")
    tls_ca: str = setting("", "authority that peers' certificates must come from", metavar="FILE")
    internal_token: str = setting("", "token that callers of internal gRPC ports must send", secret=True)

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError("no worker given: set --workers host:port (one for each DP rank)")
        if len(set(self.workers)) != len(self.workers):
            raise ConfigError(f"--workers names an address twice: {', '.join(self.workers)}")
        self._check_shards()
        least_one = ("max_waiting", "max_window", "attention_span")
        for name in (*least_one, "dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative")
        a, b = self.prefill_attempt_interval, self.prefill_any_attempt_interval
        if b and not a:
            raise ConfigError("prefill_any_attempt_interval needs prefill_attempt_interval")
        if a and b and (b <= a or b % a):
            raise ConfigError("prefill_any_attempt_interval must be a multiple of prefill_attempt_interval and greater")
        if not 0 < self.watermark <= 1:
            raise ConfigError("watermark must be above 0 and at most 1")
        if self.vote_interval_ms < 0:
            raise ConfigError("vote_interval_ms must not be negative")
        self._check_eplb()

    def _check_shards(self) -> None:
        if len(set(self.shards)) != len(self.shards):
            raise ConfigError(f"--shards names an address twice: {', '.join(self.shards)}")
        if not 0 <= self.shard < max(1, len(self.shards)):
            raise ConfigError(
                f"--shard {self.shard} has no place in --shards, which names {len(self.shards)} scheduler(s)"
            )
        if self.vote_timeout <= 0:
            raise ConfigError("vote_timeout must be above 0")

    def _check_eplb(self) -> None:
        for name in ("eplb_window", "eplb_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        for name in ("eplb_interval_s", "eplb_prefill_weight", "expert_load_interval_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must not be negative or infinite")
        if not 1 <= self.eplb_threshold < math.inf:
            raise ConfigError("eplb_threshold must be at least 1: the heaviest load is never below the mean")
        if self.enable_eplb and not self.expert_load_interval_s:
            raise ConfigError("enable_eplb needs reports of expert loads: expert_load_interval_s must not be 0")

    @property
    def name(self) -> str:
        return self.shard_id or f"{socket.gethostname()}-{self.port}"

    @property
    def agreed(self) -> dict[str, str]:
        """What must be the same on all shards of a group."""
        names = (
            "max_num_seqs",
            "max_model_len",
            "max_num_batched_tokens",
            "max_window",
            "max_prefill_tokens_per_point",
        )
        return {
            "shards": ",".join(self.shards),
            "workers": ",".join(sorted(self.workers)),
            **{name: str(getattr(self, name)) for name in names},
        }

    @property
    def security(self) -> Security:
        return Security(self.tls_cert, self.tls_key, self.tls_ca, self.internal_token)
