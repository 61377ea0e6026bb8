"""The Triton implementation: a program for each 1024 tokens bounds their totals, then one program a row draws exactly
among the tokens that may win.

fp32 logarithms give an upper and a lower bound of every total: the noise in fp64 is within `MARGIN` of theirs. fp32
addition is monotone, so only a chunk whose upper bound reaches the row's highest lower bound can hold the winner. The
noise of such a chunk is computed in fp64, as `philox.py` defines it, and rounded. The ids therefore equal the
reference's, ties included. Except for near ties this is one chunk a row.

Computing all noise in fp64 would be 64 fp64 operations a token (both logarithms, as compiled for sm_90), beside 150
others. That nearly doubles the time if fp64 has half the rate of fp32, as on an H100, and is 25 times as much at 1/64.

Time is not bound by memory, which reads each score once: 40 of the 150 instructions a token are halves of Philox's
products.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import Shipped

_BLOCK, _NUM_WARPS = 1024, 4
MARGIN = tl.constexpr(2.0**-17)
"""More than the error of the fp32 noise, with logarithms exact to 1 unit in the last place and a quotient to 2. The
error is the sum of 5e-7 for the argument of the outer logarithm, 1.9e-6 for that logarithm if the noise is above 16,
and two roundings of 1e-6."""


@triton.jit
def random_bits(seed, position, token_ids):
    """24 random bits of each token, the input of `gumbel_noise`."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    key_low, key_high = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox_impl(token_ids.to(tl.uint32), low, high, low * 0, key_low, key_high)
    return (word >> 8).to(tl.int32)


@triton.jit
def near_noise(bits):
    """The noise in fp32, at most `MARGIN` off.

    -log(u) for u = (bits + 0.5) / 2^24 is -log1p(-t) with t = 1 - u, which fp32 holds with a relative error of 2^-25.
    After Higham (2002, Accuracy and Stability of Numerical Algorithms, section 1.14.1) that is t log(w) / (w - 1) with
    w the rounded 1 - t, whose error then cancels. A small u needs no such care: fp32 holds u itself as precisely.
    """
    gap = (33554431 - 2 * bits).to(tl.float32) * 2.9802322387695312e-08  # 2^-25
    rest = 1.0 - gap
    is_low = gap > 0.75
    uniform = (2 * bits + 1).to(tl.float32) * 2.9802322387695312e-08
    product = -tl.log(tl.where(is_low, uniform, rest)) * tl.where(is_low, 1.0, gap / (1.0 - rest))
    return -tl.log(tl.where(rest == 1.0, gap, product))


@triton.jit
def exact_noise(bits):
    """The noise, equal to the reference's."""
    uniform = (bits.to(tl.float64) + 0.5) * 5.9604644775390625e-08  # 2^-24
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def candidate_chunks(highs, lows, row, num_chunks, CHUNKS: tl.constexpr):
    """(chunk numbers, whether each reaches the best lower bound of the row)."""
    chunks = tl.arange(0, CHUNKS)
    is_inside = chunks < num_chunks
    bar = tl.max(tl.load(lows + row * num_chunks + chunks, mask=is_inside, other=float("-inf")), 0)
    reach = tl.load(highs + row * num_chunks + chunks, mask=is_inside, other=float("-inf"))
    return chunks, (reach >= bar) & (reach > float("-inf"))


@triton.jit
def best_of(best, best_id, totals, token_ids):
    """(total, id) of the best so far, or the lowest id among these tokens that has a higher total."""
    top = tl.max(totals, 0)
    first = tl.min(tl.where(totals == top, token_ids, 2147483647), 0)
    return tl.maximum(top, best), tl.where(top > best, first, best_id)


@triton.jit
def _load_scores(scores, row, stride, token_ids, size):
    """Scores; -inf behind the end of the row and for a NaN."""
    values = tl.load(scores + row * stride + token_ids, mask=token_ids < size, other=float("-inf"))
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def _bound(scores, seeds, positions, highs, lows, stride, size, BLOCK: tl.constexpr):
    """Write an upper and a lower bound of the best total of a chunk to [row, chunk]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_ids = chunk * BLOCK + tl.arange(0, BLOCK)
    values = _load_scores(scores, row, stride, token_ids, size)
    noise = near_noise(random_bits(tl.load(seeds + row), tl.load(positions + row), token_ids))
    place = row * tl.num_programs(1) + chunk
    tl.store(highs + place, tl.max(values + (noise + MARGIN), 0))
    tl.store(lows + place, tl.max(values + (noise - MARGIN), 0))


@triton.jit
def _draw(
    scores, seeds, positions, highs, lows, out, stride, size, num_chunks, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Visit the chunks that may hold the winner in order, so that the lowest id wins a tie."""
    row = tl.program_id(0).to(tl.int64)
    chunks, can_win = candidate_chunks(highs, lows, row, num_chunks, CHUNKS)
    best, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    chunk = tl.min(tl.where(can_win, chunks, CHUNKS), 0)
    while chunk < CHUNKS:
        token_ids = chunk * BLOCK + tl.arange(0, BLOCK)
        values = _load_scores(scores, row, stride, token_ids, size)
        totals = values + exact_noise(random_bits(tl.load(seeds + row), tl.load(positions + row), token_ids))
        best, best_id = best_of(best, best_id, totals, token_ids)
        chunk = tl.min(tl.where(can_win & (chunks > chunk), chunks, CHUNKS), 0)
    tl.store(out + row, best_id.to(tl.int64))


def sample(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    assert seeds.dtype == positions.dtype == torch.int64, f"int64 is read, not {seeds.dtype} and {positions.dtype}"
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    seeds, positions = seeds.contiguous(), positions.contiguous()
    num_rows, size = scores.shape
    num_chunks = triton.cdiv(size, _BLOCK)
    # Two tensors, because kernels are compiled by whether an address is a multiple of 16. In one tensor the address of
    # the second part would depend on the number of rows.
    highs, lows = (torch.empty((num_rows, num_chunks), dtype=torch.float32, device=scores.device) for _ in range(2))
    out = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    _bound[(num_rows, num_chunks)](
        scores, seeds, positions, highs, lows, scores.stride(0), size, BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )
    _draw[(num_rows,)](
        scores, seeds, positions, highs, lows, out, scores.stride(0), size, num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks), BLOCK=_BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return out


def shipped() -> Iterator[Shipped]:
    types = {"scores": "*fp32", "seeds": "*i64", "positions": "*i64", "highs": "*fp32", "lows": "*fp32"}
    yield Shipped(
        op="sample_bound",
        config="fp32",
        kernel=_bound,
        signature={**types, "stride": "i32", "size": "i32"},
        constants={"BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
        is_streaming=True,
        multiples=("stride", "size"),
    )
    for chunks in (32, 128, 256):
        yield Shipped(
            op="sample",
            config=f"{chunks} chunks",
            kernel=_draw,
            signature={**types, "out": "*i64", "stride": "i32", "size": "i32", "num_chunks": "i32"},
            constants={"CHUNKS": chunks, "BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            multiples=("stride", "size"),
        )
