"""The Triton implementation, as `gpu/recurrent` runs it. A decode's floor is memory: the state in and out once, or
64 KiB for each head of 128 x 64. A prompt's bound is the time from one token's state to the next."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.gpu import DTYPES, Shipped, recurrent
from inferd.kernels.gpu.recurrent import softplus
from inferd.kernels.ops.mamba2 import Weights
from inferd.kernels.ops.states import StateRows, num_groups


@triton.jit
def _mamba2(
    xbc, dt, a_log, dt_bias, d, state, query_start, positions, slots, out, dt_stride, num_groups,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr, COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head, num_heads, row = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    first, end, slot = tl.load(query_start + row), tl.load(query_start + row + 1), tl.load(slots + row)
    if (first < end) & (slot >= 0):
        key = tl.arange(0, BLOCK_KEY)
        is_key, is_column = key < KEY_DIM, column < VALUE_DIM
        kept = state + ((slot * num_heads + head) * KEY_DIM + key[:, None]) * VALUE_DIM + column[None, :]
        is_inside = is_key[:, None] & is_column[None, :]
        current = tl.load(kept, mask=is_inside & (tl.load(positions + first) > 0), other=0.0)
        speed, shift, skip = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(d + head)
        width = num_heads * VALUE_DIM + 2 * num_groups * KEY_DIM
        place = xbc + first.to(tl.int64) * width
        x_place = head * VALUE_DIM + column
        b_place = num_heads * VALUE_DIM + head // (num_heads // num_groups) * KEY_DIM + key
        c_place = b_place + num_groups * KEY_DIM
        dt_place = dt + first.to(tl.int64) * dt_stride + head
        goal = out + (first.to(tl.int64) * num_heads + head) * VALUE_DIM + column
        x_next = tl.load(place + x_place, mask=is_column, other=0.0)
        b_next = tl.load(place + b_place, mask=is_key, other=0.0)
        c_next = tl.load(place + c_place, mask=is_key, other=0.0)
        dt_next = tl.load(dt_place)
        for token in range(first, end):
            x, b, c = x_next.to(tl.float32), b_next.to(tl.float32), c_next.to(tl.float32)
            step = softplus(dt_next.to(tl.float32) + shift)
            has_next = token + 1 < end
            place, dt_place = place + width, dt_place + dt_stride
            x_next = tl.load(place + x_place, mask=is_column & has_next, other=0.0)
            b_next = tl.load(place + b_place, mask=is_key & has_next, other=0.0)
            c_next = tl.load(place + c_place, mask=is_key & has_next, other=0.0)
            dt_next = tl.load(dt_place, mask=has_next, other=0.0)
            current = current * tl.exp(speed * step) + b[:, None] * (x * step)[None, :]
            tl.store(goal, tl.sum(current * c[:, None], 0) + skip * x, mask=is_column)
            goal += num_heads * VALUE_DIM
        tl.store(kept, current, mask=is_inside)


def mamba2(xbc: Tensor, dt: Tensor, weights: Weights, state: Tensor, rows: StateRows) -> Tensor:
    assert rows.num_kept is None, "a GPU verifies no drafts of a model with recurrent layers"
    out = torch.empty((len(xbc), state.shape[1] * state.shape[3]), dtype=torch.float32, device=xbc.device)
    numbers = dt.stride(0), num_groups(xbc.shape[1], state)
    return recurrent.run(_mamba2, (xbc, dt, *weights), state, rows, out, *numbers)


def shipped() -> Iterator[Shipped]:
    for sizes in ((128, 64), (256, 64), (64, 64)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            inputs = {
                **dict.fromkeys(("xbc", "dt"), f"*{DTYPES[dtype]}"),
                **dict.fromkeys(("a_log", "dt_bias", "d"), "*fp32"),
            }
            numbers = ("dt_stride", "num_groups")
            one = recurrent.form(_mamba2, "mamba2", dtype, sizes, inputs, torch.float32, numbers)
            yield from (one, one.early())
