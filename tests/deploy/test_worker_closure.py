"""The worker runs with its declared dependencies and nothing else: what goes into an image is known and small.

On CPU that is all; on a GPU it takes the extra `gpu` too, which adds Triton.
"""

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
ROOT = Path(__file__).resolve().parents[2]
GPU_ONLY = {"kernel", "cuda", "dependent"}  # what modules are called that a CPU never imports
GPU_ONLY_MODULES = {"lockstep_kernels.mla.parts", "lockstep_kernels.moe.grouped", "lockstep_kernels.moe.skinny"}

IMPORT_ALL = """
import importlib, pkgutil, sys
todo = ["lockstep_worker", "lockstep_kernels"]
while todo:
    name = todo.pop()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        print("needs-triton", name)
    else:
        print("imported", name)
        todo += [child.name for child in pkgutil.iter_modules(getattr(module, "__path__", ()), name + ".")]
"""
CPU_TESTS_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it fails as if it was not there
import pytest
sys.exit(pytest.main(["-p", "no:xdist", "-k", "greedy or test_runner", "tests/unit/worker/test_runner.py",
    "tests/kernels/test_oracles.py", "tests/kernels/test_oracles_moe.py", "tests/kernels/test_oracles_deepseek.py"]))
"""


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(name: str, extra: str = "") -> list[Requirement]:
    """What `name` requires here, with this extra or none."""
    found = (Requirement(line) for line in metadata.requires(name) or ())
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": extra})]


def direct(name: str) -> set[str]:
    """The distributions that `name` requires here, without extras."""
    return {normalised(r.name) for r in requirements(name)}


def closure(name: str, extra: str = "") -> set[str]:
    """All distributions that installing `name[extra]` brings."""
    found: set[str] = set()
    todo = [(name, extra)]
    while todo:
        name, extra = todo.pop()
        found.add(name)
        for requirement in requirements(name, extra):
            required = normalised(requirement.name)
            todo += [(required, e) for e in requirement.extras or {""} if e or required not in found]
    return found


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Every file that the distribution installed, as a link at the same place under `site`."""
    for file in distribution.files or ():
        if file.parts[0] == ".." or "__pycache__" in file.parts:
            continue
        target = site.joinpath(*file.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(Path(str(distribution.locate_file(file))).resolve())


def install(home: Path, distributions: set[str]) -> Path:
    """An interpreter whose site-packages hold these distributions and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name in distributions:
        link(metadata.distribution(name), home / "lib" / version / "site-packages")
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a CPU has. torch's own wheels for CUDA require Triton; those for CPU, as here, do not."""
    return install(tmp_path_factory.mktemp("closure"), closure("lockstep-worker") - {"triton"})


def imported(python: Path) -> dict[str, str]:
    """How importing each module of the worker went: "imported" or "needs-triton"; whatever else it lacks is an error."""
    result = subprocess.run([python, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return {name: how for how, name in map(str.split, result.stdout.splitlines())}


def test_what_the_worker_declares() -> None:
    declared = set().union(*(direct(name) for name in OURS))
    assert declared - set(OURS) == THIRD_PARTY


def test_the_gpu_extra_is_triton_alone() -> None:
    assert closure("lockstep-worker", "gpu") - closure("lockstep-worker") <= {"triton"}
    assert "triton" in closure("lockstep-worker", "gpu")


def test_modules_for_a_cpu_import_without_triton(python: Path) -> None:
    found = imported(python)
    assert {"lockstep_worker.inputs", "lockstep_kernels.attention.cpu"} <= found.keys()
    without = {name for name, how in found.items() if how == "needs-triton"}
    assert {name for name in without if name.rsplit(".")[-1] not in GPU_ONLY} <= GPU_ONLY_MODULES


def test_every_module_imports_where_triton_is(tmp_path: Path) -> None:
    found = imported(install(tmp_path, closure("lockstep-worker", "gpu")))
    assert set(found.values()) == {"imported"}
    assert "lockstep_kernels.moe.grouped.kernel" in found


@pytest.mark.slow
def test_models_run_on_cpu_without_triton() -> None:
    """No path of a CPU's steps imports what it need not have, in any family of models."""
    command = [sys.executable, "-c", CPU_TESTS_WITHOUT_TRITON]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "absent", ["redis", "pydantic", "fastapi", "transformers", "lockstep_scheduler", "lockstep_cli"]
)
def test_the_closure_is_closed(python: Path, absent: str) -> None:
    result = subprocess.run([python, "-c", f"import {absent}"], capture_output=True, text=True, timeout=60)
    assert "ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize("service", ["lockstep-router", "lockstep-scheduler"])
def test_no_torch_in_the_closures_of_router_and_scheduler(service: str) -> None:
    assert not closure(service) & {"torch", "triton", "lockstep-kernels", "transformers"}
