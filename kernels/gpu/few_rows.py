"""Products of few rows by a matrix of 16-bit or 8-bit floats on a GPU, alone or fused with neighbouring operations.
`linear` and `linear_fp8` share them.

    residual + act(norm(x) W^T + b), with the parts that are given

The floor is reading the weight: with up to 16 rows at most 32 operations for each number. At 4.8 TB/s that is 77
TFLOP/s for 16 bits. An H200 multiplies only 67 outside its tensor cores, and would have to widen every weight first.
So the tensor cores multiply. The weight's rows are the rows of the matrix product, and the tokens, padded to 8 or 16,
its columns.

**Inputs are split over warps.** The weight reaches the tensor cores through shared memory, which moves 7 bytes while
memory moves one. If the warps of a program share its outputs, each reads the tokens again, or the weights: 8 to 12
bytes for each byte of the weight. Here each warp has all outputs of the tile and a part of each step's inputs, so what
is copied to shared memory is read once: 2.6 to 4.6 bytes. A dot over a third dimension says this to Triton. The warps'
sums are added last.

**A token's bits depend on it alone.** It is one chain of instructions over the inputs in order, whatever the number of
tokens and the tile. Only the sum of squares of a norm may be ordered otherwise in the tiles of 8 and of 16 tokens.

**8 bits** stay e4m3 until they are operands, and the tokens keep their 16 bits. Through float16 and float32 a weight
takes 2 instructions. The direct conversion to bfloat16 runs at an eighth of their rate.

**Early starts** (`gpu.early_starts`). Within a recorded step the kernel may start while the one before it ends. It asks
the L2 cache for its first weights, and then waits for that kernel's results.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels import gpu
from inferd.kernels.device import FP8_MIN_SM, Candidate, DeviceProperties, SharedNeed, fit
from inferd.kernels.gpu import DTYPES, Shipped, dependent_options
from inferd.kernels.ops.gated_mul.triton import activated

MAX_ROWS = 16
"""Most rows of a product with 16-bit weights."""
MAX_FP8_ROWS = 8
"""Most rows of a product with 8-bit weights. For 16 the tokens would take as much shared memory as the weights."""
_FEW = 8
_GROUP = tl.constexpr(128)
"""Inputs that share a scale, if not all of a row do."""
_STAGES = 4
_SMALL, _LARGE = 2, 4
"""Most programs of 32 outputs on each multiprocessor in a small layer, and in one that is not large."""
_MAX_REGISTERS = 168
"""Most registers of a thread. Left alone, the assembler takes 72 for one form, and spills."""
_LINE_BYTES = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""
_NO_SCALES, _ROW_SCALES, _GROUP_SCALES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
_EXCHANGED_BYTES = 1024
"""Most shared memory beside what the loop copies, in all compiled forms."""
SCALE_KINDS = {
    "rows": {"SCALES": _ROW_SCALES.value, "SCALE_ROWS": 1},
    "groups": {"SCALES": _GROUP_SCALES.value, "SCALE_ROWS": 1},
    "blocks": {"SCALES": _GROUP_SCALES.value, "SCALE_ROWS": _GROUP.value},
}
"""Constants by kind of scales."""
_NONE = {"SCALES": _NO_SCALES.value, "SCALE_ROWS": 1}


@triton.jit
def _read(place, mask, HAS_TAIL: tl.constexpr):
    """The numbers at `place`. If all steps are full, they are read without `mask`."""
    if HAS_TAIL:
        return tl.load(place, mask=mask, other=0.0)
    return tl.load(place)


@triton.jit
def _widened(tile, dtype: tl.constexpr):
    """Weights in the dtype of tokens, exactly."""
    if tile.dtype == tl.float8e4nv:
        tile = tile.to(tl.float16)
        if dtype == tl.bfloat16:
            tile = tile.to(tl.float32)
    return tile.to(dtype)


@triton.jit
def _scales_of(place, group, num_groups, SCALES: tl.constexpr):
    """Scales [parts, outputs] of the groups [parts, 1] of a step; behind the last group 0."""
    if SCALES == _GROUP_SCALES:
        scales = tl.load(place + group, mask=group < num_groups, other=0.0)
    else:
        scales = tl.zeros((1, 1), tl.float32)
    return scales


@triton.jit
def _add_product(total, tile, x_tile, scale, SCALES: tl.constexpr):
    """total + the product of each part [parts, outputs, tokens], times its scale if groups have one."""
    tile = _widened(tile, x_tile.dtype)
    if SCALES == _GROUP_SCALES:
        return total + tl.dot(tile, x_tile, input_precision="ieee") * scale[:, :, None]
    return tl.dot(tile, x_tile, total, input_precision="ieee")


@triton.jit
def prefetch(place):
    """Have the L2 cache read the lines at `place`."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x, weight, scales, bias, norm, residual, out, num_rows, out_size, in_size, x_stride, eps,
    SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_GATE: tl.constexpr, IS_SILU: tl.constexpr, HAS_TAIL: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of results. A step's inputs are `PARTS` neighbouring parts. Columns behind the last are computed from
    the last, and not stored."""
    column, row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    is_column, is_row = column < out_size, row < num_rows
    read_column = tl.minimum(column, out_size - 1)
    PART: tl.constexpr = BLOCK_K // PARTS
    part_start = tl.arange(0, PARTS)[:, None] * PART
    inner = part_start + tl.arange(0, PART)[None, :]
    weight_place = weight + read_column.to(tl.int64)[None, :, None] * in_size + inner[:, None, :]
    up_place = weight_place + out_size.to(tl.int64) * in_size
    x_place = x + row[None, None, :] * x_stride + inner[:, :, None]
    num_groups, group = tl.cdiv(in_size, _GROUP), part_start // _GROUP
    scale_place = scales + read_column[None, :] // SCALE_ROWS * num_groups
    up_scale_place = scales + (out_size + read_column)[None, :] // SCALE_ROWS * num_groups
    if IS_DEPENDENT:
        # Weights do not depend on the kernel before, so the L2 cache reads those of two steps while that kernel ends.
        gdc_launch_dependents()
        LINE: tl.constexpr = _LINE_BYTES * 8 // weight.dtype.element_ty.primitive_bitwidth
        line = tl.minimum(tl.arange(0, 2 * BLOCK_K // LINE) * LINE, in_size - 1)
        line_place = weight + read_column.to(tl.int64)[:, None] * in_size + line[None, :]
        prefetch(line_place)
        if HAS_GATE:
            prefetch(line_place + out_size.to(tl.int64) * in_size)
        gdc_wait()
    total = tl.zeros((PARTS, BLOCK_N, ROWS), tl.float32)
    up_total = tl.zeros((PARTS, BLOCK_N, ROWS), tl.float32)
    squares = tl.zeros((PARTS, PART, ROWS), tl.float32)
    scale = _scales_of(scale_place, group, num_groups, SCALES)
    up_scale = _scales_of(up_scale_place, group, num_groups, SCALES if HAS_GATE else _NO_SCALES)
    for start in range(0, in_size, BLOCK_K):
        # The next step's scales are on their way while this step's numbers are multiplied.
        next_group = group + (start + BLOCK_K) // _GROUP
        next_scale = _scales_of(scale_place, next_group, num_groups, SCALES)
        next_up_scale = _scales_of(up_scale_place, next_group, num_groups, SCALES if HAS_GATE else _NO_SCALES)
        is_inner = inner < in_size - start
        tile = _read(weight_place + start, is_inner[:, None, :], HAS_TAIL)
        x_mask = is_row[None, None, :] & is_inner[:, :, None] if HAS_TAIL else is_row[None, None, :]
        x_tile = tl.load(x_place + start, mask=x_mask, other=0.0)
        if HAS_NORM:
            # A row's factor is the same for all its inputs, so it multiplies the row's results.
            wide = x_tile.to(tl.float32)
            squares += wide * wide
            factor = _read(norm + start + inner, is_inner, HAS_TAIL).to(tl.float32)
            x_tile = (wide * factor[:, :, None]).to(x.dtype.element_ty)
        total = _add_product(total, tile, x_tile, scale, SCALES)
        if HAS_GATE:
            up_tile = _read(up_place + start, is_inner[:, None, :], HAS_TAIL)
            up_total = _add_product(up_total, up_tile, x_tile, up_scale, SCALES)
        scale, up_scale = next_scale, next_up_scale
    result, up = tl.sum(total, 0), tl.sum(up_total, 0)
    if HAS_NORM:
        row_scale = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(squares, 1), 0) / in_size + eps)
        result *= row_scale[None, :]
        up *= row_scale[None, :]
    if SCALES == _ROW_SCALES:
        result *= tl.load(scales + read_column)[:, None]
        if HAS_GATE:
            up *= tl.load(scales + out_size + read_column)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + read_column).to(tl.float32)[:, None]
        if HAS_GATE:
            up += tl.load(bias + out_size + read_column).to(tl.float32)[:, None]
    if HAS_GATE:
        result = activated(result, IS_SILU) * up
    is_inside = is_column[:, None] & is_row[None, :]
    place = row.to(tl.int64)[None, :] * out_size + column[:, None]
    if HAS_RESIDUAL:
        result += tl.load(residual + place, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=is_inside)


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program's work."""

    num_rows: int
    """Tokens, padding included."""
    num_columns: int
    """Weight rows; with a gate as many of each half."""
    num_inputs: int
    """Inputs of a step."""
    num_warps: int
    """Each warp multiplies a part of a step's inputs."""

    @property
    def constants(self) -> dict[str, int]:
        return {
            "BLOCK_N": self.num_columns,
            "BLOCK_K": self.num_inputs,
            "PARTS": self.num_warps,
            "ROWS": self.num_rows,
        }


def tiles_of(num_rows: int, programs: float, *, has_gate: bool, is_fp8: bool) -> tuple[Tile, ...]:
    """The tiles for a number of rows, the best first. `programs` has those of 32 outputs on each multiprocessor. Small
    layers have narrow tiles, for more programs. Stages have 8 to 16 KiB of weights: at 4.8 TB/s each of 132
    multiprocessors needs about 30 KiB on their way. More tokens, or fewer bytes a weight, need more columns: for each
    column the tokens are read once more from the L2 cache."""
    rows = MAX_ROWS if num_rows > _FEW else _FEW
    narrow, wide, deep = Tile(rows, 16, 256, 4), Tile(rows, 32, 256, 4), Tile(rows, 32, 512, 8)
    if rows == MAX_ROWS:
        return (wide,)
    if is_fp8 and not has_gate:
        return (deep, wide) if programs <= _SMALL else (wide,)
    return (wide, narrow) if programs > _LARGE else (narrow,)


def shared_need(tile: Tile, weight_bytes: int, norm_bytes: int, *, has_gate: bool) -> SharedNeed:
    """Shared memory of a tile: a step's weights, tokens, and factors of a norm. Bytes are those of a number, 0 without
    a norm."""
    of_an_input = weight_bytes * tile.num_columns * (1 + has_gate) + 2 * tile.num_rows + norm_bytes
    return SharedNeed(tile.num_inputs * of_an_input, _EXCHANGED_BYTES)


@functools.cache
def form_of(
    num_rows: int, out_size: int, weight_bytes: int, norm_bytes: int, device: DeviceProperties, *, has_gate: bool
) -> tuple[Tile, int]:
    """(tile, stages) of a product on a device."""
    programs = triton.cdiv(out_size, 32) / device.filled_multiprocessors

    def candidate(tile: Tile) -> Candidate[Tile]:
        name = f"few rows {tile.num_rows} x {tile.num_columns} x {tile.num_inputs} in {8 * weight_bytes} bits"
        need = shared_need(tile, weight_bytes, norm_bytes, has_gate=has_gate)
        return Candidate(f"{name}{' gated' if has_gate else ''}", tile, _STAGES, need)

    return fit(device, map(candidate, tiles_of(num_rows, programs, has_gate=has_gate, is_fp8=weight_bytes == 1)))


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """residual + act(norm(x) W^T + b), with the parts that are given; x [T, in], T at most `MAX_ROWS`, or
    `MAX_FP8_ROWS` if the weight is e4m3 with `scales` of rows, of groups of 128 inputs, or of blocks of 128 x 128.

    `gate`: apply silu or gelu to the results of the first half of the weight's rows, and multiply by those of the
    second. `out_dtype`: that of x by default, or float32.
    """
    num_rows, in_size = x.shape
    is_fp8 = scales is not None
    most = MAX_FP8_ROWS if is_fp8 else MAX_ROWS
    assert num_rows <= most and weight.is_contiguous(), f"{num_rows} rows; at most {most} are allowed"
    x = x if x.stride(1) == 1 else x.contiguous()
    out_size = weight.shape[0] // (1 if gate is None else 2)
    out = torch.empty((num_rows, out_size), dtype=out_dtype or x.dtype, device=x.device)
    norm_bytes = 0 if norm is None else norm.itemsize
    device = gpu.properties_of(x.device)
    tile, num_stages = form_of(num_rows, out_size, weight.itemsize, norm_bytes, device, has_gate=gate is not None)
    _few_rows[(triton.cdiv(out_size, tile.num_columns),)](
        x,
        weight,
        weight if scales is None else scales.contiguous(),
        weight if bias is None else bias,
        weight if norm is None else norm,
        out if residual is None else residual.contiguous(),
        out,
        num_rows,
        out_size,
        in_size,
        x.stride(0),
        eps,
        **_scale_constants(weight, scales),
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_GATE=gate is not None,
        IS_SILU=gate == "silu",
        HAS_TAIL=in_size % tile.num_inputs != 0,
        **tile.constants,
        **dependent_options(),
        num_warps=tile.num_warps,
        num_stages=num_stages,
        maxnreg=_MAX_REGISTERS,
    )
    return out


def _scale_constants(weight: Tensor, scales: Tensor | None) -> dict[str, int]:
    """Kind of the scales, and the weight rows that share one."""
    if scales is None:
        return _NONE
    if scales.dim() == 1:
        return SCALE_KINDS["rows"]
    return SCALE_KINDS["groups" if scales.shape[0] == weight.shape[0] else "blocks"]


def form(
    op: str,
    config: str,
    parts: Mapping[str, bool],
    tile: Tile,
    *,
    x: str,
    out: str = "",
    norm: str = "",
    scales: Mapping[str, int] | None = None,
) -> Shipped:
    """A form with full steps. `parts` has the flags of the fused operations; x, out and norm are dtypes, that of x by
    default. `scales`: their constants, if the weight is e4m3."""
    flags = dict.fromkeys(
        ("HAS_BIAS", "HAS_NORM", "HAS_RESIDUAL", "HAS_GATE", "IS_SILU", "HAS_TAIL", "IS_DEPENDENT"), False
    )
    weight, norm = x if scales is None else "fp8e4nv", norm or x
    has_norm, has_gate = parts.get("HAS_NORM", False), parts.get("HAS_GATE", False)
    types = {
        **dict.fromkeys(("x", "bias"), f"*{x}"),
        "weight": f"*{weight}",
        "scales": f"*{weight}" if scales is None else "*fp32",
        "norm": f"*{norm if has_norm else weight}",
        # A launch passes `out` in the place of a missing residual.
        **dict.fromkeys(("residual", "out"), f"*{out or x}"),
        **dict.fromkeys(("num_rows", "out_size", "in_size", "x_stride"), "i32"),
        "eps": "fp32",
    }
    if not parts.get("HAS_BIAS"):
        types["bias"] = f"*{weight}"
    return Shipped(
        op=op,
        config=f"{config} tile {tile.num_rows} x {tile.num_columns} x {tile.num_inputs}",
        kernel=_few_rows,
        signature={name: types[name] for name in _few_rows.arg_names if name in types},
        constants={**(scales or _NONE), **flags, **parts, **tile.constants},
        num_warps=tile.num_warps,
        num_stages=_STAGES,
        shared=shared_need(tile, _BYTES[weight], _BYTES[norm] if has_norm else 0, has_gate=has_gate),
        options={"maxnreg": _MAX_REGISTERS},
        is_warp_matrix=True,
        is_streaming=True,
        multiples=("out_size", "in_size", "x_stride"),
        min_sm=0 if scales is None else FP8_MIN_SM,
    )


def tiles(*, has_gate: bool, is_fp8: bool) -> Iterator[Tile]:
    """The tiles of layers of any size on devices with memory for all."""
    found = (
        tiles_of(rows, programs, has_gate=has_gate, is_fp8=is_fp8)[0]
        for programs in (_SMALL, _LARGE, _LARGE + 1)
        for rows in ((_FEW,) if is_fp8 else (_FEW, MAX_ROWS))
    )
    yield from dict.fromkeys(found)
