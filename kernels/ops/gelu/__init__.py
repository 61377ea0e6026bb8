"""gelu in its tanh form and in its exact form, for MLPs without a gate (`gated_mul` serves MLPs with one).

x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))     (Hendrycks and Gimpel 2016, arXiv:1606.08415)
x/2 * (1 + erf(x / sqrt(2)))                          (the same: the exact form, which encoders have)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.registry import Deferred, Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype


def _refuses_triton(key: Key) -> str | None:
    return gpu.refuses(key.device_type, key.dtype)


def cpp(x: Tensor) -> Tensor:
    return _run(x, is_exact=False)


def cpp_erf(x: Tensor) -> Tensor:
    return _run(x, is_exact=True)


def _run(x: Tensor, *, is_exact: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    native.function("inferd_gelu")(
        x.data_ptr(), out.data_ptr(), x.numel(), is_exact, native.DTYPE_CODES[x.dtype], torch.get_num_threads()
    )
    return out


def reference(x: Tensor) -> Tensor:
    """Composed of tanh: a row's bits depend on the number of rows with torch's own (see `gated_mul`)."""
    return wide_gelu(x.to(torch.float32)).to(x.dtype)


def reference_erf(x: Tensor) -> Tensor:
    """Composed of erf, which has no such tail either."""
    return wide_gelu_erf(x.to(torch.float32)).to(x.dtype)


def wide_gelu(wide: Tensor) -> Tensor:
    """gelu of fp32 numbers, in fp32."""
    inner = (wide * wide * wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(wide).mul_(0.5)


def wide_gelu_erf(wide: Tensor) -> Tensor:
    """gelu of fp32 numbers in its exact form, in fp32."""
    # 1 + erf(x) = erfc(-x), which loses no digits below 0.
    share: Tensor = torch.special.erfc(wide * -math.sqrt(0.5))
    return share.mul_(wide).mul_(0.5)


GELU: Op[Key, Callable[[Tensor], Tensor]] = Op(
    "gelu",
    [
        Implementation("cpp", cpp, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "gelu"), _refuses_triton),
        Implementation("reference", reference, always),
    ],
)
GELU_ERF: Op[Key, Callable[[Tensor], Tensor]] = Op(
    "gelu_erf",
    [
        Implementation("cpp", cpp_erf, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("reference", reference_erf, always),
    ],
)


def gelu(x: Tensor) -> Tensor:
    """gelu of each element in its tanh form, computed in fp32 and rounded once to x's dtype."""
    return GELU.resolve(Key(x.device.type, x.dtype))(x)


def gelu_erf(x: Tensor) -> Tensor:
    """The same in the exact form."""
    return GELU_ERF.resolve(Key(x.device.type, x.dtype))(x)
