"""What a worker process decides before it serves: dtype, device, memory; and the watchdog's report."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep_common.errors import ConfigError
from lockstep_kernels.sampling import Feature
from lockstep_worker import __main__ as process
from lockstep_worker.__main__ import choose_device, choose_dtype, choose_kv_dtype, load, with_limits
from lockstep_worker.collectives import CollectiveId, Recorder
from lockstep_worker.collectives.watchdog import Watchdog
from lockstep_worker.config import WorkerConfig
from lockstep_worker.kv import KvSpec
from lockstep_worker.memory import GIB, Sizes, default_limits, kv_blocks_on_cpu
from lockstep_worker.null import NullModel, NullSampler
from lockstep_worker.sampling import SamplingBatch
from tests.tiny_model import make_tiny_model

CPU = torch.device("cpu")
SPEC = KvSpec(kind="full", layers=2, kv_heads=1, head_dim=4, dtype=torch.float32)  # 1 KiB a block of 16


def test_float16_on_a_cpu_says_why_not() -> None:
    with pytest.raises(ConfigError, match="CPUs have no float16 arithmetic; use bfloat16 or float32"):
        choose_dtype("float16", "float32", CPU)
    assert choose_dtype("auto", "float16", CPU) == torch.bfloat16
    assert choose_dtype("auto", "float16", torch.device("cuda")) == torch.float16
    assert choose_dtype("auto", "float32", CPU) == torch.float32
    assert choose_dtype("auto", "", CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype int8"):
        choose_dtype("auto", "int8", CPU)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_kv_cache_of_8_bits_is_for_cuda(name: str) -> None:
    assert choose_kv_dtype("auto", CPU) is None
    with pytest.raises(ConfigError, match=f"kv_cache_dtype {name} on a cpu: a cache of 8 bits needs CUDA; use auto"):
        choose_kv_dtype(name, CPU)
    assert choose_kv_dtype(name, torch.device("cuda")) == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="without a model has no KV cache"):
        WorkerConfig(null_step_ms=1.0, kv_cache_dtype=name)


def test_bits_that_a_cpu_does_not_keep_are_not_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = WorkerConfig(
        model=str(make_tiny_model(tmp_path)), device="cpu", deterministic="on", kv_cache_memory_gb=0.01
    )
    monkeypatch.setattr(process, "differing_ops", lambda dtype: ())
    assert load(settings, lambda share, message: None).deterministic
    assert not caplog.records or "deterministic" not in caplog.text
    monkeypatch.setattr(process, "differing_ops", lambda dtype: ("products", "attention"))
    assert not load(settings, lambda share, message: None).deterministic
    assert "bits of products and attention depend on the batch" in caplog.text


def test_cuda_must_be_there_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_device("cuda")


def test_a_gpu_that_the_kernels_are_not_made_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"NVIDIA A100 has compute capability 8\.0"):
        choose_device("auto")
    assert choose_device("cpu") == CPU
    capability = (9, 0)
    assert choose_device("auto") == torch.device("cuda", 0)


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for wrong, message in (
        ({}, "which model"),
        ({"model": str(tmp_path / "none")}, "no such directory"),
        ({"null_step_ms": 0.0, "max_num_seqs": -1}, "max_num_seqs"),
        ({"null_step_ms": 0.0, "threads": -1}, "threads"),
        ({"null_step_ms": 0.0, "collective_deadline_s": 90.0}, "collective_deadline_s"),
    ):
        with pytest.raises(ConfigError, match=message):
            WorkerConfig(**wrong)
    assert WorkerConfig(model=str(tmp_path)).name == tmp_path.name
    with pytest.raises(ConfigError, match="above the model's"):
        load(WorkerConfig(null_step_ms=0.0, max_model_len=10_000), lambda share, message: None)


@pytest.mark.parametrize(
    ("gib", "limits"),
    [
        (0, (64, 2048)),
        (16, (64, 2048)),
        (23.6, (128, 2048)),
        (47.5, (128, 2048)),
        (79.2, (256, 8192)),
        (140, (256, 8192)),
    ],
)
def test_rows_and_tokens_that_suit_a_device(gib: float, limits: tuple[int, int]) -> None:
    assert default_limits(int(gib * GIB)) == limits


@given(st.integers(0, 300 * GIB), st.integers(0, 300 * GIB))
def test_a_larger_device_has_no_smaller_limits(a: int, b: int) -> None:
    (rows, tokens), (more_rows, more_tokens) = default_limits(min(a, b)), default_limits(max(a, b))
    assert rows <= more_rows and tokens <= more_tokens


def test_limits_that_are_not_given_are_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(device: str, **settings: object) -> tuple[int, int]:
        limited = with_limits(WorkerConfig(model=str(tmp_path), **settings), torch.device(device))
        return limited.max_num_seqs, limited.max_num_batched_tokens

    properties = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert found("cpu") == (64, 2048)
    assert found("cuda") == (256, 8192)
    assert found("cuda", max_num_seqs=7) == (7, 8192)
    assert found("cuda", max_num_batched_tokens=99) == (256, 99)
    assert found("cuda", null_step_ms=0.0) == (64, 2048), "a model that only waits is the same everywhere"
    loaded = load(WorkerConfig(null_step_ms=0.0, device="cpu"), lambda share, message: None)
    assert (loaded.max_rows, loaded.max_batched_tokens) == (64, 2048)


def test_memory_of_the_kv_cache() -> None:
    def blocks(memory_gb: float, max_model_len: int = 64, max_rows: int = 4) -> int:
        return kv_blocks_on_cpu([SPEC], Sizes(16, max_rows, max_model_len, max_batched_tokens=64), 100, memory_gb)

    assert blocks(0) == 1 + 4 * 4
    assert blocks(0, max_model_len=4096) == 1 + 4 * 128
    assert blocks(0, max_model_len=4096, max_rows=1) == 1 + 256, "one whole sequence at least"
    assert blocks(0.001) == int(0.001 * 2**30) // 1024
    with pytest.raises(ConfigError, match="raise kv_cache_memory_gb"):
        blocks(0.000002)


class Board:
    def __init__(self) -> None:
        self.posts: dict[int, str] = {}

    def post(self, rank: int, waiting_in: str) -> None:
        self.posts[rank] = waiting_in

    def read(self, rank: int) -> str:
        return self.posts.get(rank, "")


def test_a_collective_past_its_deadline_is_reported_once_with_who_is_missing() -> None:
    here, board, reports = CollectiveId(7, 2, "world", 0, "step"), Board(), list[str]()
    board.post(2, here.key)
    board.post(3, "6.0.world.0.step")
    reported = threading.Event()

    def report(message: str) -> None:
        reports.append(message)
        reported.set()

    recorder = Recorder()
    recorder.at(7, 2)
    peers = ("a:1", "b:1", "c:1", "d:1")
    watchdog = Watchdog(
        recorder, board, rank=0, peers=peers, deadline_s=0.02, report=report, together=lambda rank: ("world",)
    )
    watchdog.start()
    with recorder.during("step", "world"):
        assert reported.wait(5)
        time.sleep(0.05)
    watchdog.stop()
    (message,) = reports
    assert message.startswith("step (plan 7, step 2, world 0) has waited")
    assert message.endswith(
        "missing: b:1; out of step: d:1 is in 6.0.world.0.step, long past or before 7.2.world.0.step"
    )
    assert [record.id for record in recorder.history()] == [here] and recorder.waiting() is None


def test_null_device_runs_steps_back_to_back() -> None:
    model = NullModel(20.0, vocab_size=10, max_model_len=64, device=CPU)
    start = time.perf_counter()
    marks = []
    for _ in range(3):
        model.forward(SimpleNamespace(scored=None), None)  # type: ignore[arg-type]
        marks.append(model.mark())
    assert time.perf_counter() - start < 0.02, "forward only queues"
    for i, mark in enumerate(marks):
        mark.synchronize()
        assert time.perf_counter() - start >= 0.02 * (i + 1) - 0.001


def test_null_sampler_never_samples_a_stop_id() -> None:
    stop_ids = torch.tensor([[0, 0, 0], [1, 0, 2], [5, 6, 7], [-1, -1, -1]])
    positions = torch.zeros(4, dtype=torch.int64)
    batch = SamplingBatch(4, np.arange(4), torch.arange(4), Feature.STOP_IDS, stop_ids)
    sampled = NullSampler().sample(torch.zeros(0), batch, positions)
    assert sampled.tokens.tolist() == [1, 3, 0, 0]
