"""The Triton implementation, as `gpu/recurrent` runs it. A decode's floor is memory: the state in and out once, or
128 KiB for each head of 128 x 128. A prompt's bound is the time from one token's state to the next.

q and k are normed in each program again, beside the work on the state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.gpu import DTYPES, Shipped, recurrent
from inferd.kernels.gpu.recurrent import softplus
from inferd.kernels.ops.gated_delta import NORM_EPS, Gates
from inferd.kernels.ops.states import StateRows, num_groups

_EPS = tl.constexpr(NORM_EPS)


@triton.jit
def _normed(head):
    return head / tl.sqrt_rn(tl.sum(head * head, 0) + _EPS)


@triton.jit
def _gated_delta(
    qkv, b, a, a_log, dt_bias, state, query_start, positions, slots, out, b_stride, a_stride, num_key_heads,
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
        speed, shift = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
        v_start = 2 * num_key_heads * KEY_DIM
        width = v_start + num_heads * VALUE_DIM
        place = qkv + first.to(tl.int64) * width
        key_place = head // (num_heads // num_key_heads) * KEY_DIM + key
        k_place = key_place + num_key_heads * KEY_DIM
        v_place = v_start + head * VALUE_DIM + column
        b_place, a_place = b + first.to(tl.int64) * b_stride + head, a + first.to(tl.int64) * a_stride + head
        goal = out + (first.to(tl.int64) * num_heads + head) * VALUE_DIM + column
        q_next = tl.load(place + key_place, mask=is_key, other=0.0)
        k_next = tl.load(place + k_place, mask=is_key, other=0.0)
        v_next = tl.load(place + v_place, mask=is_column, other=0.0)
        b_next, a_next = tl.load(b_place), tl.load(a_place)
        for token in range(first, end):
            q, k, v = q_next.to(tl.float32), k_next.to(tl.float32), v_next.to(tl.float32)
            beta = 1.0 / (1.0 + tl.exp(-b_next.to(tl.float32)))
            decay = tl.exp(speed * softplus(a_next.to(tl.float32) + shift))
            has_next = token + 1 < end
            place, b_place, a_place = place + width, b_place + b_stride, a_place + a_stride
            q_next = tl.load(place + key_place, mask=is_key & has_next, other=0.0)
            k_next = tl.load(place + k_place, mask=is_key & has_next, other=0.0)
            v_next = tl.load(place + v_place, mask=is_column & has_next, other=0.0)
            b_next, a_next = tl.load(b_place, mask=has_next, other=0.0), tl.load(a_place, mask=has_next, other=0.0)
            q, k = _normed(q) * (KEY_DIM**-0.5), _normed(k)
            held = tl.sum(current * k[:, None], 0)
            change = (v - held * decay) * beta
            current = current * decay + k[:, None] * change[None, :]
            tl.store(goal, tl.sum(current * q[:, None], 0).to(out.dtype.element_ty), mask=is_column)
            goal += num_heads * VALUE_DIM
        tl.store(kept, current, mask=is_inside)


def gated_delta(qkv: Tensor, gates: Gates, state: Tensor, rows: StateRows) -> Tensor:
    assert rows.num_kept is None, "a GPU verifies no drafts of a model with recurrent layers"
    out = torch.empty((len(qkv), state.shape[1] * state.shape[3]), dtype=qkv.dtype, device=qkv.device)
    inputs = (qkv, gates.b, gates.a, gates.a_log, gates.dt_bias)
    numbers = gates.b.stride(0), gates.a.stride(0), num_groups(qkv.shape[1], state)
    return recurrent.run(_gated_delta, inputs, state, rows, out, *numbers)


def shipped() -> Iterator[Shipped]:
    for sizes in ((128, 128), (64, 64), (256, 128)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            inputs = {
                **dict.fromkeys(("qkv", "b", "a"), f"*{DTYPES[dtype]}"),
                **dict.fromkeys(("a_log", "dt_bias"), "*fp32"),
            }
            numbers = ("b_stride", "a_stride", "num_key_heads")
            one = recurrent.form(_gated_delta, "gated_delta", dtype, sizes, inputs, dtype, numbers)
            yield from (one, one.early())
