"""Makes Triton's interpreter right about bfloat16 (products, rounding casts; other arithmetic raises) and casts to e4m3, and
strict about addresses.

The interpreter reads and writes wherever a kernel points it to; here, nowhere but in the tensors that the launch was given.

The interpreter keeps bfloat16 as 16-bit integers and computes with those. Kernels widen to float32 after every load, so only
`tl.dot` operands and the last cast are bfloat16; everything else must fail rather than be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
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


def check_addresses() -> None:
    """Call once, before any kernel runs: loads, stores and atomics outside of the launch's tensors raise IndexError."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    arguments = executor._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas
    starts: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)  # of the tensors of the launch, in order
    ends = starts

    def noted(self: Any, *given: Any) -> Any:
        nonlocal starts, ends
        args, kwargs = arguments(self, *given)
        spans = sorted(_spans((*args, *kwargs.values())))
        starts = np.array([start for start, _ in spans], np.uint64)
        ends = np.maximum.accumulate(np.array([end for _, end in spans], np.uint64))
        return args, kwargs

    def check(pointers: Any, mask: Any = None) -> None:
        at = np.asarray(pointers.data, np.uint64).ravel()
        if mask is not None:
            at = at[np.broadcast_to(np.asarray(mask.data, bool), np.shape(pointers.data)).ravel()]
        if at.size == 0:
            return
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        span = np.searchsorted(starts, at, "right") - 1
        outside = (span < 0) | (at + size > ends[span])
        if outside.any():
            raise IndexError(f"{outside.sum()} of {len(at)} addresses lie outside of the launch's tensors")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest, **options)

    def checked_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return rmw(self, operation, pointers, value, mask, *rest)

    def checked_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        check(pointers)
        return cas(self, pointers, *rest)

    executor._init_args_hst = noted
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = checked_rmw, checked_cas


def _spans(arguments: Any) -> Iterator[tuple[int, int]]:
    """First byte and end of the tensors among a launch's arguments."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _spans(argument)
        elif isinstance(tensor := getattr(argument, "base", argument), torch.Tensor) and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            yield tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


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
