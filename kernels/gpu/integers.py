"""Products by matrices of 8-bit or 4-bit integers on a GPU, which `linear_int8` and `linear_int4` share. Activations
stay as they are:

    y[n] = sum over groups g: scale[n, g] * (sum of k in g: x[k] * (value[n, k] - zero[n, g]))

**Few rows** (`_product`). An integer of at most 9 bits is exact in every dtype, so the tensor cores multiply integers
by activations and sum in fp32, and a group's sums are scaled. With minimums each weight is scale * q + minimum, rounded
to the dtype of x. The weight's rows are the rows of the matrix product and the tokens its columns, padded to 16 or 64.
So a weight is unpacked once for all tokens.

The floor is reading the weight: with 4 bits in groups of 32, 0.56 bytes at 4.8 TB/s are 35 weights in each cycle of a
processor of an H200. It has 128 lanes, so each weight may take 3.6 instructions. Conversions run at an eighth of the
usual rate. So an OR puts an integer below the bits of a power of two, which is subtracted again. Compiled for sm_90 by
Triton 3.7, a weight of 4 bits takes 6.5 instructions in groups of 32, and 9.5 with minimums. One of 8 bits takes 6.7,
and one of e2m1 9.6, about half of a lookup in a table.

**More rows than 128** multiply by a copy of the weight in the dtype of x, by the vendor's library. Each weight is
rounded once to that. Pieces of 32 MiB are copied and multiplied in turn, so that the L2 cache holds them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels import gpu
from inferd.kernels.device import Candidate, DeviceProperties, SharedNeed, fit
from inferd.kernels.gpu import Shipped, dependent_options
from inferd.kernels.gpu.few_rows import prefetch
from inferd.kernels.gpu.packed_integers import (
    E2M1,
    HALF,
    MINIMUMS,
    NONE,
    STEP,
    ZEROS,
    Packed,
    constants,
    name_of,
    types_of,
)
from inferd.kernels.ops.linear import plain
from inferd.kernels.ops.quantized import GROUP_SIZES, TABLES, Apply, Matrix

ROWS = (16, 64)
"""Numbers of rows of a tile."""
_MAX_ROWS = 128
"""Most rows for which the weight is not copied."""
STAGES = 4
_KEPT_BYTES = 1024
"""Most shared memory beside copies, in all compiled forms."""
_PIECE = 2**24
"""Weights of a copied piece: 32 MiB in 16 bits."""
_COPIED_ROWS = 32
COLUMNS_A_WARP = 16
"""Columns of a warp, so that none unpacks another's weights."""


def _words(name: str) -> list[Any]:
    """The 16 values of a table as signed bytes in four words."""
    values = torch.tensor(TABLES[name], dtype=torch.int8).view(torch.int32)
    return [tl.constexpr(word) for word in values.tolist()]


_IQ4NL_0, _IQ4NL_1, _IQ4NL_2, _IQ4NL_3 = _words("iq4nl")


@triton.jit
def _looked_up(q):
    """The values of 4-bit numbers in the table of iq4nl, as int32."""
    word = tl.where(q < 8, tl.where(q < 4, _IQ4NL_0, _IQ4NL_1), tl.where(q < 12, _IQ4NL_2, _IQ4NL_3))
    return (word << (24 - 8 * (q & 3))) >> 24


@triton.jit
def _doubled_e2m1(q):
    """Twice the values of the low 4 bits: sign, 2 bits of exponent and 1 of fraction, in fp32. At their places in fp32
    they read as the value / 2^126, the smallest as a number that is not normal. Products by a power of two are
    exact."""
    bits = ((q & 8) << 28) | ((q & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38  # 2^127


@triton.jit
def _of_group(scale_place, offset_place, OFFSETS: tl.constexpr):
    """(scales [columns, 1], zero points or minimums [columns, 1]) in fp32; without offsets the scales twice."""
    scale = tl.load(scale_place).to(tl.float32)[:, None]
    return scale, tl.load(offset_place).to(tl.float32)[:, None] if OFFSETS else scale


@triton.jit
def _integers(q, half, zero, dtype: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr, TABLE: tl.constexpr):
    """The integers [columns, inputs] that scales multiply, in `dtype`, of bytes q. Each fits 9 bits, and so any dtype.
    `zero` [columns, 1]: zero points, if there are any."""
    if TABLE == E2M1:
        return _doubled_e2m1((q >> (4 * half)).to(tl.int32)).to(dtype)
    if TABLE:
        return _looked_up((q >> (4 * half)).to(tl.int32) & 15).to(tl.float32).to(dtype)
    number = q if BITS == 8 else (q >> (4 * half)) & 15
    middle: tl.constexpr = 128 if BITS == 8 else (8 if OFFSETS == NONE else 0)
    # An OR with the bits of a power of two adds an integer to it.
    if dtype == tl.float16:
        value, added = (number.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True), 1024.0 + middle
    elif dtype == tl.bfloat16 and BITS == 4:
        value, added = (number.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True), 128.0 + middle
    else:
        value, added = (number.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True), 8388608.0 + middle
    subtracted = tl.full((1, 1), added, tl.float32)
    if OFFSETS == ZEROS:
        subtracted += zero
    return (value - subtracted.to(value.dtype)).to(dtype)


@triton.jit
def places(SPAN: tl.constexpr, BITS: tl.constexpr):
    """(bytes of a span, the input in the low half of each). With 8 bits a byte has one input."""
    byte = tl.arange(0, SPAN * BITS // 8)
    return byte, byte // HALF * (2 * HALF) + byte % HALF if BITS == 4 else byte


@triton.jit
def walked(
    x_place, weight_place, scale_place, offset_place, inner, span_bytes, out_size, in_size,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, OFFSETS: tl.constexpr, TABLE: tl.constexpr, SPAN: tl.constexpr,
    HAS_TAIL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The products [columns, rows] of one tile, over all inputs in order, in spans that are multiplied at once."""
    NUM_HALVES: tl.constexpr = 8 // BITS
    NARROW: tl.constexpr = x_place.dtype.element_ty if BITS == 4 else tl.float32
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    part = total
    scale, offset = _of_group(scale_place, offset_place, OFFSETS)
    for step in range(0, in_size, STEP):
        for span in tl.static_range(STEP // SPAN):
            q = tl.load(weight_place + span * span_bytes)
            for half in tl.static_range(NUM_HALVES):
                if GROUP_SIZE == HALF or (GROUP_SIZE and half == 0):
                    scale, offset = _of_group(scale_place, offset_place, OFFSETS)
                    scale_place += out_size
                    offset_place += out_size
                if OFFSETS == MINIMUMS:
                    wide = tl.fma(
                        _integers(q, half, offset, NARROW, BITS, OFFSETS, TABLE).to(tl.float32), scale, offset
                    )
                    wide = wide.to(x_place.dtype.element_ty)
                else:
                    wide = _integers(q, half, offset, x_place.dtype.element_ty, BITS, OFFSETS, TABLE)
                first = span * SPAN + half * HALF
                if HAS_TAIL:
                    x_tile = tl.load(x_place + first, mask=(inner < in_size - step - first)[:, None], other=0.0)
                else:
                    x_tile = tl.load(x_place + first)
                part = tl.dot(wide, x_tile, part, input_precision="ieee")
                if OFFSETS != MINIMUMS and (GROUP_SIZE == HALF or (GROUP_SIZE and half == NUM_HALVES - 1)):
                    total += part * scale
                    part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        weight_place += (STEP // SPAN) * span_bytes
        x_place += STEP
    if OFFSETS == MINIMUMS:
        total = part
    elif not GROUP_SIZE:
        total = part * scale
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x, weight, scales, offsets, bias, out, num_rows, out_size, in_size, x_stride,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, OFFSETS: tl.constexpr, TABLE: tl.constexpr, SPAN: tl.constexpr,
    HAS_TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, IS_DEPENDENT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One tile of results. Rows and columns behind the last are computed from the last, and not stored."""
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0)
    row = (tile % num_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tile // num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    read_row, read_column = tl.minimum(row, num_rows - 1), tl.minimum(column, out_size - 1)
    byte, inner = places(SPAN, BITS)
    weight_place = weight + read_column.to(tl.int64)[:, None] * (SPAN * BITS // 8) + byte[None, :]
    x_place = x + read_row.to(tl.int64)[None, :] * x_stride + inner[:, None]
    scale_place, offset_place = scales + read_column, offsets + read_column
    span_bytes = out_size.to(tl.int64) * (SPAN * BITS // 8)
    if IS_DEPENDENT:
        # Weights do not depend on the kernel before, so the L2 cache reads those of a step while that kernel ends.
        gdc_launch_dependents()
        first_place = weight + read_column.to(tl.int64) * (SPAN * BITS // 8)
        for span in tl.static_range(STEP // SPAN):
            prefetch(first_place + span * span_bytes)
        gdc_wait()
    total = walked(
        x_place, weight_place, scale_place, offset_place, inner, span_bytes, out_size, in_size, BITS, GROUP_SIZE,
        OFFSETS, TABLE, SPAN, HAS_TAIL, BLOCK_N, BLOCK_M,
    )  # fmt: skip
    is_row, is_column = row < num_rows, column < out_size
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    place = out + row.to(tl.int64)[None, :] * out_size + column[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["first_column", "end_column"])
def _copy(
    weight, scales, offsets, out, first_column, end_column, out_size, in_size,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, OFFSETS: tl.constexpr, TABLE: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A span of inputs of `BLOCK_N` rows of the weight, which `_product` calls columns, before `end_column`.
    `first_column` goes to row 0 of `out`."""
    to = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.minimum(first_column + to, end_column - 1)
    byte, inner = places(SPAN, BITS)
    span = tl.program_id(1)
    span_bytes = out_size.to(tl.int64) * (SPAN * BITS // 8)
    q = tl.load(weight + span * span_bytes + column.to(tl.int64)[:, None] * (SPAN * BITS // 8) + byte[None, :])
    for half in tl.static_range(8 // BITS):
        first = span * SPAN + half * HALF
        place = (first // GROUP_SIZE if GROUP_SIZE else 0) * out_size + column
        scale, offset = _of_group(scales + place, offsets + place, OFFSETS)
        wide = _integers(q, half, offset, tl.float32, BITS, OFFSETS, TABLE)
        wide = tl.fma(wide, scale, offset) if OFFSETS == MINIMUMS else wide * scale
        out_place = out + to.to(tl.int64)[:, None] * in_size + (first + inner)[None, :]
        mask = (first_column + to < end_column)[:, None] & (inner < in_size - first)[None, :]
        tl.store(out_place, wide.to(out.dtype.element_ty), mask=mask)


def bind(matrix: Matrix, out_dtype: torch.dtype) -> Apply:
    """The layer for any number of rows: by `_product` for up to 128, by a copy of the weight for more."""
    return _bind(matrix, out_dtype, is_invariant=False)


def bind_invariant(matrix: Matrix, out_dtype: torch.dtype) -> Apply:
    """The layer by `_product` for any number of rows. A tile always has 64 columns, so an output is the same chain of
    instructions for any number of rows."""
    return _bind(matrix, out_dtype, is_invariant=True)


def _bind(matrix: Matrix, out_dtype: torch.dtype, *, is_invariant: bool) -> Apply:
    order, bias = matrix.order, matrix.bias
    return Layer(
        Packed.pack(matrix),
        None if bias is None else bias.contiguous(),
        None if order is None else order.long(),
        out_dtype,
        is_invariant,
    )


@dataclass(slots=True, eq=False)
class Layer:
    """A bound layer."""

    packed: Packed
    bias: Tensor | None
    order: Tensor | None
    """[K] int64: x[:, order] meets the columns of the weight."""
    out_dtype: torch.dtype
    is_invariant: bool

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x[:, self.order]
        x = x if x.stride(1) == 1 else x.contiguous()
        if x.shape[0] > _MAX_ROWS and not self.is_invariant:
            return multiplied_by_copies(x, self.packed, self.bias, self.out_dtype)
        return multiplied(x, self.packed, self.bias, self.out_dtype, is_invariant=self.is_invariant)


def multiplied(x: Tensor, packed: Packed, bias: Tensor | None, out_dtype: torch.dtype, *, is_invariant: bool) -> Tensor:
    """x W^T + b by `_product`."""
    num_rows, out_size = x.shape[0], packed.out_size
    out = torch.empty((num_rows, out_size), dtype=out_dtype, device=x.device)
    if not num_rows:
        return out
    device = gpu.properties_of(x.device)
    block_m, block_n = _tile(num_rows, out_size, is_invariant, device)
    _product[(triton.cdiv(num_rows, block_m) * triton.cdiv(out_size, block_n),)](
        x,
        packed.weight,
        packed.scales,
        packed.offsets,
        packed.scales if bias is None else bias,
        out,
        num_rows,
        out_size,
        packed.in_size,
        x.stride(0),
        **packed.constants,
        HAS_TAIL=packed.in_size % STEP.value != 0,
        HAS_BIAS=bias is not None,
        **(dependent_options() if block_m == ROWS[0] else {"IS_DEPENDENT": False}),
        BLOCK_N=block_n,
        BLOCK_M=block_m,
        num_warps=block_n // COLUMNS_A_WARP,
        num_stages=stages_of(block_m, block_n, packed.constants["BITS"], x.dtype.itemsize, device),
        maxnreg=registers(block_m, x.dtype.itemsize == 2),
    )
    return out


def multiplied_by_copies(x: Tensor, packed: Packed, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x W^T + b by copies of the weight and the vendor's library."""
    out_size, in_size = packed.out_size, packed.in_size
    out = torch.empty((x.shape[0], out_size), dtype=out_dtype, device=x.device)
    num_columns = min(out_size, max(1, _PIECE // in_size))
    piece = torch.empty((num_columns, in_size), dtype=x.dtype, device=x.device)
    for first in range(0, out_size, num_columns):
        columns = slice(first, min(first + num_columns, out_size))
        copied = copy(packed, columns, piece)
        out[:, columns] = plain(x, copied, None if bias is None else bias[columns].to(x.dtype), out_dtype)
    return out


def copy(packed: Packed, columns: slice, piece: Tensor) -> Tensor:
    """The weights [columns, K] in the dtype of `piece` [at least as many, K], at its beginning."""
    num_columns, span = columns.stop - columns.start, packed.constants["SPAN"]
    _copy[(triton.cdiv(num_columns, _COPIED_ROWS), triton.cdiv(packed.in_size, span))](
        packed.weight,
        packed.scales,
        packed.offsets,
        piece,
        columns.start,
        columns.stop,
        packed.out_size,
        packed.in_size,
        **packed.constants,
        BLOCK_N=_COPIED_ROWS,
        num_warps=4,
    )
    return piece[:num_columns]


def _tile(num_rows: int, out_size: int, is_invariant: bool, device: DeviceProperties) -> tuple[int, int]:
    """(rows, columns) of a tile. A tile of 64 columns is multiplied by a warp group if the device has them. Tiles of
    few rows have 32 columns if at most one wider tile is there for each multiprocessor to fill, unless all numbers of
    rows must have the same instructions."""
    if num_rows > ROWS[0]:
        return ROWS[1], 64
    is_small = out_size <= 64 * device.filled_multiprocessors
    return ROWS[0], 32 if is_small and not is_invariant else 64


def shared_need(block_m: int, block_n: int, bits: int, x_bytes: int) -> SharedNeed:
    """Shared memory of a tile: the integers and inputs of a step. Integers that are multiplied outside the tensor cores
    take their space once more."""
    integers_bytes, inputs_bytes = block_n * STEP.value * bits // 8, block_m * STEP.value * x_bytes
    kept_bytes = _KEPT_BYTES + (integers_bytes if x_bytes == 4 else 0)
    group_bytes = inputs_bytes if block_n >= 64 and x_bytes == 2 else 0
    return SharedNeed(integers_bytes + inputs_bytes, kept_bytes, group_bytes)


@functools.cache
def stages_of(block_m: int, block_n: int, bits: int, x_bytes: int, device: DeviceProperties) -> int:
    name = f"integers of {bits} bits {block_m} x {block_n} x {8 * x_bytes} bits"
    return fit(device, [Candidate(name, None, STAGES, shared_need(block_m, block_n, bits, x_bytes))])[1]


_TILES = ((64, 16), (32, 16), (64, 64))
"""(columns, rows), by `_tile`."""
_DTYPE_PAIRS = (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32"))


def registers(block_m: int, is_narrow: bool) -> int:
    """Most registers of a thread. Left alone, the assembler takes fewer and spills in some forms. `is_narrow`: x has 16
    bits."""
    return 168 if block_m == ROWS[0] and is_narrow else 248


def forms(op: str, bits: int) -> Iterator[Shipped]:
    """Every group size, kind of offsets and table at 16 rows of bfloat16; in groups of 32 every dtype, and every tile.
    The dtypes of scales and biases change only their loads."""
    tables = TABLES if bits == 4 else ("centred",)
    kinds = [*(("none", table) for table in tables), ("zeros", "centred"), ("minimums", "centred")]
    for (offsets, table), group_size in itertools.product(kinds, (*GROUP_SIZES, 0)):
        made = constants(bits, group_size, offsets, table)
        first = _form(op, made, "bf16", "bf16", 64, ROWS[0])
        yield from (first, first.early(is_prefetching=True))
        if group_size == 32:
            others = ((64, ROWS[0], *pair) for pair in _DTYPE_PAIRS[1:])
            for block_n, block_m, dtype, out in (*((*tile, *_DTYPE_PAIRS[0]) for tile in _TILES), *others):
                if (block_n, block_m, dtype, out) != (64, ROWS[0], "bf16", "bf16"):
                    one = _form(op, made, dtype, out, block_n, block_m)
                    yield from (one, one.early(is_prefetching=True)) if block_m == ROWS[0] else (one,)
        yield Shipped(
            op=f"{op}_copy",
            config=f"bf16 {name_of(made)}",
            kernel=_copy,
            signature=types_of(_copy, made, out="bf16"),
            constants={**made, "BLOCK_N": _COPIED_ROWS},
            num_warps=4,
            multiples=("out_size", "in_size"),
        )


def _form(op: str, made: dict[str, Any], dtype: str, out: str, block_n: int, block_m: int) -> Shipped:
    result = "" if out == dtype else f" out {out}"
    flags = dict.fromkeys(("HAS_TAIL", "HAS_BIAS", "IS_DEPENDENT"), False)
    return Shipped(
        op=op,
        config=f"{dtype} {name_of(made)}{result} tile {block_n} x {block_m}",
        kernel=_product,
        signature=types_of(_product, made, x=dtype, out=out, bias="bf16"),
        constants={**made, **flags, "BLOCK_N": block_n, "BLOCK_M": block_m},
        num_warps=block_n // COLUMNS_A_WARP,
        num_stages=STAGES,
        shared=shared_need(block_m, block_n, made["BITS"], 4 if dtype == "fp32" else 2),
        options={"maxnreg": registers(block_m, dtype != "fp32")},
        # A warp group needs 64 weight rows; fp32 is multiplied outside the tensor cores.
        is_matrix=dtype != "fp32" and block_n >= 64,
        is_warp_matrix=dtype != "fp32" and block_n < 64,
        multiples=("out_size", "in_size", "x_stride"),
    )
