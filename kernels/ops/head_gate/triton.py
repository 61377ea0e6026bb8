"""The Triton implementation: one program norms and gates some heads of a token, which stay in registers from load to
store. The floor is memory: heads, gates and results once each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.gpu import DTYPES, Shipped, dependent_options
from inferd.kernels.gpu.rows import row_block
from inferd.kernels.ops.gated_mul.triton import activated

_ELEMENTS = 1024
"""Elements of a program of several heads."""


@triton.jit
def _normed(x, weight, size, eps):
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / size + eps))[:, None] * weight


@triton.jit
def _head_gate(
    x, gate, weight, out, num_heads, size, token_stride, head_stride, weight_stride, eps,
    NORMS_BEFORE: tl.constexpr, NORMS_BEHIND: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_inside = (head < num_heads) & (column < size)
    place = (token * num_heads + head) * size + column
    value = tl.load(x + place, mask=is_inside, other=0.0).to(tl.float32)
    gate_place = gate + token * token_stride + head * head_stride + column
    opened = tl.load(gate_place, mask=is_inside, other=0.0).to(tl.float32)
    if NORMS_BEFORE or NORMS_BEHIND:
        factor = tl.load(weight + head * weight_stride + column, mask=is_inside, other=0.0)
        opened = activated(opened, True)
        value = (
            _normed(value, factor, size, eps) * opened if NORMS_BEFORE else _normed(value * opened, factor, size, eps)
        )
    else:
        value = value / (1.0 + tl.exp(-opened))
    tl.store(out + place, value.to(out.dtype.element_ty), mask=is_inside)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return _run(x, gate, None, 0.0)


def norm_silu_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _run(x, gate, weight, eps, norms_before=True)


def silu_gate_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _run(x, gate, weight, eps, norms_behind=True)


def _run(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    norms_before: bool = False,
    norms_behind: bool = False,
) -> Tensor:
    num_tokens, num_heads, size = x.shape
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    heads, block, num_warps = _form(num_heads, size)
    _head_gate[(num_tokens, triton.cdiv(num_heads, heads))](
        x,
        gate,
        x if weight is None else weight,
        out,
        num_heads,
        size,
        gate.stride(0),
        gate.stride(1),
        size if norms_behind else 0,
        eps,
        NORMS_BEFORE=norms_before,
        NORMS_BEHIND=norms_behind,
        HEADS=heads,
        BLOCK=block,
        **dependent_options(),
        num_warps=num_warps,
    )
    return out


def _form(num_heads: int, size: int) -> tuple[int, int, int]:
    """(heads of a program, elements of a head that it covers, warps)."""
    block, num_warps = row_block(size)
    heads = max(1, min(triton.next_power_of_2(num_heads), _ELEMENTS // block))
    return heads, block, max(num_warps, heads * block // 512)


_FORMS = (
    ("sigmoid_gate", False, False, ((16, 256), (32, 128))),
    ("norm_silu_gate", True, False, ((32, 128),)),
    ("silu_gate_norm", False, True, ((1, 3072), (1, 8192), (8, 1024))),
)
"""(op, norms before the gate, norms behind it, shapes of (heads, size)): attention with gates, Gated DeltaNet, and
Mamba-2 with one group or eight."""


def shipped() -> Iterator[Shipped]:
    for op, norms_before, norms_behind, shapes in _FORMS:
        for num_heads, size in shapes:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                heads, block, num_warps = _form(num_heads, size)
                one = Shipped(
                    op=op,
                    config=f"{DTYPES[dtype]} {num_heads}x{size}",
                    kernel=_head_gate,
                    signature={
                        "x": "*fp32" if norms_behind else f"*{DTYPES[dtype]}",
                        "gate": f"*{DTYPES[dtype]}",
                        "weight": "*fp32" if norms_before or norms_behind else f"*{DTYPES[dtype]}",
                        "out": f"*{DTYPES[dtype]}",
                        **dict.fromkeys(("num_heads", "size", "token_stride", "head_stride", "weight_stride"), "i32"),
                        "eps": "fp32",
                    },
                    constants={
                        "NORMS_BEFORE": norms_before,
                        "NORMS_BEHIND": norms_behind,
                        "HEADS": heads,
                        "BLOCK": block,
                        "IS_DEPENDENT": False,
                    },
                    num_warps=num_warps,
                    is_streaming=True,
                    multiples=("size", "token_stride", "head_stride", "weight_stride"),
                )
                yield from (one, one.early())
