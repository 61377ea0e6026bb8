"""The Triton implementation: a program takes some channels of a row through its tokens, some tokens at a time. It alone
reads and writes their state. The floor is memory: each input is read and each result written once; a token's inputs
come from the cache when later tokens need them.

A step whose rows have one token each has programs of more channels. Both forms compute alike: element by element, with
every fused operation written as one. So neither the form nor the place of a token among the others changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.gpu import DTYPES, Shipped, dependent_options
from inferd.kernels.ops.states import StateRows

_DECODE, _PROMPT = (1, 256, 4), (64, 64, 8)
"""(tokens at a time, channels, warps) of a program: 2 and 16 elements a thread. With 4, forms for decodes spill."""


@triton.jit
def _inputs(x, before, place, mask, HAS_GATES: tl.constexpr):
    """Inputs of the convolution at `place`; zeros beside the mask."""
    value = tl.load(x + place, mask=mask, other=0.0)
    if HAS_GATES:
        gate = tl.load(before + place, mask=mask, other=0.0)
        value = (value.to(tl.float32) * gate.to(tl.float32)).to(x.dtype.element_ty)
    return value


@triton.jit
def _short_conv(
    x, before, behind, weight, bias, state, query_start, positions, slots, out, size, stride,
    WIDTH: tl.constexpr, HAS_SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATES: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    channel, row = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(1)
    is_channel = channel < size
    first, end, slot = tl.load(query_start + row), tl.load(query_start + row + 1), tl.load(slots + row)
    if (first < end) & (slot >= 0):
        continues = tl.load(positions + first) > 0
        kept = state + slot * ((WIDTH - 1) * size) + channel
        for start in range(first, end, TOKENS):
            token = start + tl.arange(0, TOKENS)
            is_inside = (token < end)[:, None] & is_channel[None, :]
            total = tl.zeros((TOKENS, CHANNELS), tl.float32)
            for tap in tl.static_range(WIDTH):
                is_own = (token - first >= WIDTH - 1 - tap)[:, None]
                place = (token - (WIDTH - 1 - tap)).to(tl.int64)[:, None] * stride + channel[None, :]
                own = _inputs(x, before, place, is_inside & is_own, HAS_GATES)
                earlier = kept[None, :] + (token - first + tap)[:, None] * size
                earlier = tl.load(earlier, mask=is_inside & ~is_own & continues, other=0.0)
                factor = tl.load(weight + tap * size + channel, mask=is_channel, other=0.0)
                factor = tl.broadcast_to(factor[None, :], (TOKENS, CHANNELS))
                total = tl.fma(tl.where(is_own, own, earlier).to(tl.float32), factor, total)
            if HAS_BIAS:
                total += tl.load(bias + channel, mask=is_channel, other=0.0)[None, :]
            if HAS_SILU:
                total = total / (1.0 + tl.exp(-total))
            if HAS_GATES:
                place = token.to(tl.int64)[:, None] * stride + channel[None, :]
                total *= tl.load(behind + place, mask=is_inside, other=0.0).to(tl.float32)
            goal = out + token.to(tl.int64)[:, None] * size + channel[None, :]
            tl.store(goal, total.to(out.dtype.element_ty), mask=is_inside)
        tl.debug_barrier()  # other threads have read the state
        for tap in tl.static_range(WIDTH - 1):
            token = end - (WIDTH - 1) + tap
            is_own = token >= first
            own = _inputs(x, before, token.to(tl.int64) * stride + channel, is_channel & is_own, HAS_GATES)
            earlier = kept + (end - first + tap) * size
            earlier = tl.load(earlier, mask=is_channel & (token < first) & continues, other=0.0)
            tl.store(kept + tap * size, tl.where(is_own, own, earlier), mask=is_channel)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: tuple[Tensor, Tensor] | None,
    state: Tensor,
    rows: StateRows,
    has_silu: bool,
) -> Tensor:
    assert rows.num_kept is None, "a GPU verifies no drafts of a model with recurrent layers"
    num_tokens, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, channels, num_warps = _DECODE if num_tokens == len(rows.slots) else _PROMPT
    _short_conv[(triton.cdiv(size, channels), len(rows.slots))](
        x,
        *((x, x) if gates is None else gates),
        weight,
        weight if bias is None else bias,
        state,
        rows.query_start,
        rows.positions,
        rows.slots,
        out,
        size,
        x.stride(0),
        WIDTH=len(weight),
        HAS_SILU=has_silu,
        HAS_BIAS=bias is not None,
        HAS_GATES=gates is not None,
        TOKENS=tokens,
        CHANNELS=channels,
        **dependent_options(),
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return out


_SHAPES = ((4, True, True, False), (4, True, False, False), (3, False, False, True), (3, False, True, True))
"""(width, silu, bias, gates): Mamba-2, Gated DeltaNet, LFM2."""


def shipped() -> Iterator[Shipped]:
    for width, has_silu, has_bias, has_gates in _SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for tokens, channels, num_warps in (_DECODE, _PROMPT):
                what = f"{' silu' * has_silu}{' bias' * has_bias}{' gates' * has_gates}"
                one = Shipped(
                    op="short_conv",
                    config=f"{DTYPES[dtype]} width {width}{what}, {tokens} tokens",
                    kernel=_short_conv,
                    signature={
                        **dict.fromkeys(("x", "before", "behind", "state", "out"), f"*{DTYPES[dtype]}"),
                        **dict.fromkeys(("weight", "bias"), "*fp32"),
                        "query_start": "*i32",
                        **dict.fromkeys(("positions", "slots"), "*i64"),
                        **dict.fromkeys(("size", "stride"), "i32"),
                    },
                    constants={
                        "WIDTH": width,
                        "HAS_SILU": has_silu,
                        "HAS_BIAS": has_bias,
                        "HAS_GATES": has_gates,
                        "TOKENS": tokens,
                        "CHANNELS": channels,
                        "IS_DEPENDENT": False,
                    },
                    num_warps=num_warps,
                    multiples=("size", "stride"),
                    options={"enable_fp_fusion": False},
                )
                yield from (one, one.early())
