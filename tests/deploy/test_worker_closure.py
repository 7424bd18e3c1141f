"""The worker runs with its declared dependencies and nothing else: what goes into a GPU image is known and small."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

OURS = ("lockstep-worker", "lockstep-kernels", "lockstep-common", "lockstep-proto")
THIRD_PARTY = {"grpcio", "grpcio-health-checking", "numpy", "prometheus-client", "protobuf", "safetensors", "torch"}

IMPORT_ALL = """
import importlib, pkgutil, sys
for root in ("lockstep_worker", "lockstep_kernels"):
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, root + "."):
        importlib.import_module(module.name)
        print(module.name)
"""


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def direct(name: str) -> set[str]:
    """The distributions that `name` requires here, without extras."""
    requirements = (Requirement(line) for line in metadata.requires(name) or ())
    return {normalised(r.name) for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}


def closure(name: str) -> set[str]:
    found: set[str] = set()
    todo = [name]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo.extend(direct(name))
    return found


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Every file that the distribution installed, as a link at the same place under `site`."""
    for file in distribution.files or ():
        if file.parts[0] == ".." or "__pycache__" in file.parts:
            continue
        target = site.joinpath(*file.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(Path(str(distribution.locate_file(file))).resolve())


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose site-packages hold the worker's closure and nothing else."""
    home = tmp_path_factory.mktemp("closure")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name in closure("lockstep-worker"):
        link(metadata.distribution(name), home / "lib" / version / "site-packages")
    return home / "bin" / "python"


def test_what_the_worker_declares() -> None:
    declared = set().union(*(direct(name) for name in OURS))
    assert declared - set(OURS) == THIRD_PARTY


def test_every_module_of_the_worker_imports_in_its_closure(python: Path) -> None:
    result = subprocess.run([python, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "lockstep_worker.inputs" in result.stdout.split()


@pytest.mark.parametrize(
    "absent", ["redis", "pydantic", "fastapi", "transformers", "lockstep_scheduler", "lockstep_cli"]
)
def test_the_closure_is_closed(python: Path, absent: str) -> None:
    result = subprocess.run([python, "-c", f"import {absent}"], capture_output=True, text=True, timeout=60)
    assert "ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize("service", ["lockstep-router", "lockstep-scheduler"])
def test_no_torch_in_the_closures_of_router_and_scheduler(service: str) -> None:
    assert not closure(service) & {"torch", "triton", "lockstep-kernels", "transformers"}
