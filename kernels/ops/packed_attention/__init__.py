"""Attention within packed sequences, for encoders: each token sees all tokens of its own sequence, before and behind.

Sequences follow one another without padding. A window may hide distant tokens, and each head may add a bias to scores
by the distance from query to key, or by the pair of both. A sequence's result depends on that sequence alone, bit for
bit.

The floor is arithmetic: a sequence of n tokens takes 4 n^2 H D operations. Against torch's own attention on padded
batches of one length, the C++ kernel is 1.1 to 4.4 times as fast in float32, and 2.0 to 3.9 times in bfloat16: 16, 128
and 512 tokens, 12 heads of 32 and 16 heads of 64. At 512 tokens it does 0.6 to 0.7 of the operations a second of
`linear` (2 cores of an AMD EPYC, Zen 4, 2026-12-01).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.registry import Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    head_dim: int


Run = Callable[[Tensor, Tensor, Tensor, Tensor, float, int | None, Tensor | None, Tensor | None], Tensor]
VECTOR = 16
"""Row length of biases by pairs is a multiple of this."""


def cpp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    scale: float,
    window: int | None,
    bias: Tensor | None,
    pairs: Tensor | None,
) -> Tensor:
    q, k, v = (one if one.stride()[1:] == (one.shape[2], 1) else one.contiguous() for one in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype)
    native.function("inferd_packed_attention")(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        starts.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if pairs is None else pairs.data_ptr(),
        len(starts) - 1,
        q.shape[1],
        k.shape[1],
        q.shape[2],
        q.stride(0),
        k.stride(0),
        v.stride(0),
        0 if bias is None else bias.shape[1] // 2,
        0 if pairs is None else pairs.shape[2],
        window or 0,
        scale,
        native.DTYPE_CODES[q.dtype],
        torch.get_num_threads(),
    )
    return out


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    scale: float,
    window: int | None,
    bias: Tensor | None,
    pairs: Tensor | None,
) -> Tensor:
    """Sequence by sequence in fp32: shapes of products, and so the order of their sums, are those of one sequence."""
    out, bounds = torch.empty(q.shape, dtype=q.dtype, device=q.device), starts.tolist()
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
    for start, end in pairwise(bounds):
        wide = [one[start:end].to(torch.float32).transpose(0, 1).contiguous() for one in (q, k, v)]
        scores = (wide[0] @ wide[1].transpose(1, 2)).mul_(scale)
        positions = torch.arange(end - start, device=q.device)
        distances = positions - positions[:, None]
        if bias is not None:
            reach = bias.shape[1] // 2
            scores += bias[:, distances.clamp(-reach, reach) + reach]
        if pairs is not None:
            scores += pairs[:, :, : end - start]
        if window is not None:
            scores.masked_fill_(distances.abs() > window, float("-inf"))
        out[start:end] = (scores.softmax(-1) @ wide[2]).transpose(0, 1).to(q.dtype)
    return out


def _refuses_cpp(key: Key) -> str | None:
    if key.head_dim % 2:
        return f"takes heads of an even size, not {key.head_dim}"
    return native.refuses(key.device_type, key.dtype)


PACKED_ATTENTION: Op[Key, Run] = Op(
    "packed_attention",
    [
        Implementation("cpp", cpp, _refuses_cpp),
        Implementation("reference", reference, always),
    ],
)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
    pairs: Tensor | None = None,
) -> Tensor:
    """Attend each query to the keys of its own sequence: [T, H, D] in q's dtype, contiguous.

    q [T, H, D] and k, v [T, G, D] of one dtype, whose tokens may lie apart, as in [T, 3, H, D]. H / G consecutive heads
    of q read one head of k and v. starts [sequences + 1] int32: a
    sequence's first token, and at the end T. A sequence may be empty. `scale` is above 0. With a `window` w >= 1 a
    query sees the keys that are at most w tokens away.

    `bias` [H, 2 r + 1] fp32, contiguous: each head's number to be added to scaled scores, by the distance from query to
    key from -r to r. Distances beyond have the bias of the nearest of those.

    `pairs` [H, T, S] fp32, contiguous: the number to be added to the scaled score of each head, query and key of the
    one sequence that there is. S is the smallest multiple of `VECTOR` from T on; what is behind T is not read.
    """
    assert q.shape[::2] == k.shape[::2] and k.shape == v.shape and q.dtype == k.dtype == v.dtype
    assert q.shape[1] % k.shape[1] == 0
    assert starts.dtype == torch.int32 and starts.is_contiguous() and scale > 0
    assert window is None or window >= 1
    if bias is not None:
        assert bias.dtype == torch.float32 and bias.is_contiguous()
        assert bias.shape[0] == q.shape[1] and bias.shape[1] % 2 == 1
    if pairs is not None:
        assert bias is None and len(starts) == 2 and pairs.dtype == torch.float32 and pairs.is_contiguous()
        assert pairs.shape == (q.shape[1], len(q), -(-len(q) // VECTOR) * VECTOR)
    run = PACKED_ATTENTION.resolve(Key(q.device.type, q.dtype, q.shape[2]))
    return run(q, k, v, starts, scale, window, bias, pairs)
