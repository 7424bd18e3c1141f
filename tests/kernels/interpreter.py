"""Makes Triton's interpreter right about bfloat16 (products, rounding casts; other arithmetic raises) and casts to e4m3.

The interpreter keeps bfloat16 as 16-bit integers and computes with those. Kernels widen to float32 after every load, so only
`tl.dot` operands and the last cast are bfloat16; everything else must fail rather than be wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_GUARDED = "fadd fsub fmul fdiv fneg exp fma fcmpOGT fcmpOLT fcmpOGE fcmpOLE"


def repair_bfloat16() -> None:
    """Call once, before any kernel runs."""
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    dot, cast, convert = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def is_bf16(value: Any) -> bool:
        return hasattr(value, "dtype") and value.dtype.scalar == tl.bfloat16

    def wide(value: Any) -> Any:
        if not is_bf16(value):
            return value
        return handle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), d, *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return handle(_nearest_even(source.data), tl.bfloat16)
        if source.dtype.scalar == tl.float32 and target.scalar == tl.float8e4nv:
            return handle(_nearest_e4m3(source.data), tl.float8e4nv)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return handle(_nearest_even(source.data), tl.bfloat16)
        if source.dtype.scalar == tl.float32 and target.scalar == tl.float8e4nv:
            return handle(_nearest_e4m3(source.data), tl.float8e4nv)
        return convert(self, source, target, rounding)

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    builder.create_fp_ext = builder.create_fp_trunc = lambda self, source, target: self.cast_impl(source, target)
    for name in _GUARDED.split():
        if operation := getattr(builder, f"create_{name}", None):
            setattr(builder, f"create_{name}", _refusing(operation, name, is_bf16))


def _nearest_even(values: Any) -> Any:
    """float32 as the bits of the nearest bfloat16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _nearest_e4m3(values: Any) -> Any:
    """float32 as the bits of the nearest e4m3, the largest one for what is larger, as the device does."""
    clamped = torch.from_numpy(np.array(values, np.float32)).clamp(-448, 448)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _refusing(operation: Any, name: str, is_bf16: Any) -> Any:
    def guarded(self: Any, *operands: Any) -> Any:
        if any(map(is_bf16, operands)):
            raise TypeError(f"bfloat16 {name} in the interpreter: cast to float32 first")
        return operation(self, *operands)

    return guarded
