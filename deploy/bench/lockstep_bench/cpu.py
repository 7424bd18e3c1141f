"""SmolLM2-135M on the CPU of this machine, in turn: the floor, the worker alone, the whole stack, peers.

A peer that is not installed is skipped with a message; its recorded figures then stand in, marked as recorded: they hold
for 2 cores of a Zen 4 with AVX-512 (bf16) only.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep_bench import peers, serve
from lockstep_bench.processes import HOST, Fleet, Process, free_port, wait_http
from lockstep_bench.report import Goal
from lockstep_common.errors import ConfigError, LockstepError

Log = Callable[[str], None]

ALONE = ("decode_b1_tok_per_s", "decode_b8_tok_per_s", "prefill_512_tok_per_s")
RECORDED_ALONE = {
    "vllm, compiled": dict(zip(ALONE, (60.0, 408.0, 1475.0), strict=True)),
    "vllm, eager": dict(zip(ALONE, (43.0, 300.0, 1315.0), strict=True)),
    "llama.cpp": dict(zip(ALONE, (103.0, 308.0, 968.0), strict=True)),
}
RECORDED_SERVED = {
    1: {"output_tok_per_s": 38.0, "ttft_p50_ms": 60.0, "tpot_p50_ms": 26.0},
    8: {"output_tok_per_s": 160.0, "ttft_p50_ms": 350.0, "tpot_p50_ms": 37.7},
}
ALONE_GOALS = dict(zip(ALONE, (43.0, 300.0, 1300.0), strict=True))
SERVED_GOAL = 1.2  # of `vllm serve`


@dataclass(frozen=True, slots=True)
class Settings:
    model: Path
    dtype: str = "bfloat16"
    clients: tuple[int, ...] = (1, 8)
    input_len: int = 128
    output_len: int = 128
    peer_venv: Path | None = None
    peer_gguf: Path | None = None  # for llama.cpp: the same weights, unquantised


async def run(settings: Settings, log: Log) -> list[dict[str, Any]]:
    """Rows with `engine`, `what` and `source` (measured, recorded or computed), then figures."""
    if not (settings.model / "config.json").is_file():
        raise ConfigError(
            f"{settings.model} is not a model directory (no config.json); get one with `lockstep model get`"
        )
    rows = [floor(settings.model)]
    log("worker alone")
    rows.append(await _alone(settings))
    log("whole stack: lockstep up")
    rows += await _served("lockstep", settings, _lockstep_command)
    rows += await _vllm(settings, log)
    rows += await _llama_cpp(settings, log)
    return rows


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Served: 1.2 times the peer of this run, or of the record; alone: what vLLM's eager mode reaches on this machine."""
    alone = next((r for r in rows if r["engine"] == "lockstep" and r["what"] == "alone"), {})
    found = [
        Goal(f"worker alone, {name}", alone.get(name), limit, True, "tok/s") for name, limit in ALONE_GOALS.items()
    ]
    for clients in RECORDED_SERVED:
        own, peer = (
            next((r for r in rows if r["engine"] == e and r["what"] == _what(clients)), {})
            for e in ("lockstep", "vllm")
        )
        if peer:
            name = f"served, {clients} client(s): {SERVED_GOAL} x vllm serve ({peer['source']})"
            found.append(Goal(name, own.get("output_tok_per_s"), SERVED_GOAL * peer["output_tok_per_s"], True, "tok/s"))
    return found


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each peer's figures as lockstep / peer; above 1 lockstep is better, for latencies too."""
    own = {r["what"]: r for r in rows if r["engine"] == "lockstep"}
    found = []
    for row in rows:
        mine = own.get(row["what"])
        if mine is None or row["engine"] == "lockstep":
            continue
        ratio: dict[str, Any] = {"lockstep against": row["engine"], "what": row["what"], "source": row["source"]}
        for key, value in row.items():
            if isinstance(value, float) and value and isinstance(mine.get(key), float):
                ratio[key] = value / mine[key] if key.endswith("_ms") else mine[key] / value
        found.append(ratio)
    return found


def floor(model: Path) -> dict[str, Any]:
    """A decode step reads every weight once: no step is shorter than their bytes over what memory delivers."""
    weights = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    bandwidth = read_bandwidth()
    return {
        "engine": "floor (memory)",
        "what": "alone",
        "source": "computed",
        "decode_b1_tok_per_s": bandwidth / weights,
        "decode_b8_tok_per_s": 8 * bandwidth / weights,
        "read_gb_per_s": bandwidth / 1e9,
        "weights_mb": weights / 1e6,
    }


def read_bandwidth(size: int = 256 << 20) -> float:
    """Bytes/s that all cores together read from a buffer larger than the caches, best of five."""
    threads = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(size // 8, np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:

        def once() -> float:
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            return time.perf_counter() - start

        return size / min(once() for _ in range(5))


async def _alone(settings: Settings) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "lockstep_bench.worker_alone",
        "--model",
        str(settings.model),
        "--dtype",
        settings.dtype,
    ]
    figures = await _json_of("worker_alone", command, timeout=600)
    return {"engine": "lockstep", "what": "alone", "source": "measured", **{name: figures[name] for name in ALONE}}


async def _served(
    engine: str, settings: Settings, command: Callable[[Settings, int], list[str]]
) -> list[dict[str, Any]]:
    """Starts the server, sends the workload at each number of clients, stops it."""
    port = free_port()
    rows = []
    with Fleet() as fleet:
        server = fleet.start(engine, command(settings, port), env=_OFFLINE)
        await wait_http(HOST, port, "/health", timeout=300, processes=[server])
        for clients in settings.clients:
            rows.append(
                {
                    "engine": engine,
                    "what": _what(clients),
                    "source": "measured",
                    **await _load(settings, port, clients, server),
                }
            )
    return rows


async def _load(settings: Settings, port: int, clients: int, server: Process) -> dict[str, float]:
    work = serve.Workload(
        url=f"http://{HOST}:{port}", num_prompts=4 * clients if clients > 1 else 6, concurrency=clients,
        input_len=settings.input_len, output_len=settings.output_len, warmups=2,
    )  # fmt: skip
    outcome = await serve.run(work)
    server.check()
    if outcome.errors:
        raise LockstepError(f"{server.name}: {len(outcome.errors)} requests failed, the first: {outcome.errors[0]}")
    row = serve.summary(work, outcome)
    return {key: row[key] for key in ("output_tok_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")}


async def _vllm(settings: Settings, log: Log) -> list[dict[str, Any]]:
    venv = settings.peer_venv
    if venv is None or not (venv / "bin" / "vllm").is_file():
        log(
            f"peer vllm skipped: {'no --peer-venv given' if venv is None else f'no bin/vllm in {venv}'}; recorded figures stand in"
        )
        rows = [
            {"engine": name, "what": "alone", "source": "recorded", **RECORDED_ALONE[name]}
            for name in ("vllm, compiled", "vllm, eager")
        ]
        return rows + [
            {"engine": "vllm", "what": _what(c), "source": "recorded", **f} for c, f in RECORDED_SERVED.items()
        ]
    log("peer: vllm alone")
    script = Path(peers.__file__).parent / "vllm_offline.py"
    command = [str(venv / "bin" / "python"), str(script), str(settings.model), settings.dtype]
    alone = await _json_of("vllm_alone", command, timeout=900)
    log("peer: vllm serve")
    rows = [{"engine": "vllm, compiled", "what": "alone", "source": "measured", **alone}]
    return rows + await _served("vllm", settings, _vllm_command)


async def _llama_cpp(settings: Settings, log: Log) -> list[dict[str, Any]]:
    python = settings.peer_venv / "bin" / "python" if settings.peer_venv else None
    missing = (
        "no --peer-venv given"
        if python is None
        else "no --peer-gguf given"
        if settings.peer_gguf is None
        else f"llama_cpp cannot be imported by {python}"
        if await _status([str(python), "-c", "import llama_cpp"])
        else ""
    )
    if missing:
        log(f"peer llama.cpp skipped: {missing}; recorded figures stand in")
        return [{"engine": "llama.cpp", "what": "alone", "source": "recorded", **RECORDED_ALONE["llama.cpp"]}]
    log("peer: llama.cpp")
    script = Path(peers.__file__).parent / "llama_cpp.py"
    command = [str(python), str(script), str(settings.peer_gguf), str(len(os.sched_getaffinity(0)))]
    figures = await _json_of("llama_cpp", command, timeout=600)
    return [{"engine": "llama.cpp", "what": "alone", "source": "measured", **figures}]


_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}


def _lockstep_command(settings: Settings, port: int) -> list[str]:
    return [
        sys.executable, "-m", "lockstep_cli", "up", "--model", str(settings.model), "--dtype", settings.dtype,
        "--max-model-len", "2048", "--port", str(port),
    ]  # fmt: skip


def _vllm_command(settings: Settings, port: int) -> list[str]:
    assert settings.peer_venv is not None
    return [
        str(settings.peer_venv / "bin" / "vllm"), "serve", str(settings.model), "--dtype", settings.dtype,
        "--max-model-len", "2048", "--host", HOST, "--port", str(port),
    ]  # fmt: skip


def _what(clients: int) -> str:
    return f"served, {clients} client(s)"


async def _json_of(name: str, command: list[str], *, timeout: float) -> dict[str, Any]:
    """The last JSON object that the command printed at the beginning of a line."""
    with Fleet() as fleet:
        process = fleet.start(name, command, env=_OFFLINE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        deadline = time.monotonic() + timeout
        while process.returncode is None:
            if time.monotonic() > deadline:
                raise LockstepError(f"{name} did not end within {timeout:g} s:\n{process.tail()}")
            await asyncio.sleep(0.1)
        if process.returncode:
            raise LockstepError(f"{name} failed:\n{process.tail()}")
        output = process.log.read_text(errors="replace")
        start = output.rfind("\n{")
        try:
            figures: dict[str, Any] = json.JSONDecoder().raw_decode(output[start + 1 :])[0]
        except ValueError:
            raise LockstepError(f"{name} printed no figures:\n{process.tail()}") from None
        return figures


async def _status(command: list[str]) -> int:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    return await process.wait()
