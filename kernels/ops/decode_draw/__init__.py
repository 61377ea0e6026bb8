"""The next token of rows that ask for at most a temperature, top-k, top-p and min-p, computed from data on the device
alone. It is the last part of a decode step in a CUDA graph.

A row's options are looked up by its slot, so one graph serves any requests in the slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.ops.argmax import argmax
from inferd.kernels.ops.sample import sample
from inferd.kernels.ops.top_k_top_p import MAX_VOCAB, Cuts, top_k_top_p
from inferd.kernels.registry import Deferred, Implementation, Op, always

_ANY = torch.finfo(torch.float32).tiny


class Key(NamedTuple):
    device_type: str
    vocab_size: int


def reference(
    logits: Tensor,
    slots: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute greedy and sampled tokens for all rows, then pick one for each row."""
    sources = slots.clamp(min=0)
    asked = temperatures[sources].masked_fill_(slots < 0, 0.0)
    token_ids, is_none = argmax(logits)
    scores = (logits - logits.amax(dim=-1, keepdim=True)).div_(asked.clamp(min=_ANY)[:, None])
    scores = scores.contiguous()
    top_k_top_p(scores, Cuts(top_k, top_p, log_min_p), slots.masked_fill(asked == 0.0, -1))
    return torch.where(asked > 0.0, sample(scores, seeds[sources], positions), token_ids), is_none


Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

DRAW: Op[Key, Draw] = Op(
    "decode_draw",
    [
        Implementation("triton", Deferred(f"{__name__}.triton", "draw"), lambda key: gpu.refuses(key.device_type)),
        Implementation("reference", reference, always),
    ],
)


def draw(
    logits: Tensor, slots: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, cuts: Cuts
) -> tuple[Tensor, Tensor]:
    """(ids [R] int64, is_none [R] bool). A row with temperature 0 gets the id of `argmax`; any other row gets the id
    that `sample` draws from what `top_k_top_p` leaves of (logits - the row's largest) / temperature.

    logits [R, V] fp32; slots [R] int64, negative for padding rows; temperatures [S] fp32 by slot, 0 or a normal number;
    seeds [S] int64 and cuts by slot; positions [R] int64 of the tokens to draw. `is_none` is set if the row holds a NaN
    or +inf, or nothing above -inf. Its id is then any below V.
    """
    assert logits.dtype == temperatures.dtype == torch.float32 and slots.shape == positions.shape == logits.shape[:1]
    assert slots.dtype == seeds.dtype == positions.dtype == torch.int64 and logits.shape[1] <= MAX_VOCAB
    assert all(of_slots.shape == temperatures.shape and of_slots.is_contiguous() for of_slots in (seeds, *cuts))
    run = DRAW.resolve(Key(logits.device.type, logits.shape[1]))
    return run(logits, slots, temperatures, seeds, positions, *cuts)
