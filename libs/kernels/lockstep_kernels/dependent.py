"""Programmatic dependent launch: a kernel may start while the one before it ends, and waits before it reads what that wrote.

What a kernel does before `wait` must not touch anything that an earlier kernel writes: it reads weights and computes addresses.
Every program of a kernel that is launched so must `wait`, or the kernel after it could overtake the one before it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def supported(device: torch.device) -> bool:
    """From sm_90 on; never in the interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def release(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next kernel may start, as far as there is room beside this one."""
    if PDL:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until everything that the kernel before this one wrote can be read."""
    if PDL:
        gdc_wait()
