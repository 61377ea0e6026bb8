"""Repairs Triton's interpreter so that it computes as GPUs do.

Triton 3.7 truncates float32 to bfloat16 and to 8 bits, but hardware rounds to nearest, ties to even. It also multiplies
and subtracts the bit patterns of bfloat16 as integers. A kernel would be judged by errors that it does not make. torch
converts as the hardware does.

Matrices are multiplied in float64. numpy's library orders sums by the number of rows, which tensor cores do not, and
float64 hides that. A sort of 1024 elements is 55 reductions by exclusive or, which Triton would compute in Python, one
element at a time.

Triton replaces the functions of its language at each call of one function by another, and a launch has done so before.
That took a quarter to a half of the time of kernels' tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_BITS = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}


def repair() -> None:
    """Repair once in this process. Does nothing if TRITON_INTERPRET is not set, so that kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter  # noqa: PLC0415

    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _multiply
    interpreter.InterpreterBuilder.create_fma = _multiply_and_add
    interpreter.InterpreterBuilder.create_fsub = _rounded(np.subtract)
    interpreter.InterpreterBuilder.create_fmul = _rounded(np.multiply)
    if interpreter.ReduceOps.generic_reduce is not _reduce:
        interpreter.ReduceOps.otherwise = interpreter.ReduceOps.generic_reduce
        interpreter.ReduceOps.generic_reduce = _reduce
        interpreter._patch_always, interpreter._patch_lang = interpreter._patch_lang, _patch_once


def _patch_once(function: Any) -> Any:
    """Replace the language's functions by interpreted ones for a call of `function`, unless its caller has. Returns
    what puts them back when a launch ends."""
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime import interpreter  # noqa: PLC0415

    visible = [module for module in function.__globals__.values() if module is tl or module is tl.core]
    if any(tl.core.is_builtin(module.load) for module in visible):
        return interpreter._patch_always(function)
    return interpreter._LangPatchScope()


def _convert(numbers: np.ndarray[Any, Any], source: Any, target: Any, _rounding: object) -> np.ndarray[Any, Any]:
    values = torch.frombuffer(bytearray(numbers.tobytes()), dtype=_DTYPES[source.name])
    bits = values.to(_DTYPES[target.name]).view(_BITS[target.primitive_bitwidth])
    return bits.numpy().reshape(numbers.shape)


def _reduce(self: Any, given: Any) -> Any:
    import triton.language as tl  # noqa: PLC0415

    if self.combine_fn != tl.standard._xor_combine or self.axis is None:
        return self.otherwise(given)
    (numbers,) = given
    reduced = np.bitwise_xor.reduce(numbers.handle.data, axis=self.axis, keepdims=self.keep_dims)
    return [self.to_tensor(reduced, numbers.dtype)]


def _rounded(operation: Callable[[Any, Any], Any]) -> Callable[[object, Any, Any], Any]:
    """The operation; for bfloat16 in float32, rounded once."""

    def compute(_: object, x: Any, y: Any) -> Any:
        import triton.language as tl  # noqa: PLC0415
        from triton.runtime.interpreter import TensorHandle  # noqa: PLC0415

        if x.dtype.scalar != tl.bfloat16:
            return TensorHandle(operation(x.data, y.data), x.dtype.scalar)
        wide = [_convert(one.data, tl.bfloat16, tl.float32, None).view(np.float32) for one in (x, y)]
        return TensorHandle(_convert(operation(*wide), tl.float32, tl.bfloat16, None), tl.bfloat16)

    return compute


def _multiply_and_add(_: object, x: Any, y: Any, z: Any) -> Any:
    """One rounding, except for digits that float64 cannot hold; Triton's own also rounds the product."""
    from triton.runtime.interpreter import TensorHandle  # noqa: PLC0415

    total = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


def _multiply(_: object, a: Any, b: Any, start: Any, _precision: object, _exactness: object) -> Any:
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime.interpreter import TensorHandle  # noqa: PLC0415

    def numbers(handle: Any) -> np.ndarray[Any, Any]:
        if handle.dtype.is_floating() and handle.dtype.primitive_bitwidth < 32:
            return _convert(handle.data, handle.dtype, tl.float32, None).view(np.float32).astype(np.float64)
        found: np.ndarray[Any, Any] = handle.data
        return found.astype(np.float64) if handle.dtype.is_floating() else found

    product = np.matmul(numbers(a), numbers(b)) + start.data
    return TensorHandle(product.astype(start.data.dtype), start.dtype.scalar)
