"""Triton's interpreter, made to convert numbers as GPUs do.

It truncates float32 to bfloat16 and to 8 bits where the hardware rounds to the nearest, ties to even (Triton 3.7): a
kernel would be judged by errors that it does not make. torch converts as the hardware does.
"""

from __future__ import annotations

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
    """Once for this process. TRITON_INTERPRET has to be set."""
    from triton.runtime import interpreter  # noqa: PLC0415

    interpreter._convert_float = _convert


def _convert(numbers: np.ndarray[Any, Any], source: Any, target: Any, _rounding: object) -> np.ndarray[Any, Any]:
    values = torch.frombuffer(bytearray(numbers.tobytes()), dtype=_DTYPES[source.name])
    bits = values.to(_DTYPES[target.name]).view(_BITS[target.primitive_bitwidth])
    return bits.numpy().reshape(numbers.shape)
