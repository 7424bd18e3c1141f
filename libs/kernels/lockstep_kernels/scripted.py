"""Functions of tensors that run without Python: for CPUs, where an operation called from Python costs more than its work.

A decode step of a small model calls a thousand operations of a few microseconds each. From Python each takes 2 to 5 us more (a
product with FBGEMM, whose weight is an object, 11), and gives the interpreter's lock away and takes it back, for which it
waits while another thread of the process has something to do. Within a scripted function an operation costs 0.3 us more, and
the whole function gives the lock away once.

The operations and their order stay as written: nothing is fused, so that bits are those of the function in Python. It is
TorchScript, of which torch says that torch.compile replaces it: that one needs a C++ compiler on the machine it runs on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def scripted(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function of tensors, numbers, lists and named tuples of them, and the functions that it calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return cast(Callable[P, R], torch.jit.script(function))
