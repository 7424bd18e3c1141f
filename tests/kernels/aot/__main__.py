"""python -m tests.kernels.aot [OP ...]: compiles every kernel variant of these ops for a GPU that is not here.

A stub driver stands in for CUDA, so that the ordinary launch path specialises kernels as a real launch would. Prints a line a
variant (JSON with --json) and exits with 1 if one does not compile, spills registers or needs more shared memory than there is.
With --quick only the first variant is compiled of those that a kernel has for operands of the same dtypes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from lockstep_kernels import dependent
from tests.kernels import aot

SHARED_MEMORY: Final = {80: 166912, 90: 232448, 100: 232448}  # bytes that a block may have, by compute capability
STACK: Final = 64  # bytes of a thread that nobody needs to care about


@triton.jit
def not_before_sm_90(PDL: tl.constexpr):
    """In place of `dependent.release` and `wait`, which an older GPU has not; there kernels are launched without."""


class StubDriver:
    """What `JITFunction.warmup` asks a driver for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def operations() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(aot.__path__) if module.name != "__main__"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.aot", description=__doc__)
    parser.add_argument("ops", nargs="*", help="default: all")
    parser.add_argument("--capability", type=int, choices=sorted(SHARED_MEMORY), default=90)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET is set: interpreted kernels are not compiled")
    driver.set_active(StubDriver(args.capability))
    if args.capability < 90:
        dependent.release = dependent.wait = not_before_sm_90
    if args.quick:
        _compile_first_only()
    failures = 0
    for report in _compile(args.ops or operations(), SHARED_MEMORY[args.capability]):
        failures += bool(report["faults"])
        print(json.dumps(report) if args.json else _line(report), flush=True)
    return int(failures > 0)


def _compile_first_only() -> None:
    """Has every later launch of a kernel, with operands of the dtypes of an earlier one, stand for that one."""
    compiled: dict[tuple[Any, ...], Any] = {}
    compile_variant = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        operands = (getattr(arg, "base", arg) for arg in (*args, *options.values()))
        key = self, *(operand.dtype for operand in operands if isinstance(operand, torch.Tensor))
        if key not in compiled:
            compiled[key] = compile_variant(self, *args, **options)
        return compiled[key]

    JITFunction.run = run


def _compile(ops: list[str], shared_memory: int) -> Iterator[dict[str, Any]]:
    """A report on each kernel, under the name of the first variant that it is compiled for."""
    for op in ops:
        seen: dict[int, Any] = {}
        for name, warm_up in importlib.import_module(f"tests.kernels.aot.{op}").variants():
            started = time.perf_counter()
            try:
                compiled = warm_up()
            except Exception as error:
                yield {"op": op, "name": name, "faults": [f"{type(error).__name__}: {error}"]}
                continue
            if id(compiled) not in seen:
                seen[id(compiled)] = compiled
                seconds = round(time.perf_counter() - started, 2)
                yield {"op": op, "name": name, **_inspect(compiled, shared_memory), "s": seconds}


def _inspect(compiled: Any, shared_memory: int) -> dict[str, Any]:
    usage = _resource_usage(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    faults = []
    if shared > shared_memory:
        faults.append(f"{shared} bytes of shared memory, there are {shared_memory}")
    if (spilled := usage.get("STACK", 0)) > STACK:
        faults.append(f"spills {spilled} bytes of registers to the stack")
    return {
        "kernel": compiled.metadata.name,
        "registers": usage.get("REG"),
        "shared": shared,
        "stack": usage.get("STACK"),
        "wgmma": "wgmma" in compiled.asm["ptx"],
        "faults": faults,
    }


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", printed)}


def _line(report: dict[str, Any]) -> str:
    facts = " ".join(f"{key}={value}" for key, value in report.items() if key not in ("op", "name", "faults"))
    return f"{report['op']:12} {report['name']:44} {facts} {'FAULT: ' + '; '.join(report['faults']) if report['faults'] else ''}"


if __name__ == "__main__":
    sys.exit(main())
