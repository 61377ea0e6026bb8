"""The Triton implementation: the kernels of `argmax`, `top_k_top_p` and `sample` over scores that are computed when
needed and never stored. A row's programs end at once in the launches that it does not need.

The floor of greedy rows is memory: each logit is read once. Rows with a temperature read them twice, and spend as much
as `sample` on noise. Rows with a top-k or top-p read them once more and write an image of each score. Without such rows
the two launches for cuts have programs that read three numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import Shipped
from inferd.kernels.ops.argmax.triton import highest, peaks_of_chunks
from inferd.kernels.ops.sample.triton import MARGIN, best_of, candidate_chunks, exact_noise, near_noise, random_bits
from inferd.kernels.ops.top_k_top_p.triton import (
    SORT_BLOCK,
    SORT_WARPS,
    UNFUSED,
    Chunks,
    cuts_of,
    sort_chunk,
)

_PEAK_BLOCK, _BLOCK, _NUM_WARPS = 2048, 1024, 4
_DRAW_WARPS = 8
"""4 tokens a thread. With 8, the noise in fp64 and the division spill."""


@triton.jit
def _temperature_of(slot, temperatures):
    return tl.load(temperatures + slot, mask=slot >= 0, other=0.0)


@triton.jit
def _scores(logits, row, stride, token_ids, size, peak, temperature):
    """Scores rounded as torch rounds them; -inf behind the end of the row and for a NaN."""
    values = tl.load(logits + row * stride + token_ids, mask=token_ids < size, other=float("-inf"))
    values = tl.div_rn(values - peak, tl.zeros_like(values) + temperature)
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def _peak_of(peaks, row, num_peaks, PEAKS: tl.constexpr):
    place = tl.arange(0, PEAKS)
    return tl.max(tl.load(peaks + row * num_peaks + place, mask=place < num_peaks, other=float("-inf")), 0)


@triton.jit
def _sort(
    logits, slots, temperatures, peaks, top_k, top_p, images, lasts, masses, stride, size, num_peaks,
    PEAKS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sort a chunk of scores, for rows with a temperature and with a top-k or a top-p."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, has_k, has_p = cuts_of(top_k, top_p, slots, row, size)
    temperature = _temperature_of(tl.load(slots + row), temperatures)
    if (has_k | has_p) & (temperature > 0.0):
        peak = _peak_of(peaks, row, num_peaks, PEAKS)
        values = _scores(logits, row, stride, chunk * CHUNK + tl.arange(0, CHUNK), size, peak, temperature)
        sort_chunk(values, row * tl.num_programs(1) + chunk, images, lasts, masses, BLOCK, CHUNK)


@triton.jit
def _bound(
    logits, slots, temperatures, seeds, positions, peaks, floors, highs, lows, stride, size, num_peaks,
    PEAKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write an upper and a lower bound of the best total of a chunk to [row, chunk], for rows with a temperature."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = _temperature_of(slot, temperatures)
    if temperature > 0.0:
        peak = _peak_of(peaks, row, num_peaks, PEAKS)
        token_ids = chunk * BLOCK + tl.arange(0, BLOCK)
        values = _scores(logits, row, stride, token_ids, size, peak, temperature)
        values = tl.where(values < tl.load(floors + row), float("-inf"), values)
        noise = near_noise(random_bits(tl.load(seeds + slot), tl.load(positions + row), token_ids))
        goal = row * tl.num_programs(1) + chunk
        tl.store(highs + goal, tl.max(values + (noise + MARGIN), 0))
        tl.store(lows + goal, tl.max(values + (noise - MARGIN), 0))


@triton.jit
def _draw(
    logits, slots, temperatures, seeds, positions, peaks, floors, peak_ids, highs, lows, out, is_none, stride, size,
    num_peaks, num_chunks, PEAKS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the greedy token, or the best total of the chunks that may hold it. They are visited in order: the lowest
    id wins a tie."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature = _temperature_of(slot, temperatures)
    peak, greedy_id = highest(peaks, peak_ids, row, num_peaks, PEAKS)
    tl.store(is_none + row, tl.abs(peak) == float("inf"))
    if temperature == 0.0:
        tl.store(out + row, greedy_id.to(tl.int64))
    else:
        chunks, can_win = candidate_chunks(highs, lows, row, num_chunks, CHUNKS)
        best, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
        chunk = tl.min(tl.where(can_win, chunks, CHUNKS), 0)
        while chunk < CHUNKS:
            token_ids = chunk * BLOCK + tl.arange(0, BLOCK)
            values = _scores(logits, row, stride, token_ids, size, peak, temperature)
            values = tl.where(values < tl.load(floors + row), float("-inf"), values)
            totals = values + exact_noise(random_bits(tl.load(seeds + slot), tl.load(positions + row), token_ids))
            best, best_id = best_of(best, best_id, totals, token_ids)
            chunk = tl.min(tl.where(can_win & (chunks > chunk), chunks, CHUNKS), 0)
        tl.store(out + row, best_id.to(tl.int64))


def draw(
    logits: Tensor,
    slots: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    slots, positions = slots.contiguous(), positions.contiguous()
    assert temperatures.is_contiguous() and seeds.is_contiguous()
    (num_rows, size), device = logits.shape, logits.device
    num_peaks, num_chunks = triton.cdiv(size, _PEAK_BLOCK), triton.cdiv(size, _BLOCK)
    peaks = torch.empty((num_rows, num_peaks), dtype=torch.float32, device=device)
    peak_ids = torch.empty((num_rows, num_peaks), dtype=torch.int32, device=device)
    # Two tensors, because kernels are compiled by whether an address is a multiple of 16. In one tensor the address of
    # the second part would depend on the number of rows.
    highs, lows = (torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device) for _ in range(2))
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    is_none = torch.empty(num_rows, dtype=torch.bool, device=device)
    asked, stride = (slots, temperatures, seeds, positions), logits.stride(0)
    constants = {"PEAKS": triton.next_power_of_2(num_peaks), "BLOCK": _BLOCK}
    peaks_of_chunks[(num_rows, num_peaks)](
        logits, peaks, peak_ids, stride, size, BLOCK=_PEAK_BLOCK, num_warps=_NUM_WARPS
    )
    floors = _floors(logits, slots, temperatures, peaks, (top_k, top_p, log_min_p))
    _bound[(num_rows, num_chunks)](
        logits, *asked, peaks, floors, highs, lows, stride, size, num_peaks, **constants, num_warps=_NUM_WARPS
    )
    _draw[(num_rows,)](
        logits, *asked, peaks, floors, peak_ids, highs, lows, out, is_none, stride, size, num_peaks, num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks), **constants, num_warps=_DRAW_WARPS,
    )  # fmt: skip
    return out, is_none


def _floors(
    logits: Tensor, slots: Tensor, temperatures: Tensor, peaks: Tensor, cuts: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """[R] fp32: the lowest score that each row's cuts leave."""
    (num_rows, size), num_peaks = logits.shape, peaks.shape[1]
    chunks = Chunks(num_rows, size, logits.device)
    floors = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _sort[(num_rows, chunks.num_chunks)](
        logits, slots, temperatures, peaks, *cuts[:2], *chunks.sorted, logits.stride(0), size, num_peaks,
        PEAKS=triton.next_power_of_2(num_peaks), **chunks.options,
    )  # fmt: skip
    chunks.select(*cuts, slots, floors)
    return floors


def shipped() -> Iterator[Shipped]:
    pointers = {
        "logits": "*fp32", "slots": "*i64", "temperatures": "*fp32", "seeds": "*i64", "positions": "*i64",
        "peaks": "*fp32",
    }  # fmt: skip
    for peaks in (16, 64, 128):
        constants = {"PEAKS": peaks, "BLOCK": _BLOCK}
        yield Shipped(
            op="draw_sort",
            config=f"{peaks} peaks",
            kernel=_sort,
            signature={
                "logits": "*fp32", "slots": "*i64", "temperatures": "*fp32", "peaks": "*fp32", "top_k": "*i64",
                "top_p": "*fp64", "images": "*i32", "lasts": "*i32", "masses": "*i64",
                **dict.fromkeys(("stride", "size", "num_peaks"), "i32"),
            },
            constants={"PEAKS": peaks, "BLOCK": SORT_BLOCK, "CHUNK": SORT_BLOCK * SORT_BLOCK},
            num_warps=SORT_WARPS,
            is_streaming=True,
            multiples=("stride", "size"),
            options=UNFUSED,
        )  # fmt: skip
        yield Shipped(
            op="draw_bound",
            config=f"{peaks} peaks",
            kernel=_bound,
            signature={
                **pointers, "floors": "*fp32", "highs": "*fp32", "lows": "*fp32",
                "stride": "i32", "size": "i32", "num_peaks": "i32",
            },
            constants=constants,
            num_warps=_NUM_WARPS,
            is_streaming=True,
            multiples=("stride", "size"),
        )  # fmt: skip
        yield Shipped(
            op="decode_draw",
            config=f"{peaks} peaks",
            kernel=_draw,
            signature={
                **pointers, "floors": "*fp32", "peak_ids": "*i32", "highs": "*fp32", "lows": "*fp32", "out": "*i64",
                "is_none": "*u1",
                **dict.fromkeys(("stride", "size", "num_peaks", "num_chunks"), "i32"),
            },
            constants={**constants, "CHUNKS": 2 * peaks},
            num_warps=_DRAW_WARPS,
            multiples=("stride", "size"),
        )  # fmt: skip
