"""The Triton implementation: a program for each 2048 logits, then one program a row that compares their results.

The floor is memory: each logit is read once. A NaN counts as +inf, which no row may hold either.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import DTYPES, Shipped

_BLOCK, _NUM_WARPS = 2048, 4


@triton.jit
def peaks_of_chunks(logits, peaks, ids, stride, size, BLOCK: tl.constexpr):
    """Write the largest logit of a chunk and the lowest id that has it to [row, chunk]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))
    peak = tl.max(value, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(peaks + place, peak)
    tl.store(ids + place, tl.min(tl.where(value == peak, column, 2147483647), 0))


@triton.jit
def highest(peaks, ids, row, num_chunks, BLOCK: tl.constexpr):
    """(largest logit of a row, lowest id that has it), from the results of its chunks."""
    chunk = tl.arange(0, BLOCK)
    is_inside = chunk < num_chunks
    values = tl.load(peaks + row * num_chunks + chunk, mask=is_inside, other=float("-inf"))
    candidates = tl.load(ids + row * num_chunks + chunk, mask=is_inside, other=2147483647)
    peak = tl.max(values, 0)
    return peak, tl.min(tl.where(values == peak, candidates, 2147483647), 0)


@triton.jit
def _highest(peaks, ids, out, is_none, num_chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak, token_id = highest(peaks, ids, row, num_chunks, BLOCK)
    tl.store(out + row, token_id.to(tl.int64))
    tl.store(is_none + row, tl.abs(peak) == float("inf"))


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, size = logits.shape
    num_chunks = triton.cdiv(size, _BLOCK)
    peaks = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_none = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    peaks_of_chunks[(num_rows, num_chunks)](
        logits, peaks, ids, logits.stride(0), size, BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )
    block = triton.next_power_of_2(num_chunks)
    _highest[(num_rows,)](peaks, ids, out, is_none, num_chunks, BLOCK=block, num_warps=1)
    return out, is_none


def shipped() -> Iterator[Shipped]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield Shipped(
            op="argmax",
            config=DTYPES[dtype],
            kernel=peaks_of_chunks,
            signature={
                "logits": f"*{DTYPES[dtype]}", "peaks": "*fp32", "ids": "*i32", "stride": "i32", "size": "i32",
            },
            constants={"BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            is_streaming=True,
            multiples=("stride", "size"),
        )  # fmt: skip
    for block in (16, 64, 128):
        yield Shipped(
            op="argmax_highest",
            config=f"{block} chunks",
            kernel=_highest,
            signature={
                "peaks": "*fp32", "ids": "*i32", "out": "*i64", "is_none": "*u1", "num_chunks": "i32",
            },
            constants={"BLOCK": block},
            num_warps=1,
        )  # fmt: skip
