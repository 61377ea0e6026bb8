"""gelu in its tanh form, for MLPs without a gate (`gated_mul` serves MLPs with one).

x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))     (Hendrycks and Gimpel 2016, arXiv:1606.08415)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.gelu import cpu, reference
from inferd.kernels.registry import Deferred, Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype


def _refuses_triton(key: Key) -> str | None:
    return gpu.refuses(key.device_type, key.dtype)


GELU: Op[Key, Callable[[Tensor], Tensor]] = Op(
    "gelu",
    [
        Implementation("cpp", cpu.gelu, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "gelu"), _refuses_triton),
        Implementation("reference", reference.gelu, always),
    ],
)


def gelu(x: Tensor) -> Tensor:
    """gelu of each element, computed in fp32 and rounded once to x's dtype."""
    return GELU.resolve(Key(x.device.type, x.dtype))(x)
