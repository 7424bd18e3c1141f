"""Generates the gRPC stubs beside their .proto files: as a build hook (`pip install ./proto`) and from `make proto`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PROTOS = sorted(ROOT.glob("lockstep_proto/v1/*.proto"))


def generate() -> list[str]:
    """Runs protoc over every .proto file; returns the generated paths, relative to this folder."""
    import grpc_tools
    from grpc_tools import protoc

    include = Path(grpc_tools.__file__).parent / "_proto"
    args = ["protoc", f"-I{ROOT}", f"-I{include}", f"--python_out={ROOT}", f"--grpc_python_out={ROOT}"]
    if _has_mypy_plugin():
        args += [f"--mypy_out=quiet:{ROOT}", f"--mypy_grpc_out=quiet:{ROOT}"]
    else:
        args += [f"--pyi_out={ROOT}"]
    status = protoc.main(args + [str(p) for p in PROTOS])
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status} on {[p.name for p in PROTOS]}")
    return [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("lockstep_proto/v1/*_pb2*"))]


def _has_mypy_plugin() -> bool:
    import os
    import shutil

    here = str(Path(sys.executable).parent)
    os.environ["PATH"] = here + os.pathsep + os.environ.get("PATH", "")
    return shutil.which("protoc-gen-mypy") is not None


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # `make proto` needs the generator only
    pass
else:

    class StubHook(BuildHookInterface):  # type: ignore[type-arg]
        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, object]) -> None:
            build_data["artifacts"] = ["/" + path for path in generate()]


if __name__ == "__main__":
    print("\n".join(generate()))
