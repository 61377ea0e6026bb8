"""The vendor's library: torch's scaled products, which run cuBLASLt or CUTLASS.

`bind_rows` has a scale for each row of both sides. `bind_groups` has one for each 128 inputs of a token, and for each
128 inputs of an output or each block of 128 x 128 weights. The latter is `torch.nn.functional.scaled_mm`, public since
torch 2.10, whose block recipes run on compute capability 9 from CUDA 12.9 on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.ops.linear_fp8.activations import Activations, Product
from inferd.kernels.ops.linear_fp8.reference import BLOCK

_MULTIPLE = 16
"""A row's size must be a multiple of so many bytes, on both sides."""
_SCALE_ROWS = 4
"""Scales of blocks are padded to a multiple of so many groups of inputs."""
_MIN_CUDA = (12, 9)


def refuses(device_type: str, dtype: torch.dtype, out_size: int, in_size: int) -> str | None:
    """Why `bind_rows` cannot run; None if it can."""
    if device_type != "cuda":
        return "runs on GPUs only"
    if dtype != torch.bfloat16:
        return f"gives bfloat16, not {dtype}"
    if out_size % _MULTIPLE or in_size % _MULTIPLE:
        return f"takes sizes that are multiples of {_MULTIPLE}, not {out_size} x {in_size}"
    return gpu.refuses(device_type, dtype, torch.float8_e4m3fn)


def refuses_groups(device_type: str, dtype: torch.dtype, out_size: int, in_size: int) -> str | None:
    """Why `bind_groups` cannot run; None if it can."""
    reason = refuses(device_type, dtype, out_size, in_size)
    if reason is not None:
        return reason
    if in_size % BLOCK:
        return f"takes whole groups of {BLOCK} inputs, not {in_size} inputs"
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"needs torch.nn.functional.scaled_mm, which torch has from 2.10 on; this is torch {torch.__version__}"
    device = gpu.properties_of()
    if not device.has_warp_groups:
        return f"scales groups on compute capability 9 only; this GPU has {device.capability}"
    built = torch.version.cuda or "none"
    if tuple(int(part) for part in built.split(".")[:2] if part.isdigit()) < _MIN_CUDA:
        return f"scales groups from CUDA 12.9 on; this torch was built with {built}"
    return None


def bind_rows(q: Tensor, scales: Tensor, bias: Tensor | None, quantize: Activations) -> Product:
    weight, row_scales = q.contiguous().T, scales[None, :].contiguous()
    bias = None if bias is None else bias.to(torch.bfloat16)

    def multiply(x_q: Tensor, x_scales: Tensor, dtype: torch.dtype) -> Tensor:
        # Fast accumulation keeps about 14 bits of a running sum (arXiv:2412.19437, section 3.5.2), far more than the 4
        # of each factor. --deterministic asks for exact sums: there this library does not run, but the Triton kernel,
        # which promotes sums to fp32 every 128 products.
        return torch._scaled_mm(x_q, weight, x_scales[:, None], row_scales, bias, out_dtype=dtype, use_fast_accum=True)

    return Product.on(q.device, quantize, multiply)


def bind_groups(q: Tensor, scales: Tensor, bias: Tensor | None, quantize: Activations) -> Product:
    from torch.nn.functional import ScalingType, scaled_mm  # noqa: PLC0415  (not in older versions of torch)

    has_blocks = scales.shape[0] != q.shape[0]
    weight, weight_scales = q.contiguous().T, _laid_out(scales, has_blocks)
    recipe = ScalingType.BlockWise128x128 if has_blocks else ScalingType.BlockWise1x128
    bias = None if bias is None else bias.to(torch.bfloat16)

    def multiply(x_q: Tensor, x_scales: Tensor, dtype: torch.dtype) -> Tensor:
        by_group = x_scales.T.contiguous().T  # the tokens' scales of one group lie side by side
        # Each group's sum is promoted to be scaled, so there is no fast accumulation to choose.
        out = scaled_mm(x_q, weight, by_group, ScalingType.BlockWise1x128, weight_scales, recipe, output_dtype=dtype)
        return out if bias is None else out.add_(bias)

    return Product.on(q.device, quantize, multiply)


def _laid_out(scales: Tensor, has_blocks: bool) -> Tensor:
    """The weight's scales as the library reads them: of groups [out, groups] with outputs side by side, of blocks
    [groups padded to 4, blocks of outputs] with groups side by side."""
    if not has_blocks:
        return scales.T.contiguous().T
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % _SCALE_ROWS)).contiguous().T
