"""The kernels behind a call, compiled as its launches would compile them, and not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction

from lockstep_kernels import dependent


def variants(name: str, call: Callable[[], object], kernels: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One variant for `tests.kernels.aot` for each of the `kernels` that `call` (on CPU tensors) launches, in their order."""
    for number in range(kernels):
        yield f"{name} #{number}", partial(_compiled, call, number, kernels)


def _compiled(call: Callable[[], object], number: int, kernels: int) -> Any:
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append(run(self, *args, grid=grid, warmup=True, **options))
        return found[-1]

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(dependent, "supported", lambda device: True),
    ):
        call()
    if len(found) != kernels:
        raise AssertionError(f"{len(found)} launches, expected {kernels}")
    return found[number]
