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
from inferd.kernels.cpu import native
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


def reference(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor, adapters: Tensor) -> None:
    """Row by row, so that other rows cannot change how torch sums."""
    slots_of, panels = slots.tolist(), weights.panels.tolist()
    for row, slot in enumerate(slots_of):
        adapter = int(adapters[slot]) if slot >= 0 else -1
        if adapter < 0:
            continue
        ranks, scales = weights.ranks[adapter].tolist(), weights.scales[adapter].tolist()
        shrunk = [
            (weights.down[adapter, part, :rank].float() * x[row].float()).sum(1) * scale
            for part, (rank, scale) in enumerate(zip(ranks, scales, strict=True))
        ]
        for index, (first, count, part) in enumerate(panels):
            if not ranks[part]:
                continue
            up = weights.up[adapter, index, : ranks[part], :count].float()
            goal = y[row, first : first + count]
            goal.copy_((goal.float() + (up * shrunk[part][:, None]).sum(0)).to(y.dtype))


def _refuses_cpp(key: Key) -> str | None:
    reason = native.refuses(*key)
    if reason is None and key.dtype == torch.bfloat16 and key.weight_dtype != key.dtype:
        return f"multiplies bfloat16 by bfloat16, not by {key.weight_dtype}"
    return reason


def cpp(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor, adapters: Tensor) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    _, num_parts, rank, in_size = weights.down.shape
    shrunk = torch.empty((x.shape[0], num_parts, rank), dtype=torch.float32)
    native.function("inferd_lora")(
        x.data_ptr(),
        y.data_ptr(),
        weights.down.data_ptr(),
        weights.up.data_ptr(),
        weights.panels.data_ptr(),
        weights.ranks.data_ptr(),
        weights.scales.data_ptr(),
        slots.data_ptr(),
        adapters.data_ptr(),
        shrunk.data_ptr(),
        x.shape[0],
        x.stride(0),
        in_size,
        y.shape[1],
        num_parts,
        weights.panels.shape[0],
        rank,
        native.DTYPE_CODES[y.dtype],
        native.DTYPE_CODES[weights.down.dtype],
        torch.get_num_threads(),
    )


LORA: Op[Key, Callable[[Tensor, Tensor, LoraWeights, Tensor, Tensor], None]] = Op(
    "lora",
    [
        Implementation("cpp", cpp, _refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "add_lora"), _refuses_triton),
        Implementation("reference", reference, always),
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
