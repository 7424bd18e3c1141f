"""Measurements of what a group's ranks do together, in their small form: processes of this machine over gloo."""

from __future__ import annotations

import pytest
import torch

from lockstep_bench import exchange_speed, mirrored_gpu


def test_backends_are_timed_and_one_that_cannot_be_says_why() -> None:
    settings = exchange_speed.Settings(
        tokens=(1, 4), prefill=(8,), hidden=32, experts=16, chosen=4, dtype=torch.float32, repeats=2
    )
    rows = exchange_speed.run(settings)
    assert [(row["backend"], row["way"], row["tokens"]) for row in rows] == [
        (backend, *way)
        for backend in ("all_to_all", "symmetric")
        for way in (("captured", 1), ("captured", 4), ("counts", 8))
    ]
    assert all(row["dispatch us"] > 0 and row["combine us"] > 0 and not row["note"] for row in rows[:3])
    assert all(row["dispatch us"] is None and "NCCL joins" in row["note"] for row in rows[3:])
    assert rows[1]["MB"] == 4 * 32 * 4 / 1e6 and rows[1]["all_to_all of the bytes us"] > 0


def test_a_prompt_on_one_rank_and_on_two() -> None:
    settings = mirrored_gpu.Settings("smollm2-135m", 1, (64, 128), torch.float32, "cpu", 1)
    rows = mirrored_gpu.run(settings, (1, 2))
    assert [(row["tokens"], row["ranks"]) for row in rows] == [(64, 1), (64, 2), (128, 1), (128, 2)]
    assert rows[0]["speed-up"] == 1 and rows[3]["speed-up"] == pytest.approx(rows[2]["pass ms"] / rows[3]["pass ms"])
    assert all(row["hidden"] is None for row in rows), "on a CPU no kernels are traced"
