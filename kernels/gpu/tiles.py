"""Shared parts of the Triton kernels that multiply any number of rows by a weight [out, in], one tile of results a
program."""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from inferd.kernels.device import Candidate, DeviceProperties, SharedNeed, fit


@triton.jit
def tile_of(num_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows, first column) of this program's tile. Programs that share a tile of the weight run next to each other, so
    that the L2 cache holds it."""
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0)
    return (tile % num_tiles) * BLOCK_M + tl.arange(0, BLOCK_M), (tile // num_tiles) * BLOCK_N


@triton.jit
def operands(x, weight, row, column, inner, x_stride, in_size):
    """Addresses of the tile's first step of inputs: of x [rows, inputs], and of the weight as [inputs, columns]."""
    x_place = x + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    return x_place, weight + column.to(tl.int64)[None, :] * in_size + inner[:, None]


@triton.jit
def store_tile(out, total, bias, row, column, num_rows, out_size, HAS_BIAS: tl.constexpr):
    is_row, is_column = row < num_rows, column < out_size
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * out_size + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


STAGES = 4
STEP_BYTES = 128
"""Bytes of a row, and of a column, that such a kernel copies for each step."""
_KEPT_BYTES = 1024
"""Most bytes beside the copies, in all compiled forms."""


def shared_need(block_m: int, block_n: int, x_bytes: int) -> SharedNeed:
    """Shared memory of a kernel that copies `STEP_BYTES` of each row and column for each step. Numbers of 4 bytes are
    multiplied outside the tensor cores."""
    step_bytes = (block_m + block_n) * STEP_BYTES
    return SharedNeed(step_bytes, _KEPT_BYTES, 0 if x_bytes == 4 else step_bytes)


@functools.cache
def stages_of(op: str, block_m: int, block_n: int, x_bytes: int, device: DeviceProperties) -> int:
    """Stages of such a kernel on a device."""
    need = shared_need(block_m, block_n, x_bytes)
    return fit(device, [Candidate(f"{op} {block_m} x {block_n} in {8 * x_bytes} bits", None, STAGES, need)])[1]


LEAST_SCANNED = 256
"""Least number of experts that a program looks at to find its own: models have up to as many, or twice as many."""


@triton.jit
def expert_tile(offsets, num_experts, tile, BLOCK_M: tl.constexpr, SCANNED: tl.constexpr):
    """(expert, first pair, end of the expert's pairs) of a tile. The end is 0 behind the last tile."""
    expert = tl.arange(0, SCANNED)
    start = tl.load(offsets + expert, mask=expert < num_experts, other=0)
    end = tl.load(offsets + expert + 1, mask=expert < num_experts, other=0)
    num_tiles = tl.cdiv(end - start, BLOCK_M)
    tiles_to = tl.cumsum(num_tiles, 0)
    tile_of_own = tile - (tiles_to - num_tiles)
    is_own = (tile_of_own >= 0) & (tile < tiles_to)
    own = tl.sum(tl.where(is_own, expert, 0), 0)
    first = tl.sum(tl.where(is_own, start + tile_of_own * BLOCK_M, 0), 0)
    return own, first, tl.sum(tl.where(is_own, end, 0), 0)
