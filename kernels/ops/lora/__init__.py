"""y += scale * B (A x) in place, for rows of several LoRA adapters in one step (Hu et al. 2021, arXiv:2106.09685).

A leads from the inputs to a few numbers, the rank, and B from there to the outputs. A matrix of ours may hold several
of the model's, its parts, which have an A and a B each. A row without an adapter keeps its bits, and so does a part
that its adapter leaves alone.

Products are summed in fp32, in an order that other rows do not change, and y is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.ops.lora import cpu, reference
from inferd.kernels.ops.lora.weights import LoraWeights
from inferd.kernels.registry import Deferred, Implementation, Op, always

__all__ = ["LoraWeights", "add_lora"]


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    weight_dtype: torch.dtype


def _refuses_triton(key: Key) -> str | None:
    if key.weight_dtype != key.dtype:
        return f"multiplies {key.dtype} by weights of the same dtype, not by {key.weight_dtype}"
    return gpu.refuses(key.device_type, key.dtype)


LORA: Op[Key, Callable[[Tensor, Tensor, LoraWeights, Tensor, Tensor], None]] = Op(
    "lora",
    [
        Implementation("cpp", cpu.add_lora, lambda key: cpu.refuses(*key)),
        Implementation("triton", Deferred(f"{__name__}.triton", "add_lora"), _refuses_triton),
        Implementation("reference", reference.add_lora, always),
    ],
)


def add_lora(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor, adapters: Tensor) -> None:
    """Add to y what the rows' adapters give for x.

    y [T, out], contiguous, and x [T, in] in one dtype; slots [T] int64, the slot of each row's request, negative for
    padding; adapters [S] int64, the adapter of each slot, negative for none.
    """
    assert y.shape[0] == x.shape[0] == slots.shape[0] and y.dtype == x.dtype
    assert y.is_contiguous() and slots.is_contiguous() and adapters.is_contiguous()
    assert slots.dtype == adapters.dtype == torch.int64
    LORA.resolve(Key(y.device.type, y.dtype, weights.down.dtype))(y, x, weights, slots, adapters)
