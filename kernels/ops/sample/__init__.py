"""Draws a token: argmax of score + Gumbel noise, which is a draw from softmax(scores) (Gumbel-max).

A token's noise is a pure function of (seed, position, token id), so a draw depends on its own row alone. If a row is
filtered or biased, the tokens that stay keep their noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.sample.philox import NOISE_MAX, gumbel_noise
from inferd.kernels.registry import Deferred, Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    vocab_size: int


_FLAT_MAX = 1 << 14
"""Up to so many candidates are one call over (row, token) pairs. More take a call per row, whose key is a scalar and
not an array: 5 ms instead of 12 ms for a row of 152 k (Zen 4)."""


def reference(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Exact: a token is skipped only if its score + the largest noise is below the total of the leader."""
    num_rows, vocab_size = scores.shape
    leader_scores, leader_ids = scores.max(dim=-1)
    bar = leader_scores + gumbel_noise(seeds, positions, leader_ids)
    can_win = (scores + NOISE_MAX >= bar[:, None]) & (scores > float("-inf"))
    rows, token_ids = can_win.nonzero(as_tuple=True)
    if len(rows) <= _FLAT_MAX:
        noise = gumbel_noise(seeds[rows], positions[rows], token_ids)
    else:
        by_row = torch.split(token_ids, can_win.sum(dim=-1).tolist())
        noise = torch.cat([gumbel_noise(seeds[row], positions[row], row_ids) for row, row_ids in enumerate(by_row)])
    totals = scores[rows, token_ids] + noise
    best = scores.new_full((num_rows,), float("-inf")).scatter_reduce_(0, rows, totals, "amax")
    is_best = totals == best[rows]
    winners = token_ids.new_full((num_rows,), vocab_size)
    winners.scatter_reduce_(0, rows[is_best], token_ids[is_best], "amin")
    return torch.where(winners < vocab_size, winners, 0)


def cpp(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    assert seeds.dtype == positions.dtype == torch.int64, f"int64 is read, not {seeds.dtype} and {positions.dtype}"
    assert scores.shape[1] > 0, "a row needs a token"
    scores, seeds, positions = scores.contiguous(), seeds.contiguous(), positions.contiguous()
    ids = torch.empty_like(seeds)
    native.function("inferd_sample")(
        scores.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        ids.data_ptr(),
        scores.shape[0],
        scores.shape[1],
        torch.get_num_threads(),
    )
    return ids


def noise_and_bound(bits: Tensor) -> tuple[Tensor, Tensor]:
    """The noise of 24-bit integers [N] int32, N a multiple of 16, and the bound that rules tokens out; fp32 [N]. For
    tests."""
    assert bits.dtype == torch.int32 and bits.is_contiguous() and len(bits) % 16 == 0
    noise, bound = torch.empty(2, len(bits)).unbind()
    native.function("inferd_sample_noise")(bits.data_ptr(), noise.data_ptr(), bound.data_ptr(), len(bits))
    return noise, bound


SAMPLE: Op[Key, Callable[[Tensor, Tensor, Tensor], Tensor]] = Op(
    "sample",
    [
        Implementation("cpp", cpp, lambda key: native.refuses(key.device_type, torch.float32)),
        Implementation("triton", Deferred(f"{__name__}.triton", "sample"), lambda key: gpu.refuses(key.device_type)),
        Implementation("reference", reference, always),
    ],
)


def sample(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One id per row, [R] int64: argmax over tokens of score + noise, both fp32, ties to the lowest id.

    scores [R, V] fp32, -inf for tokens that must not be drawn; seeds [R] int64, >= 0; positions [R] int64, >= 0, the
    absolute position of the token to draw. A row that holds NaN, or nothing but -inf, gives an arbitrary id.
    """
    assert scores.dtype == torch.float32 and seeds.shape == positions.shape == scores.shape[:1]
    return SAMPLE.resolve(Key(scores.device.type, scores.shape[1]))(scores, seeds, positions)
