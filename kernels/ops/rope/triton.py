"""The Triton implementation: one program rotates up to 8 heads of one token, or copies as many of its values.

Registers hold a head as its two halves that rotate against each other, and the rest that does not rotate. Each is
loaded in pieces of 16 bytes. The floor is memory: q, k and v in and out once; a token's cosines and sines come from the
cache after its first program. Each group of a head of an 8-bit pool is divided by its scale. Groups may lie across
the halves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.device import FP8_MIN_SM
from inferd.kernels.gpu import DTYPES, Shipped, dependent_options
from inferd.kernels.ops.kv_format import KV_FORMATS, KV_GROUP, KV_SCALE_DTYPE

_HEADS = 8
"""Heads of one program."""


@triton.jit
def _largest(x, is_member):
    """Bits of the largest magnitude of each head. They order like the numbers, with infinity and then NaN on top; a
    maximum of floats would lose NaN."""
    return tl.max(tl.where(is_member, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 1)


@triton.jit
def _scale(largest, MOST: tl.constexpr):
    scale = largest.to(tl.float32, bitcast=True) * (1.0 / MOST)
    scale = tl.maximum(scale, 2.0**-100, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(scale <= 2.0**100, scale, float("nan")).to(tl.bfloat16)


@triton.jit
def _narrow(x, dtype: tl.constexpr):
    """fp32 as `dtype`, rounded to nearest, ties to even. Magnitudes are below the largest number and half a step."""
    if dtype == tl.int8:
        # 1.5 * 2^23: the low bits of the sum are the rounded integer.
        return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return x.to(dtype)


@triton.jit
def _rotate(
    source,
    target,
    target_stride,
    target_scales,
    scale_stride,
    weight,
    cos_sin,
    smoothing,
    first_head,
    num_heads,
    eps,
    NUM_SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate heads first_head .. first_head + HEADS of a token at `source`, head h to target + h * target_stride. If
    `NUM_SHARING` is not 0, each so many heads are multiplied by a row of `smoothing`."""
    heads = first_head + tl.arange(0, HEADS)
    is_head = (heads < num_heads)[:, None]
    column = tl.arange(0, BLOCK_HALF)
    is_turned = is_head & (column < HALF)[None, :]
    angle_mask = column < HALF
    cos = tl.load(cos_sin + column, mask=angle_mask, other=0.0)[None, :]
    sin = tl.load(cos_sin + HALF + column, mask=angle_mask, other=0.0)[None, :]
    places = source + heads[:, None] * HEAD_DIM + column[None, :]
    first = tl.load(places, mask=is_turned, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=is_turned, other=0.0).to(tl.float32)
    if 2 * HALF < HEAD_DIM:
        column_rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        is_rest = is_head & (column_rest < HEAD_DIM)[None, :]
        rest_mask = column_rest < HEAD_DIM
        rest = tl.load(source + heads[:, None] * HEAD_DIM + column_rest[None, :], mask=is_rest, other=0.0)
        rest = rest.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if 2 * HALF < HEAD_DIM:
            squares += tl.sum(rest * rest, 1)
        scale = (1.0 / tl.sqrt_rn(squares / HEAD_DIM + eps))[:, None]
        first = first * scale * tl.load(weight + column, mask=angle_mask, other=0.0).to(tl.float32)[None, :]
        second = second * scale * tl.load(weight + HALF + column, mask=angle_mask, other=0.0).to(tl.float32)[None, :]
        if 2 * HALF < HEAD_DIM:
            rest = rest * scale * tl.load(weight + column_rest, mask=rest_mask, other=0.0).to(tl.float32)[None, :]
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    if NUM_SHARING > 0:
        factors = smoothing + (heads // NUM_SHARING)[:, None] * HEAD_DIM + column[None, :]
        turned_first *= tl.load(factors, mask=is_turned, other=0.0)
        turned_second *= tl.load(factors + HALF, mask=is_turned, other=0.0)
        if 2 * HALF < HEAD_DIM:
            factors_rest = smoothing + (heads // NUM_SHARING)[:, None] * HEAD_DIM + column_rest[None, :]
            rest *= tl.load(factors_rest, mask=is_rest, other=0.0)
    dtype: tl.constexpr = target.dtype.element_ty
    if dtype.primitive_bitwidth == 8:
        goal_scales = target_scales + heads.to(tl.int64) * scale_stride
        for group in tl.static_range((HEAD_DIM + GROUP - 1) // GROUP):
            in_first = (column // GROUP == group)[None, :]
            in_second = ((HALF + column) // GROUP == group)[None, :]
            largest = tl.maximum(_largest(turned_first, in_first), _largest(turned_second, in_second))
            if 2 * HALF < HEAD_DIM:
                in_rest = (column_rest // GROUP == group)[None, :]
                largest = tl.maximum(largest, _largest(rest, in_rest))
            scale_8 = _scale(largest, MOST)
            tl.store(goal_scales + group, scale_8, mask=heads < num_heads)
            inverse = (1.0 / scale_8.to(tl.float32))[:, None]
            turned_first = tl.where(in_first, turned_first * inverse, turned_first)
            turned_second = tl.where(in_second, turned_second * inverse, turned_second)
            if 2 * HALF < HEAD_DIM:
                rest = tl.where(in_rest, rest * inverse, rest)
    goals = target + heads[:, None].to(tl.int64) * target_stride + column[None, :]
    tl.store(goals, _narrow(turned_first, dtype), mask=is_turned)
    tl.store(goals + HALF, _narrow(turned_second, dtype), mask=is_turned)
    if 2 * HALF < HEAD_DIM:
        goals_rest = target + heads[:, None].to(tl.int64) * target_stride + column_rest[None, :]
        tl.store(goals_rest, _narrow(rest, dtype), mask=is_rest)


@triton.jit
def _move(
    source,
    target,
    target_stride,
    target_scales,
    scale_stride,
    first_head,
    num_heads,
    HEAD_DIM: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    heads = first_head + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    is_inside = (heads < num_heads)[:, None] & (column < HEAD_DIM)[None, :]
    values = tl.load(source + heads[:, None] * HEAD_DIM + column[None, :], mask=is_inside, other=0.0)
    dtype: tl.constexpr = target.dtype.element_ty
    if dtype.primitive_bitwidth == 8:
        values = values.to(tl.float32)
        goal_scales = target_scales + heads.to(tl.int64) * scale_stride
        for group in tl.static_range((HEAD_DIM + GROUP - 1) // GROUP):
            is_member = (column // GROUP == group)[None, :]
            scale = _scale(_largest(values, is_member), MOST)
            tl.store(goal_scales + group, scale, mask=heads < num_heads)
            inverse = (1.0 / scale.to(tl.float32))[:, None]
            values = tl.where(is_member, values * inverse, values)
        values = _narrow(values, dtype)
    tl.store(target + heads[:, None].to(tl.int64) * target_stride + column[None, :], values, mask=is_inside)


@triton.jit
def _rope_and_cache(
    q,
    k,
    v,
    cos_sin,
    positions,
    write_slots,
    kv,
    kv_scales,
    out,
    q_norm,
    k_norm,
    smoothing,
    q_stride,
    k_stride,
    v_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    NUM_Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KEYS_SHARE: tl.constexpr = min(NUM_SHARING, 1)
    NUM_KV_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    angles = cos_sin + tl.load(positions + token) * (2 * HALF)
    if part < NUM_Q_PARTS:
        goal = out + token * (NUM_HEADS * HEAD_DIM)
        _rotate(
            q + token * q_stride, goal, HEAD_DIM, kv_scales, 0, q_norm, angles, smoothing, part * HEADS,
            NUM_HEADS, eps, NUM_SHARING, HEAD_DIM, HALF, HAS_NORM, MOST, GROUP, HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        slot = tl.load(write_slots + token)
        plane: tl.constexpr = PAGE * HEAD_DIM
        keys = kv + (slot // PAGE) * (2 * NUM_KV_HEADS * plane) + (slot % PAGE) * HEAD_DIM
        NUM_SCALES: tl.constexpr = (HEAD_DIM + GROUP - 1) // GROUP
        key_scales = kv_scales + ((slot // PAGE) * (2 * NUM_KV_HEADS * PAGE) + slot % PAGE) * NUM_SCALES
        if part < NUM_Q_PARTS + NUM_KV_PARTS:
            _rotate(
                k + token * k_stride, keys, plane, key_scales, PAGE * NUM_SCALES, k_norm, angles,
                smoothing + NUM_KV_HEADS * HEAD_DIM, (part - NUM_Q_PARTS) * HEADS, NUM_KV_HEADS, eps,
                KEYS_SHARE, HEAD_DIM, HALF, HAS_NORM, MOST, GROUP, HEADS,
                BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
        else:
            first_head = (part - NUM_Q_PARTS - NUM_KV_PARTS) * HEADS
            values = keys + NUM_KV_HEADS * plane
            value_scales = key_scales + NUM_KV_HEADS * PAGE * NUM_SCALES
            _move(
                v + token * v_stride, values, plane, value_scales, PAGE * NUM_SCALES, first_head, NUM_KV_HEADS,
                HEAD_DIM, MOST, GROUP, HEADS, BLOCK_HEAD,
            )  # fmt: skip


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    write_slots: Tensor,
    kv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv_scales: Tensor | None,
    norms_v: bool,
    smoothing: Tensor | None,
) -> Tensor:
    q, k, v = (_with_heads_together(heads) for heads in (q, k, v))
    assert kv.is_contiguous() and not norms_v
    assert all(norm is None or norm.is_contiguous() for norm in (q_norm, k_norm))
    assert positions.is_contiguous() and write_slots.is_contiguous() and cos_sin.is_contiguous()
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    constants, num_warps = _form(num_heads, num_kv_heads, head_dim, cos_sin.shape[1], kv.shape[3], kv.dtype)
    num_parts = triton.cdiv(num_heads, _HEADS) + 2 * triton.cdiv(num_kv_heads, _HEADS)
    _rope_and_cache[(num_tokens, num_parts)](
        q,
        k,
        v,
        cos_sin,
        positions,
        write_slots,
        kv,
        cos_sin if kv_scales is None else kv_scales,
        out,
        q if q_norm is None else q_norm,
        k if k_norm is None else k_norm,
        cos_sin if smoothing is None else smoothing,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        eps,
        **constants,
        NUM_SHARING=0 if smoothing is None else num_heads // smoothing.shape[1],
        HAS_NORM=q_norm is not None,
        **dependent_options(),
        num_warps=num_warps,
    )
    return out


def _with_heads_together(heads: Tensor) -> Tensor:
    """[T, H, D] with the heads of one token side by side, as a projection's output has them."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


def _form(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, block_size: int, kv_dtype: torch.dtype
) -> tuple[dict[str, float], int]:
    """(constants, warps), with 8 elements of each half a thread: one load of 16 bytes of 16-bit numbers."""
    block_half = triton.next_power_of_2(rotary_dim // 2)
    block_head = triton.next_power_of_2(head_dim)
    constants: dict[str, float] = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": rotary_dim // 2,
        "PAGE": block_size,
        "MOST": KV_FORMATS[kv_dtype].most if kv_dtype in KV_FORMATS else 0.0,
        "GROUP": KV_GROUP,
        "HEADS": _HEADS,
        "BLOCK_HALF": block_half,
        "BLOCK_REST": triton.next_power_of_2(max(1, head_dim - rotary_dim)),
        "BLOCK_HEAD": block_head,
    }
    return constants, max(1, _HEADS * block_head // 512)


_SHAPES = (
    (32, 8, 128, 128, 16),
    (32, 32, 96, 96, 16),
    (24, 2, 128, 64, 16),
    (14, 2, 64, 64, 16),
    (8, 1, 256, 256, 16),
    (4, 4, 80, 20, 64),
)
"""(query heads, KV heads, head size, rotated part of it, block size): Llama 3, Phi 3, GLM 4, Qwen 2, Gemma, Phi 2."""
_DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.float16),
    (torch.float16, torch.float8_e4m3fn),
    (torch.float16, torch.int8),
    (torch.float32, torch.float32),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.int8),
)


def shipped() -> Iterator[Shipped]:
    for shape in _SHAPES:
        for dtype, kv_dtype in _DTYPES if shape == _SHAPES[0] else _DTYPES[:3]:
            for has_norm in (False, True):
                constants, num_warps = _form(*shape, kv_dtype)
                norm_dtype = torch.float32 if shape[2] == 256 else dtype  # Gemma's
                one = Shipped(
                    op="rope_and_cache",
                    config=f"{DTYPES[dtype]} kv {DTYPES[kv_dtype]} {'x'.join(map(str, shape))}{' normed' * has_norm}",
                    kernel=_rope_and_cache,
                    signature={
                        **dict.fromkeys(("q", "k", "v", "out"), f"*{DTYPES[dtype]}"),
                        **dict.fromkeys(("q_norm", "k_norm"), f"*{DTYPES[norm_dtype]}"),
                        **dict.fromkeys(("cos_sin", "smoothing"), "*fp32"),
                        "kv_scales": f"*{DTYPES[KV_SCALE_DTYPE if kv_dtype in KV_FORMATS else torch.float32]}",
                        **dict.fromkeys(("positions", "write_slots"), "*i64"),
                        "kv": f"*{DTYPES[kv_dtype]}",
                        **dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32"),
                        "eps": "fp32",
                    },
                    constants={
                        **constants,
                        "NUM_SHARING": shape[0] // shape[1] if kv_dtype == torch.int8 else 0,
                        "HAS_NORM": has_norm,
                        "IS_DEPENDENT": False,
                    },
                    num_warps=num_warps,
                    is_streaming=dtype != torch.float32,
                    multiples=("q_stride", "k_stride", "v_stride"),
                    min_sm=FP8_MIN_SM if kv_dtype == torch.float8_e4m3fn else 0,
                )
                yield from (one, one.early())
