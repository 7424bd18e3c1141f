"""What a trace says is hidden, and the goals of a prompt on two GPUs."""

from __future__ import annotations

import pytest
import torch

from lockstep_bench import mirrored_gpu
from lockstep_bench.mirrored import _inputs


def test_time_counts_once_however_many_kernels_run_beside() -> None:
    kernels = [
        ("ncclDevKernel_AllGather", (0.0, 10.0)),
        ("gemm", (2.0, 6.0)),
        ("norm", (4.0, 7.0)),
        ("attention", (9.0, 20.0)),
        ("ncclDevKernel_AllGather", (30.0, 34.0)),
    ]
    assert mirrored_gpu.hidden_share(kernels) == (14.0, pytest.approx(6 / 14))
    assert mirrored_gpu.hidden_share(kernels[1:3]) == (0.0, None)


def test_goals_are_of_two_ranks_beside_one() -> None:
    rows = [
        {"tokens": 8, "ranks": 1, "speed-up": 1.0, "hidden": None},
        {"tokens": 8, "ranks": 2, "speed-up": 1.8, "hidden": 0.7},
        {"tokens": 9, "ranks": 2, "speed-up": None, "hidden": None},
    ]
    assert [goal.met for goal in mirrored_gpu.goals(rows)] == [True, False, None, None]


def test_all_tensors_of_a_pass_go_to_the_device() -> None:
    inputs, _ = _inputs(mirrored_gpu.mirrored.Settings(tokens=20), mirrored_gpu.Share())
    moved = mirrored_gpu.on_device(inputs, torch.device("meta"))
    assert moved.token_ids.is_meta and moved.block_tables[0].is_meta and moved.host_seq_lens == inputs.host_seq_lens
