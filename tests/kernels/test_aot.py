"""Every kernel compiles ahead of time, for a GPU that is not here, without spilling and within its shared memory."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import aot

ROOT = Path(__file__).resolve().parents[2]
OPS = [module.name for module in pkgutil.iter_modules(aot.__path__) if module.name != "__main__"]


def check(cache: Path, op: str, *options: str) -> None:
    """Compiles in a process of its own: kernels are compiled or interpreted from the moment that they are imported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.aot", op, *options],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, (
        "\n".join(line for line in result.stdout.splitlines() if "FAULT" in line) + result.stderr
    )
    assert result.stdout.startswith(op)


@pytest.mark.parametrize("op", OPS)
def test_each_kernel_compiles(op: str, tmp_path: Path) -> None:
    check(tmp_path, op, "--quick")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", OPS)
def test_every_variant_compiles(op: str, tmp_path: Path) -> None:
    check(tmp_path, op)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", OPS)
def test_each_kernel_compiles_for_blackwell(op: str, tmp_path: Path) -> None:
    check(tmp_path, op, "--quick", "--capability", "100")
