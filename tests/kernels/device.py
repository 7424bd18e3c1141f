"""Where kernel tests run: on the GPU if there is one, else in Triton's interpreter.

Import this before any kernel module: the interpreter is chosen when a kernel is defined.
"""

from __future__ import annotations

import os
from typing import Any, Final

import pytest
import torch

from lockstep_kernels.bits import differing_ops

ON_GPU: Final = torch.cuda.is_available()
DEVICE: Final = torch.device("cuda" if ON_GPU else "cpu")
HALF_DTYPES: Final = (torch.bfloat16, torch.float16)

CPU_DIFFERS: Final = tuple(sorted({op for dtype in (torch.float32, torch.bfloat16) for op in differing_ops(dtype)}))
requires_equal_bits = pytest.mark.skipif(
    bool(CPU_DIFFERS), reason=f"bits of {' and '.join(CPU_DIFFERS)} depend on the number of rows on this CPU"
)
requires_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels import interpreter

    interpreter.repair_bfloat16()
    interpreter.check_addresses()


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory that must not be read, or must be written: all NaN."""
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> torch.Tensor:
    """Normal random numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, **options).to(DEVICE, dtype)
