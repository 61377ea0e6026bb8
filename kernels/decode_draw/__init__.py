"""The next token of rows that ask for nothing but a temperature, greedy ones among them, by what lies on the device
alone: the last part of a decode step that a CUDA graph holds.

What a row asks for is found by its slot, so that one graph serves whoever is in the slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.decode_draw import reference
from inferd.kernels.registry import Deferred, Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    vocab_size: int


DRAW: Op[Key, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = Op(
    "decode_draw",
    [
        Implementation("triton", Deferred(f"{__name__}.triton", "draw"), lambda key: gpu.refuses(key.device_type)),
        Implementation("reference", reference.draw, always),
    ],
)


def draw(
    logits: Tensor, slots: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """(ids [R] int64, is_none [R] bool): of rows whose temperature is 0 what `argmax` gives, of others what `sample`
    gives for (logits - the row's largest) / temperature.

    logits [R, V] fp32; slots [R] int64, negative for rows of no meaning; by slot [S] temperatures fp32, 0 or a normal
    number, and seeds int64; positions [R] int64, of the tokens to be drawn. `is_none` where the row holds a NaN or
    +inf, or nothing above -inf; its id is then any below V.
    """
    assert logits.dtype == temperatures.dtype == torch.float32 and slots.shape == positions.shape == logits.shape[:1]
    assert slots.dtype == seeds.dtype == positions.dtype == torch.int64 and seeds.shape == temperatures.shape
    run = DRAW.resolve(Key(logits.device.type, logits.shape[1]))
    return run(logits, slots, temperatures, seeds, positions)
