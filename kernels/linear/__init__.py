"""y = x W^T + b with W as it is, in whatever form the device computes fastest in.

On a CPU with AVX-512 the weight is packed once for `cpu.cpp`, in which every output is one chain of products over the
inputs: a row's bits cannot depend on other rows. It reads weights at 0.9 of the memory's bandwidth for one row, 1.2 to
1.4 times as fast as oneDNN's packed product, and keeps up with it at 32 rows (1.1) and 256 (1.0): bfloat16, 2 cores of
an AMD EPYC (Zen 4), 2026-11-21. Elsewhere oneDNN packs; there a row's bits do not depend on other rows from two up
(measured: torch 2.13, AVX-512, fp32 and bf16), so a lone row is padded to two. F.linear in fp32 has no such property.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels.linear import cpu
from inferd.kernels.registry import Implementation, Op, always

_PACKED_ROWS_HINT = 32
_PACKED_DTYPES = (torch.float32, torch.bfloat16)

Apply = Callable[[Tensor], Tensor]
Bind = Callable[[Tensor, Tensor | None], Apply]


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype


def _bind_packed(weight: Tensor, bias: Tensor | None) -> Apply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS_HINT)

    def apply(x: Tensor) -> Tensor:
        rows = x if x.shape[0] > 1 else torch.cat([x, x])
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
        return out[: x.shape[0]]

    return apply


def _bind_plain(weight: Tensor, bias: Tensor | None) -> Apply:
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _refuses_packed(key: Key) -> str | None:
    if key.device_type != "cpu":
        return "oneDNN packs for the CPU"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch was built without oneDNN"
    if key.dtype not in _PACKED_DTYPES:
        return f"packs float32 and bfloat16, not {key.dtype}"
    if key.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 matrix product"
    return None


LINEAR: Op[Key, Bind] = Op(
    "linear",
    [
        Implementation("cpp", cpu.bind, lambda key: cpu.refuses(key.device_type, key.dtype)),
        Implementation("onednn_packed", _bind_packed, _refuses_packed),
        Implementation("torch", _bind_plain, always),
    ],
)


def linear(weight: Tensor, bias: Tensor | None) -> Apply:
    """The layer as a function of x [T, in], giving [T, out], all in one dtype. weight [out, in], bias [out]."""
    return LINEAR.resolve(Key(weight.device.type, weight.dtype))(weight, bias)
