"""The same work on an installed peer: a script of `peers/` inside the peer's own interpreter, a row for each line it prints."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep_bench import peers
from lockstep_bench.engine import Settings
from lockstep_bench.processes import Fleet, Process
from lockstep_bench.workloads import Workload
from lockstep_common.errors import ConfigError, Unavailable

_POLL_S = 0.1
_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class NotInstalled(ConfigError):
    """The interpreter that was named does not have the peer."""


def interpreter(venv: Path | None) -> Path:
    return Path(sys.executable) if venv is None else venv / "bin" / "python"


async def vllm(
    python: Path,
    settings: Settings,
    works: Sequence[Workload],
    options: Mapping[str, Any],
    log_dir: Path | None = None,
) -> AsyncIterator[dict[str, Any]]:
    """Rows as ours, `engine` "vLLM VERSION", as they come. `options`: more arguments of `vllm.LLM`.

    NotInstalled if `python` cannot import vllm.
    """
    await _check(python, "vllm")
    order = {
        "model": str(settings.model),
        "load_format": settings.load_format,
        "dtype": settings.dtype,
        "max_model_len": settings.length,
        "max_num_seqs": settings.max_num_seqs,
        "options": dict(options),
        "works": [asdict(work) | {"lone": work.metric == "ms_per_tok"} for work in works],
    }
    script = Path(peers.__file__).parent / "vllm_throughput.py"
    with Fleet(log_dir) as fleet:
        process = fleet.start(f"{settings.name}-vllm", [str(python), str(script), json.dumps(order)], env=_OFFLINE)
        async for row in _rows(process):
            yield row | {"model": settings.name}
        if process.returncode:
            raise Unavailable(f"vllm failed:\n{process.tail()}")


async def _rows(process: Process) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects that a process prints, a line each, until it ends."""
    seen = 0
    running = True
    while running:
        running = process.returncode is None
        complete, _, _ = process.log.read_text(errors="replace").rpartition("\n")
        lines = complete.splitlines()
        for line in lines[seen:]:
            if line.startswith('{"engine"'):
                yield json.loads(line)
        seen = len(lines)
        if running:
            await asyncio.sleep(_POLL_S)


async def _check(python: Path, package: str) -> None:
    command = [
        str(python),
        "-c",
        f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)",
    ]
    try:
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        found = await process.wait() == 0
    except OSError:
        found = False
    if not found:
        raise NotInstalled(
            f"{package} is not installed for {python}: skipped; name its environment with --peer-venv DIR"
        )
