"""What the built packages carry."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LISTED = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
UNITS = sorted(ROOT / Path(name).parent for name in LISTED.split("\0") if name.endswith("/pyproject.toml"))


def test_the_contract_carries_stubs_that_it_generated_itself(tmp_path: Path) -> None:
    """Ignored files are left out of wheels unless the build hook names them: a wheel without stubs would import nothing."""
    source = tmp_path / "proto"
    shutil.copytree(ROOT / "proto", source, ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
    (source / ".gitignore").write_text("*_pb2.py\n*_pb2.pyi\n*_pb2_grpc.py\n*_pb2_grpc.pyi\n")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", tmp_path, source], check=True, timeout=120, cwd=tmp_path)
    (wheel,) = tmp_path.glob("lockstep_proto-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for proto in (ROOT / "proto" / "lockstep_proto" / "v1").glob("*.proto"):
        for suffix in (".proto", "_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
            assert f"lockstep_proto/v1/{proto.stem}{suffix}" in names
    assert "lockstep_proto/py.typed" in names


def test_every_unit_is_found() -> None:
    assert len(UNITS) == 8


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_typed_documented_and_of_one_version(unit: Path) -> None:
    project = tomllib.loads((unit / "pyproject.toml").read_text())
    (package,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (unit / package / "py.typed").is_file() and (unit / package / "__init__.py").is_file()
    assert (unit / project["project"]["readme"]).stat().st_size > 300
    assert project["project"]["name"] == package.replace("_", "-")
    assert project["project"]["version"] == "0.1.0"


def test_pins_satisfy_the_generator() -> None:
    """Stubs refuse to load on a grpcio older than their generator's."""
    pins = dict(
        line.split("==")
        for line in (ROOT / "requirements-dev.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    )
    assert pins["grpcio-tools"] == pins["grpcio"] == pins["grpcio-health-checking"] == pins["grpcio-reflection"]
    build = tomllib.loads((ROOT / "proto" / "pyproject.toml").read_text())["build-system"]["requires"]
    assert f"grpcio-tools=={pins['grpcio-tools']}" in build
