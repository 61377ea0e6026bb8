"""The Triton implementations: few rows at the speed of memory, and any number of rows with bits that depend on the row
alone.

**Few rows** (`few_rows`, alone or fused with neighbouring operations). The floor is reading the weight: 2 bytes and,
with up to 16 rows, at most 32 operations for each number. At 4.8 TB/s that is 77 TFLOP/s. An H200 multiplies only 67
outside its tensor cores, and would have to widen every weight first, so the tensor cores multiply. The weight's rows
are the rows of the matrix product, and the tokens, padded to 16, its columns. 1 token and 16 take the same
instructions, so a token's bits depend on it alone.

**Any number of rows** (`bind_invariant`). A program computes a tile of results, and walks all inputs in equal steps, in
order. Nothing is split, and a tile has the same width for any number of rows. On sm_90 a warp group multiplies 64 rows
at a time in any tile, so an output is always the same chain of instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gated_mul.triton import activated
from inferd.kernels.gpu import DTYPES, Shipped
from inferd.kernels.triton_tiles import operands, store_tile, tile_of

MAX_ROWS = 16
"""Most rows of the kernel for few rows."""
_STAGES = 4
_INVARIANT_N = 64


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x,
    weight,
    bias,
    norm,
    residual,
    out,
    num_rows,
    out_size,
    in_size,
    x_stride,
    eps,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_GATE: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, inner = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    is_column, is_row = column < out_size, row < num_rows
    weight_place = weight + column.to(tl.int64)[:, None] * in_size + inner[None, :]
    x_place = x + row[None, :] * x_stride + inner[:, None]
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up_total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, in_size, BLOCK_K):
        is_inner = inner < in_size - start
        mask = is_column[:, None] & is_inner[None, :]
        weight_tile = tl.load(weight_place + start, mask=mask, other=0.0)
        x_tile = tl.load(x_place + start, mask=is_inner[:, None] & is_row[None, :], other=0.0)
        if HAS_NORM:
            # A row's factor is the same for all its inputs, so it multiplies the row's results.
            wide = x_tile.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            factor = tl.load(norm + start + inner, mask=is_inner, other=0.0).to(tl.float32)
            x_tile = (wide * factor[:, None]).to(x.dtype.element_ty)
        total = tl.dot(weight_tile, x_tile, total, input_precision="ieee")
        if HAS_GATE:
            up_place = weight_place + out_size.to(tl.int64) * in_size + start
            up_tile = tl.load(up_place, mask=mask, other=0.0)
            up_total = tl.dot(up_tile, x_tile, up_total, input_precision="ieee")
    if HAS_NORM:
        scale = 1.0 / tl.sqrt_rn(squares / in_size + eps)
        total *= scale[None, :]
        up_total *= scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if HAS_GATE:
            up_total += tl.load(bias + out_size + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if HAS_GATE:
        total = activated(total, IS_SILU) * up_total
    is_inside = is_column[:, None] & is_row[None, :]
    place = row.to(tl.int64)[None, :] * out_size + column[:, None]
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def _invariant(
    x,
    weight,
    bias,
    out,
    num_rows,
    out_size,
    in_size,
    x_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, first_column = tile_of(num_rows, BLOCK_M, BLOCK_N)
    column, inner = first_column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row, is_column = row < num_rows, column < out_size
    x_place, weight_place = operands(x, weight, row, column, inner, x_stride, in_size)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_size, BLOCK_K):
        is_inner = inner < in_size - start
        x_tile = tl.load(x_place + start, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        weight_tile = tl.load(weight_place + start, mask=is_column[None, :] & is_inner[:, None], other=0.0)
        total = tl.dot(x_tile, weight_tile, total, input_precision="ieee")
    store_tile(out, total, bias, row, column, num_rows, out_size, HAS_BIAS)


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """residual + act(norm(x) W^T + b), with the parts that are given; x [T, in], T at most `MAX_ROWS`.

    `gate`: apply silu or gelu to the results of the first half of the weight's rows, and multiply by those of the
    second. `out_dtype`: that of x by default, or float32.
    """
    num_rows, in_size = x.shape
    assert num_rows <= MAX_ROWS and weight.is_contiguous(), f"{num_rows} rows; at most {MAX_ROWS} are allowed"
    x = x if x.stride(1) == 1 else x.contiguous()
    out_size = weight.shape[0] // (1 if gate is None else 2)
    out = torch.empty((num_rows, out_size), dtype=out_dtype or x.dtype, device=x.device)
    block_n, block_k = _few_rows_tile(out_size, gate is not None, out.dtype != x.dtype)
    _few_rows[(triton.cdiv(out_size, block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm,
        out if residual is None else residual.contiguous(),
        out,
        num_rows,
        out_size,
        in_size,
        x.stride(0),
        eps,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_GATE=gate is not None,
        IS_SILU=gate == "silu",
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        ROWS=MAX_ROWS,
        num_warps=4,
        num_stages=_STAGES,
    )
    return out


def bind_invariant(
    weight: Tensor, bias: Tensor | None, _: object, out_dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    weight = weight.contiguous()
    out_size, in_size = weight.shape

    def apply(x: Tensor) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        num_rows = x.shape[0]
        out = torch.empty((num_rows, out_size), dtype=out_dtype, device=x.device)
        if not num_rows:
            return out
        block_m, num_warps = _invariant_tile(num_rows, x.dtype, out_dtype != x.dtype)
        _invariant[(triton.cdiv(num_rows, block_m) * triton.cdiv(out_size, _INVARIANT_N),)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            num_rows,
            out_size,
            in_size,
            x.stride(0),
            HAS_BIAS=bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=_INVARIANT_N,
            BLOCK_K=_invariant_step(x.dtype),
            num_warps=num_warps,
            num_stages=_STAGES,
        )
        return out

    return apply


def _few_rows_tile(out_size: int, has_gate: bool, is_wide: bool) -> tuple[int, int]:
    """(weight rows, inputs) of a tile, by the layer alone. Gives about two programs for each of 132 processors, and
    stages of 8 to 16 KiB of weights: at 4.8 TB/s a processor needs about 30 KiB on their way. With wide results (fp32
    from narrower inputs) the tile of 32 x 256 would spill on sm_100."""
    if has_gate:
        return (16, 128) if out_size <= 16384 else (32, 128)
    if out_size <= 8192:
        return 16, 256
    return (32, 256) if out_size <= 16384 and not is_wide else (64, 128)


def _invariant_tile(num_rows: int, dtype: torch.dtype, is_wide: bool) -> tuple[int, int]:
    """(rows of a tile, warps), with a warp group for each 64 rows. With wide results two groups would spill on
    sm_100, so one computes both halves of a tile."""
    if num_rows <= 64 or dtype == torch.float32:
        return 64, 4
    return 128, 4 if is_wide else 8


def _invariant_step(dtype: torch.dtype) -> int:
    """Inputs of one step: 128 bytes of a row."""
    return 128 // dtype.itemsize


def shipped() -> Iterator[Shipped]:
    """Forms without a norm include float16, which `fused` refuses with one. A bias or a gate changes no instruction's
    name. Norms of one plus their weight are in fp32. Layers that give fp32 have no bias."""
    parts: tuple[tuple[str, dict[str, bool]], ...] = (
        ("linear_few_rows", {}),
        ("linear_few_rows bias", {"HAS_BIAS": True}),
        ("linear_few_rows out fp32", {}),
        ("norm_linear", {"HAS_NORM": True}),
        ("norm_linear bias", {"HAS_NORM": True, "HAS_BIAS": True}),
        ("linear_residual", {"HAS_RESIDUAL": True}),
        ("gate_up silu", {"HAS_GATE": True, "IS_SILU": True}),
        ("norm_gate_up silu", {"HAS_NORM": True, "HAS_GATE": True, "IS_SILU": True}),
        ("norm_gate_up gelu", {"HAS_NORM": True, "HAS_GATE": True}),
        ("norm_linear norm fp32", {"HAS_NORM": True}),
        ("norm_gate_up gelu norm fp32", {"HAS_NORM": True, "HAS_GATE": True}),
    )
    flags = dict.fromkeys(("HAS_BIAS", "HAS_NORM", "HAS_RESIDUAL", "HAS_GATE", "IS_SILU"), False)
    halves = ("linear_few_rows", "linear_few_rows out fp32", "linear_residual")
    in_half = [(name, given, "fp16") for name, given in parts if name in halves]
    for name, given, dtype_name in (*((name, given, "bf16") for name, given in parts), *in_half):
        out = "fp32" if name.endswith("out fp32") else dtype_name
        for block_n, block_k in dict.fromkeys(
            _few_rows_tile(size, "HAS_GATE" in given, out != dtype_name) for size in (4096, 16384, 65536)
        ):
            yield _form(
                name.split()[0],
                f"{' '.join([dtype_name, *name.split()[1:]])} tile {block_n} x {block_k}",
                _few_rows,
                dtype_name,
                {**flags, **given, "BLOCK_N": block_n, "BLOCK_K": block_k, "ROWS": MAX_ROWS},
                4,
                norm="fp32" if name.endswith("norm fp32") else dtype_name,
                out=out,
            )
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = DTYPES[dtype]
        forms = dict.fromkeys(((False, name), (dtype == torch.bfloat16, name), (False, "fp32")))
        for has_bias, out in forms:
            for block_m, num_warps in dict.fromkeys(_invariant_tile(rows, dtype, out != name) for rows in (64, 128)):
                yield _form(
                    "linear_invariant",
                    f"{name}{' bias' if has_bias else ''}{'' if out == name else ' out fp32'} tile {block_m}",
                    _invariant,
                    name,
                    {
                        "HAS_BIAS": has_bias,
                        "BLOCK_M": block_m,
                        "BLOCK_N": _INVARIANT_N,
                        "BLOCK_K": _invariant_step(dtype),
                    },
                    num_warps,
                    out=out,
                )


def _form(
    op: str, config: str, kernel: Any, dtype: str, constants: dict[str, Any], num_warps: int, out: str, norm: str = ""
) -> Shipped:
    names = [name for name in kernel.arg_names if name not in constants]
    others = {"num_rows": "i32", "out_size": "i32", "in_size": "i32", "x_stride": "i32", "eps": "fp32"}
    others |= {"norm": f"*{norm}", "out": f"*{out}"}
    if not constants.get("HAS_RESIDUAL"):
        others["residual"] = f"*{out}"  # a launch passes `out` in its place
    return Shipped(
        op=op,
        config=config,
        kernel=kernel,
        signature={name: others.get(name, f"*{dtype}") for name in names},
        constants=constants,
        num_warps=num_warps,
        num_stages=_STAGES,
        # A warp group needs 64 weight rows; fp32 is multiplied outside the tensor cores.
        is_matrix=dtype != "fp32" and (kernel is _invariant or constants["BLOCK_N"] >= 64),
        is_warp_matrix=kernel is _few_rows and constants["BLOCK_N"] < 64,
        is_streaming=True,
        multiples=("out_size", "in_size", "x_stride"),
    )
