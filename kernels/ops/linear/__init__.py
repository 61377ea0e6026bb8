"""y = x W^T + b with an unquantized W, stored in the form that the device computes fastest in.

On a CPU with AVX2 the weight is packed once for `cpu.cpp`. There every output is one chain of products over the
inputs, so a row's bits cannot depend on other rows. With AVX-512 it reads weights at 0.9 of the memory's bandwidth for
one row, 1.2 to 1.4 times as fast as oneDNN's packed product. It is about as fast at 32 rows (1.1) and 256 (1.0):
bfloat16, 2 cores of an AMD EPYC (Zen 4), 2026-11-21. For 512 and 1,024 rows of an encoder's matrices, with a bias, it
takes 0.86 to 1.04 of F.linear's time in both dtypes (the same machine, 2026-12-01).

With AVX2 in float32 it is 1.7 to 2.1 times as fast as oneDNN for one row. For 32 to 128 rows it is 1.06 to 1.45 times
as fast (2 cores of an AMD Zen 3, 2026-11-23). bfloat16 is widened in registers: 1.9 to 4.3 times as fast as F.linear
for 1 to 512 rows, whose bits there depend on the number of rows (the same machine, 2026-11-29).

With AMX bfloat16 is multiplied in tiles (`amx_product.h`): 1.1 to 1.5 times as fast as oneDNN for 1 to 32 rows, 0.95 to
1.5 for 128 and 512. Without tiles the same Intel Xeon does a tenth of that for 512 rows (2026-11-23).

On other CPUs, and for bfloat16 with AVX-512 but without AVX-512 BF16, oneDNN packs the weight. A row's bits are then
the same for any number of rows from two up (measured: torch 2.13, SSE 4.1 to AVX-512, fp32 and bf16, an Intel Xeon,
2026-11-22), so a lone row is padded to two. F.linear in fp32 has no such property.

On a GPU a kernel of our own multiplies few rows, and the vendor's library many (`cuda.py`). The library's bits may
depend on the number of rows; `Choices.is_invariant` takes one kernel for any number instead.

Products are summed in fp32 and rounded to the inputs' dtype, or kept in fp32 for the logits' layer. oneDNN can only
round, so it multiplies twice for that. The C++ kernel takes a sixth to half of that time, also without AVX-512 BF16
(1 to 256 rows of 49152 x 576, 2 Zen 4 cores, 2026-11-23).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.ops.linear import cpu
from inferd.kernels.ops.linear.tuning import Table
from inferd.kernels.registry import Deferred, Implementation, Op, always

_PACKED_ROWS_HINT = 32
_PACKED_DTYPES = (torch.float32, torch.bfloat16)
_FEW_ROWS_DTYPES = (torch.bfloat16, torch.float16)
_FEW_ROWS_VARY = "more rows have other kernels"
_PLAIN_VARIES = "its library chooses a kernel by the number of rows"

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Choices:
    """Options for a GPU's products; a CPU's are always invariant."""

    is_invariant: bool = False
    """Whether a row's bits must depend on that row alone."""
    table: Table | None = None
    """The fastest product for each case; None: decide by a rule. It may be completed after layers are bound."""


ANY = Choices()
Bind = Callable[[Tensor, Tensor | None, Choices, torch.dtype], Apply]


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    is_invariant: bool = False
    is_wide: bool = False
    """Whether results are float32 though inputs are narrower."""

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.is_wide else self.dtype


class NarrowKey(NamedTuple):
    device_type: str
    weight_dtype: torch.dtype


def _bind_cpp(weight: Tensor, bias: Tensor | None, _: Choices, out_dtype: torch.dtype) -> Apply:
    return cpu.bind(weight, bias, weight.dtype, out_dtype)


def _bind_packed(weight: Tensor, bias: Tensor | None, _: Choices, out_dtype: torch.dtype) -> Apply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS_HINT)

    def apply(x: Tensor) -> Tensor:
        rows = x if x.shape[0] > 1 else torch.cat([x, x])
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
        if out_dtype != x.dtype:
            # A second product subtracts the first before it rounds: twice the mantissa (relative error below 2^-17).
            rest = torch.ops.mkldnn._linear_pointwise.binary(rows, -out, packed, bias, "add")
            out = out.to(out_dtype).add_(rest)
        return out[: x.shape[0]]

    return apply


def _bind_plain(weight: Tensor, bias: Tensor | None, _: Choices, out_dtype: torch.dtype) -> Apply:
    return lambda x: plain(x, weight, bias, out_dtype)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x W^T + b by torch's own products, in the dtype of x or in float32."""
    if out_dtype == x.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    out = torch.mm(x, weight.T, out_dtype=out_dtype) if x.is_cuda else x.to(out_dtype) @ weight.to(out_dtype).T
    return out if bias is None else out.add_(bias)


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


def few_rows_refuse(device_type: str, dtype: torch.dtype, *stored: torch.dtype) -> str | None:
    """Why the kernels for few rows of `dtype` cannot run; None if they can. `stored`: other dtypes of the weight."""
    if dtype not in _FEW_ROWS_DTYPES:
        return f"multiplies bfloat16 and float16 on the tensor cores, not {dtype}"
    return gpu.refuses(device_type, dtype, *stored)


def _refuses_invariant(key: Key) -> str | None:
    return gpu.refuses(key.device_type, key.dtype) if key.is_invariant else "serves invariant products only"


def _refuses_few_rows(key: Key) -> str | None:
    return _FEW_ROWS_VARY if key.is_invariant else few_rows_refuse(key.device_type, key.dtype)


def _refuses_plain(key: Key) -> str | None:
    return _PLAIN_VARIES if key.is_invariant and key.device_type == "cuda" else None


LINEAR: Op[Key, Bind] = Op(
    "linear",
    [
        Implementation("cpp", _bind_cpp, lambda key: cpu.refuses(key.device_type, key.dtype, key.dtype, key.out_dtype)),
        Implementation("onednn_packed", _bind_packed, _refuses_packed),
        Implementation("triton_invariant", Deferred(f"{__name__}.triton", "Invariant"), _refuses_invariant),
        Implementation(
            "triton_few_rows", Deferred(f"{__name__}.cuda", "Product"), _refuses_few_rows, varies=_FEW_ROWS_VARY
        ),
        Implementation("torch", _bind_plain, _refuses_plain, varies=_PLAIN_VARIES),
    ],
)


LINEAR_16BIT: Op[NarrowKey, Callable[[Tensor, Tensor | None], Apply]] = Op(
    "linear_16bit",
    [
        Implementation(
            "cpp",
            lambda weight, bias: cpu.bind(weight, bias, torch.float32, torch.float32),
            lambda key: cpu.refuses(key.device_type, torch.float32, key.weight_dtype, torch.float32),
        ),
        Implementation("widened", lambda weight, bias: linear(weight.float(), bias), always),
    ],
)


def linear_16bit(weight: Tensor, bias: Tensor | None) -> Apply:
    """The layer as a function of x [T, in] in float32 that gives [T, out] in float32. weight [out, in] in bfloat16 or
    float16. Bits are those of `linear` with the weight in float32."""
    assert weight.dtype in (torch.bfloat16, torch.float16)
    return LINEAR_16BIT.resolve(NarrowKey(weight.device.type, weight.dtype))(weight, bias)


def linear(weight: Tensor, bias: Tensor | None, choices: Choices = ANY, out_dtype: torch.dtype | None = None) -> Apply:
    """The layer as a function of x [T, in] that gives [T, out], all in one dtype. weight [out, in], bias [out].

    With `out_dtype` float32 results are not rounded to the dtype of x. The layer may be more than a function: see
    `fused.FewRows`. Raises `KernelError` if `choices` require an invariant product and no kernel for it can run.
    """
    out_dtype = out_dtype or weight.dtype
    assert out_dtype in (weight.dtype, torch.float32)
    key = Key(weight.device.type, weight.dtype, choices.is_invariant, out_dtype != weight.dtype)
    return LINEAR.resolve(key)(weight, bias, choices, out_dtype)
