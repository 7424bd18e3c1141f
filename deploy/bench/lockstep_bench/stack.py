"""The stack's own share of the time to first token: router, scheduler and a worker that computes nothing."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep_bench import serve
from lockstep_bench.client import wait_serving
from lockstep_bench.processes import HOST, Fleet, free_port, wait_http
from lockstep_bench.report import Goal
from lockstep_bench.stats import Served, percentile
from lockstep_bench.tokenizer import write_tokenizer
from lockstep_common.errors import LockstepError

VOCAB = 2048
MAX_MODEL_LEN = 4096
MODEL = "null"
PAUSES_S = (0.0, 0.01)


async def ttft(requests: int, input_len: int, output_len: int) -> list[dict[str, Any]]:
    """One row a pause: TTFT of a lone client's requests, one after the other.

    Without a pause every process is awake; after 10 ms of silence each hop also pays for waking a core up.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-") as scratch, Fleet() as fleet:
        directory = Path(scratch) / MODEL
        write_tokenizer(directory, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN)
        port = await _start(fleet, directory)
        rows = []
        for seed, pause in enumerate(PAUSES_S):
            served = await _measure(port, requests, input_len, output_len, pause, seed)
            rows.append({"pause_ms": pause * 1e3, "requests": requests, "input_len": input_len, **_figures(served)})
        fleet.check()
        return rows


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    busy = next((row for row in rows if row["pause_ms"] == 0), {})
    return [Goal("TTFT p50, router + scheduler + null worker", busy.get("ttft_p50_ms"), 5.0, False, "ms")]


def _figures(served: Sequence[Served]) -> dict[str, float]:
    times = [r.ttft * 1e3 for r in served]
    return {f"ttft_p{q}_ms": percentile(times, q) for q in (50, 90, 99)}


async def _measure(
    port: int, requests: int, input_len: int, output_len: int, pause: float, seed: int
) -> tuple[Served, ...]:
    work = serve.Workload(
        url=f"http://{HOST}:{port}", model=MODEL, num_prompts=requests, input_len=input_len, output_len=output_len,
        vocab=(0, 256), warmups=10, seed=seed,
    )  # fmt: skip
    outcome = await serve.run(work, pause)
    if outcome.errors:
        raise LockstepError(f"{len(outcome.errors)} of {requests} requests failed, the first: {outcome.errors[0]}")
    return outcome.served


async def _start(fleet: Fleet, directory: Path) -> int:
    worker_port, scheduler_port, port = free_port(), free_port(), free_port()
    worker = fleet.python(
        "worker", "-m", "lockstep_worker", "--port", worker_port, "--null-step-ms", 0, "--null-vocab-size", VOCAB,
        "--served-model-name", MODEL, "--null-max-model-len", MAX_MODEL_LEN, "--threads", 1, "--log-level", "WARNING",
    )  # fmt: skip
    scheduler = fleet.python(
        "scheduler", "-m", "lockstep_scheduler", "--port", scheduler_port, "--workers", f"{HOST}:{worker_port}",
        "--redis-url", "none", "--max-model-len", MAX_MODEL_LEN, "--log-level", "WARNING",
    )  # fmt: skip
    router = fleet.python(
        "router", "-m", "lockstep_router", "--port", port, "--grpc-port", 0, "--schedulers", f"{HOST}:{scheduler_port}",
        "--redis-url", "none", "--model", directory, "--served-model-name", MODEL, "--log-level", "WARNING",
    )  # fmt: skip
    await asyncio.gather(
        wait_serving(f"{HOST}:{worker_port}", check=worker.check),
        wait_http(HOST, port, "/readyz", timeout=60, processes=(worker, scheduler, router)),
    )
    return port
