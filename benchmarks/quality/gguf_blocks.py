"""Packs matrices as GGUF tensors of each type that is read, by the layouts of llama.cpp's ggml-common.h.

Scales are the best of a few, by squared error. llama.cpp searches longer and may weigh inputs by their importance, so
its files lose less. This file shares no code with the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

F32, F16, BF16 = 0, 1, 30
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 2, 3, 6, 7, 8
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4 = 10, 11, 12, 13, 14, 20, 23, 39

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEAST = 1e-9


class Stored(NamedTuple):
    """A tensor as it lies in the file."""

    shape: tuple[int, ...]
    type: int
    data: bytes


Pack = Callable[[Tensor], Stored]


def as_f32(values: Tensor) -> Stored:
    return Stored(tuple(values.shape), F32, values.to(torch.float32).numpy().tobytes())


def as_f16(values: Tensor) -> Stored:
    return Stored(tuple(values.shape), F16, values.to(torch.float16).numpy().tobytes())


def as_bf16(values: Tensor) -> Stored:
    return Stored(tuple(values.shape), BF16, values.to(torch.bfloat16).view(torch.int16).numpy().tobytes())


# -- blocks of 32 ------------------------------------------------------------------------------------------------------


def as_q8_0(values: Tensor) -> Stored:
    blocks = values.to(torch.float32).reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).to(torch.float16)
    q = (blocks / scale.to(torch.float32).clamp(min=_LEAST)).round().clamp(-127, 127).to(torch.int8)
    return _blocks(values, Q8_0, scale, q)


def as_q4_0(values: Tensor) -> Stored:
    q, scale = _centred(values.to(torch.float32).reshape(-1, 32), 8, torch.float16)
    return _blocks(values, Q4_0, scale, _packed_nibbles(q))


def as_q5_0(values: Tensor) -> Stored:
    q, scale = _centred(values.to(torch.float32).reshape(-1, 32), 16, torch.float16)
    return _blocks(values, Q5_0, scale, _fifth_bits(q), _packed_nibbles(q & 15))


def as_q4_1(values: Tensor) -> Stored:
    q, scale, low = _with_minimum(values, 15)
    return _blocks(values, Q4_1, scale, low, _packed_nibbles(q))


def as_q5_1(values: Tensor) -> Stored:
    q, scale, low = _with_minimum(values, 31)
    return _blocks(values, Q5_1, scale, low, _fifth_bits(q), _packed_nibbles(q & 15))


def as_iq4_nl(values: Tensor) -> Stored:
    blocks = values.to(torch.float32).reshape(-1, 32)
    scale = _table_scales(blocks).to(torch.float16)
    return _blocks(values, IQ4_NL, scale.unsqueeze(1), _packed_nibbles(_nearest_in_table(blocks, scale.float())))


def as_mxfp4(values: Tensor) -> Stored:
    """The power of two is that of the largest number, by which it becomes 4 to 8, as the specification has it."""
    blocks = values.to(torch.float32).reshape(-1, 32)
    exponent = blocks.abs().amax(1, keepdim=True).clamp(min=2.0**-120).log2().floor() - 2
    table = torch.tensor(_E2M1_VALUES)
    q = torch.bucketize((blocks / exponent.exp2()).abs(), (table[1:] + table[:-1]) / 2).to(torch.uint8)
    code = (exponent + 127).to(torch.uint8)
    return _blocks(values, MXFP4, code, _packed_nibbles(q | (blocks < 0).to(torch.uint8) << 3))


# -- blocks of 256: a scale of 4, 6 or 8 bits for each group -----------------------------------------------------------


def as_q2_k(values: Tensor) -> Stored:
    x = values.to(torch.float32).reshape(-1, 16, 16)
    q, scales, minimums, d, d_minimum = _in_k_groups(x, 3, 15)
    return _blocks(values, Q2_K, scales | (minimums << 4), _packed_pairs(q), d, d_minimum)


def as_q3_k(values: Tensor) -> Stored:
    x = values.to(torch.float32).reshape(-1, 16, 16)
    scales, d = _signed_scales(_centred_scales(x, 4), 32)
    q = _rounded(x, d.float() * scales, -4, 3).to(torch.int8).add(4).to(torch.uint8)
    bits = (q >> 2).reshape(-1, 8, 32) << torch.arange(8, dtype=torch.uint8)[:, None]
    whole = (scales + 32).to(torch.uint8)
    high = (whole >> 4).reshape(-1, 4, 4) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    packed = torch.cat([(whole[:, :8] & 15) | ((whole[:, 8:] & 15) << 4), high.sum(1, dtype=torch.uint8)], 1)
    return _blocks(values, Q3_K, bits.sum(1, dtype=torch.uint8), _packed_pairs(q & 3), packed, d)


def as_q4_k(values: Tensor) -> Stored:
    q, scales, minimums, d, d_minimum = _in_k_groups(values.to(torch.float32).reshape(-1, 8, 32), 15, 63)
    return _blocks(values, Q4_K, d, d_minimum, _six_bits(scales, minimums), _pairs_of_groups(q))


def as_q5_k(values: Tensor) -> Stored:
    q, scales, minimums, d, d_minimum = _in_k_groups(values.to(torch.float32).reshape(-1, 8, 32), 31, 63)
    fifth = ((q >> 4) << torch.arange(8, dtype=torch.uint8)[:, None]).sum(1, dtype=torch.uint8)
    return _blocks(values, Q5_K, d, d_minimum, _six_bits(scales, minimums), fifth, _pairs_of_groups(q & 15))


def as_q6_k(values: Tensor) -> Stored:
    x = values.to(torch.float32).reshape(-1, 16, 16)
    scales, d = _signed_scales(_centred_scales(x, 32), 128)
    q = _rounded(x, d.float() * scales, -32, 31).to(torch.int8).flatten(1) + 32
    low, high = (q & 15).view(torch.uint8).reshape(-1, 2, 2, 64), (q >> 4).view(torch.uint8).reshape(-1, 2, 4, 32)
    numbers = (low[:, :, 0] | (low[:, :, 1] << 4)).flatten(1)
    above = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    return _blocks(values, Q6_K, numbers, above.flatten(1), scales, d)


def as_iq4_xs(values: Tensor) -> Stored:
    x = values.to(torch.float32).reshape(-1, 8, 32)
    scales, d = _signed_scales(_table_scales(x.flatten(0, 1)).view(-1, 8), 32)
    q = _nearest_in_table(x, d.float() * scales)
    whole = (scales + 32).to(torch.uint8)
    high = ((whole.to(torch.int32) >> 4) << torch.arange(0, 16, 2)).sum(1, keepdim=True).to(torch.int16)
    low = (whole[:, ::2] & 15) | ((whole[:, 1::2] & 15) << 4)
    return _blocks(values, IQ4_XS, d, high, low, (q[:, :, :16] | (q[:, :, 16:] << 4)).flatten(1))


PACKS: Mapping[str, Pack] = {
    "F32": as_f32, "F16": as_f16, "BF16": as_bf16, "Q8_0": as_q8_0, "Q6_K": as_q6_k, "Q5_K": as_q5_k, "Q5_1": as_q5_1,
    "Q5_0": as_q5_0, "Q4_K": as_q4_k, "Q4_1": as_q4_1, "Q4_0": as_q4_0, "IQ4_NL": as_iq4_nl, "IQ4_XS": as_iq4_xs,
    "MXFP4": as_mxfp4, "Q3_K": as_q3_k, "Q2_K": as_q2_k,
}  # fmt: skip
"""A writer for each type."""


# -- scales ------------------------------------------------------------------------------------------------------------


def _centred_scales(x: Tensor, half: int) -> Tensor:
    """x [..., n] -> scales [...]: the one of some that rounds x to -half .. half - 1 with the least error."""
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1)
    tries = [extreme / -(half - step / 4 * max(1, half / 16)) for step in (-2, 0, 2, 4)]
    return _best(tries, lambda scale: _rounded(x, scale, -half, half - 1) * scale.unsqueeze(-1) - x)


def _centred(x: Tensor, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(q in 0 .. 2 half - 1, scales [n, 1]) of blocks [n, 32]: x is about scale * (q - half)."""
    scale = _centred_scales(x, half).to(dtype)
    return (_rounded(x, scale.float(), -half, half - 1) + half).to(torch.uint8), scale.unsqueeze(1)


def _with_minimum(values: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q in 0 .. most, scales [n, 1] fp16, minimums [n, 1] fp16) of blocks of 32."""
    blocks = values.to(torch.float32).reshape(-1, 32)
    low = blocks.amin(1, keepdim=True).to(torch.float16)
    scale = ((blocks.amax(1, keepdim=True) - low) / most).to(torch.float16)
    q = ((blocks - low) / scale.to(torch.float32).clamp(min=_LEAST)).round().clamp(0, most)
    return q.to(torch.uint8), scale, low


def _in_k_groups(x: Tensor, most: int, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q in 0 .. most, scales and minimums in 0 .. top, their scales fp16 [n, 1]) of x [n, groups, size]."""
    low, high = x.amin(2).clamp(max=0), x.amax(2).clamp(min=0)
    pairs = [(low * below, high * above) for below in (1, 0.85) for above in (1, 0.85)]

    def error(pair: Tensor) -> Tensor:
        scale, least = (pair[1] - pair[0]).clamp(min=_LEAST) / most, pair[0]
        return (_rounded(x - least.unsqueeze(2), scale, 0, most) * scale.unsqueeze(2)) + least.unsqueeze(2) - x

    low, high = _best([torch.stack(pair) for pair in pairs], error)
    scale, minimum = (high - low).clamp(min=_LEAST) / most, -low
    d, d_minimum = ((part.amax(1, keepdim=True) / top).to(torch.float16) for part in (scale, minimum))
    scales = (scale / d.float().clamp(min=_LEAST)).round().clamp(1, top).to(torch.uint8)
    minimums = (minimum / d_minimum.float().clamp(min=_LEAST)).round().clamp(0, top).to(torch.uint8)
    q = _rounded(x + (d_minimum.float() * minimums).unsqueeze(2), d.float() * scales, 0, most)
    return q.to(torch.uint8), scales, minimums, d, d_minimum


def _signed_scales(scales: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """(scales [n, groups] as int8 in -half .. half - 1, their scale fp16 [n, 1])."""
    extreme = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    d = (extreme / -half).to(torch.float16)
    q = (scales / _nonzero(d.float())).round().clamp(-half, half - 1)
    return torch.where((q == 0) & (scales != 0), 1, q).to(torch.int8), d


def _table_scales(x: Tensor) -> Tensor:
    """x [n, 32] -> scales [n] of the table's values."""
    extreme = x.gather(1, x.abs().argmax(1, keepdim=True)).squeeze(1)
    tries = [extreme / number for number in (-127, -116, 113, 104)]
    return _best(tries, lambda scale: _from_table(_nearest_in_table(x, scale)) * scale.unsqueeze(1) - x)


def _nearest_in_table(x: Tensor, scale: Tensor) -> Tensor:
    table = torch.tensor(_IQ4_VALUES, dtype=torch.float32)
    return torch.bucketize(x / _nonzero(scale).unsqueeze(-1), (table[1:] + table[:-1]) / 2).to(torch.uint8)


def _from_table(q: Tensor) -> Tensor:
    return torch.tensor(_IQ4_VALUES, dtype=torch.float32)[q.long()]


def _best(tries: list[Tensor], error: Callable[[Tensor], Tensor]) -> Tensor:
    """For each group the try with the least squared error. `error` gives errors [..., size]."""
    best, least = tries[0], error(tries[0]).square().sum(-1)
    for tried in tries[1:]:
        found = error(tried).square().sum(-1)
        best, least = torch.where(found < least, tried, best), torch.minimum(found, least)
    return best


def _rounded(x: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """x [..., size] in units of scale [...]."""
    return (x / _nonzero(scale).unsqueeze(-1)).round().clamp(least, most)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1, scale)


# -- bits --------------------------------------------------------------------------------------------------------------


def _packed_nibbles(q: Tensor) -> Tensor:
    return q[:, :16] | (q[:, 16:] << 4)


def _fifth_bits(q: Tensor) -> Tensor:
    """[n, 32] in 0 .. 31 -> [n, 4]: bit i is the fifth bit of value i."""
    return ((q >> 4).reshape(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)).sum(2, dtype=torch.uint8)


def _packed_pairs(q: Tensor) -> Tensor:
    """256 numbers of 2 bits as 64 bytes: byte l of each half holds the values l, l + 32, l + 64 and l + 96."""
    quarters = q.reshape(-1, 2, 4, 32) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return quarters.sum(2, dtype=torch.uint8).flatten(1)


def _pairs_of_groups(q: Tensor) -> Tensor:
    """[n, 8, 32] in 0 .. 15 -> [n, 128]: two groups share their bytes."""
    pairs = q.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)


def _six_bits(scales: Tensor, minimums: Tensor) -> Tensor:
    """8 scales and 8 minimums of 6 bits as 12 bytes."""
    return torch.cat(
        [
            scales[:, :4] | ((scales[:, 4:] >> 4) << 6),
            minimums[:, :4] | ((minimums[:, 4:] >> 4) << 6),
            (scales[:, 4:] & 15) | ((minimums[:, 4:] & 15) << 4),
        ],
        1,
    )


def _blocks(values: Tensor, kind: int, *parts: Tensor) -> Stored:
    whole = torch.cat([part.contiguous().view(torch.uint8).flatten(1) for part in parts], 1)
    return Stored(tuple(values.shape), kind, whole.numpy().tobytes())
