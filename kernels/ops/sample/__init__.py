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
from inferd.kernels.ops.sample import cpu, reference
from inferd.kernels.registry import Deferred, Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    vocab_size: int


SAMPLE: Op[Key, Callable[[Tensor, Tensor, Tensor], Tensor]] = Op(
    "sample",
    [
        Implementation("cpp", cpu.sample, lambda key: native.refuses(key.device_type, torch.float32)),
        Implementation("triton", Deferred(f"{__name__}.triton", "sample"), lambda key: gpu.refuses(key.device_type)),
        Implementation("reference", reference.sample, always),
    ],
)


def sample(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One id per row, [R] int64: argmax over tokens of score + noise, both fp32, ties to the lowest id.

    scores [R, V] fp32, -inf for tokens that must not be drawn; seeds [R] int64, >= 0; positions [R] int64, >= 0, the
    absolute position of the token to draw. A row that holds NaN, or nothing but -inf, gives an arbitrary id.
    """
    assert scores.dtype == torch.float32 and seeds.shape == positions.shape == scores.shape[:1]
    return SAMPLE.resolve(Key(scores.device.type, scores.shape[1]))(scores, seeds, positions)
