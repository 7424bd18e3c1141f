"""The timed null model: rows, tables, inputs and outcomes are real, forward and sampling are a wait of a set duration."""

from __future__ import annotations

import time

import torch

from lockstep_common.errors import ConfigError
from lockstep_worker.collectives import Group
from lockstep_worker.exchange.layer import ShardedLayers
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache, KvSpec
from lockstep_worker.sampling import Sampled, SamplingBatch


class DeviceTime:
    """A point in the null device's time."""

    def __init__(self, at_ns: int) -> None:
        self._at_ns = at_ns

    def synchronize(self) -> None:
        if (remaining := self._at_ns - time.perf_counter_ns()) > 0:
            time.sleep(remaining / 1e9)

    def query(self) -> bool:
        return time.perf_counter_ns() >= self._at_ns


class NullModel:
    """A model whose forward pass takes `step_ms` of an asynchronous device and computes nothing.

    As on a GPU, `forward` only queues: a step begins when the device is free and the host has asked for it, so a host that is
    ahead costs nothing, and one that is late shows as idle time. With 0 ms nothing is ever waited for.
    """

    name = "null"
    routed_experts = False
    deterministic = True
    generated_reusable = True
    captures_prefill = False
    captured_prefix: int | None = None
    experts: ShardedLayers | None = None

    def __init__(self, step_ms: float, *, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.config_hash = f"null-{step_ms:g}ms-{vocab_size}-{max_model_len}"
        self._step_ns = round(step_ms * 1e6)
        self._busy_until_ns = 0
        self._nothing = torch.zeros(0, 0, device=device)

    def join(self, group: Group) -> None:
        pass  # it has nothing to share

    def kv_specs(self) -> tuple[KvSpec, ...]:
        return (KvSpec(kind="full", layers=1, kv_heads=1, head_dim=8, dtype=torch.float32),)

    def keep_kv_in(self, dtype: torch.dtype) -> None:
        raise ConfigError(f"the null model has no KV cache of {dtype}: give --kv-cache-dtype auto")

    def forward(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        self._busy_until_ns = max(self._busy_until_ns, time.perf_counter_ns()) + self._step_ns
        return self._nothing if inputs.scored is None else self._nothing.new_zeros(len(inputs.logits_index), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros(len(hidden), self.vocab_size) if len(hidden) else hidden

    def mark(self) -> DeviceTime:
        """The end of the steps queued so far."""
        return DeviceTime(self._busy_until_ns)


class NullSampler:
    """Samples the smallest id that is none of the row's stop ids."""

    def __init__(self) -> None:
        self._batch: SamplingBatch | None = None
        self._sampled = Sampled(torch.zeros(0, dtype=torch.int64))

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor) -> Sampled:
        if batch is not self._batch:  # the same for all steps of a batch
            self._batch, self._sampled = batch, self._constant(batch, positions.device)
        return self._sampled

    def _constant(self, batch: SamplingBatch, device: torch.device) -> Sampled:
        if batch.stop_ids is None:
            tokens = torch.zeros(batch.size, dtype=torch.int64, device=device)
        else:
            candidates = torch.arange(batch.stop_ids.shape[1] + 1, device=device)
            taken = (batch.stop_ids[:, :, None] == candidates).any(1)
            tokens = taken.to(torch.uint8).argmin(1)
        if (wanted := batch.wanted) is None:
            return Sampled(tokens)
        tops = tuple(
            (torch.arange(n, device=device).expand(len(rows), n), torch.zeros(len(rows), n, device=device))
            for n, rows in wanted.tops
        )
        return Sampled(tokens, logprobs=torch.zeros(len(wanted.rows), device=device), tops=tops)
