"""Top-k, top-p and min-p: cut each row of tempered scores in place. The three thresholds are found on a row's own
values, without sorting the vocabulary.

The nucleus is defined in whole numbers, so a sum is the same in any order. A token weighs e^score in units of 2^-42,
rounded down. Every implementation computes it by the same sequence of rounded operations (`weights.py`), so decisions
are equal bit for bit on every device. A token below e^-29 of the likeliest weighs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.top_k_top_p import cpu, reference
from inferd.kernels.registry import Deferred, Implementation, Op, always

MAX_VOCAB = 1 << 20
"""Most tokens whose weights, up to 2^42 each, add up below 2^63."""


class Cuts(NamedTuple):
    """The cuts of S rows, or slots, on the device."""

    top_k: Tensor
    """[S] int64, >= 0: the k largest stay, and ties with the last of them. 0, or V and more: no cut."""
    top_p: Tensor
    """[S] fp64: of those, the largest whose share of the mass reaches top_p stay, and ties. 1 or more: no cut."""
    log_min_p: Tensor
    """[S] fp64: log(min_p), the lowest score that stays, rounded to fp32. -inf: no cut."""


class Key(NamedTuple):
    device_type: str
    vocab_size: int


CutTail = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]

TOP_K_TOP_P: Op[Key, CutTail] = Op(
    "top_k_top_p",
    [
        Implementation("cpp", cpu.top_k_top_p, lambda key: native.refuses(key.device_type, torch.float32)),
        Implementation(
            "triton", Deferred(f"{__name__}.triton", "top_k_top_p"), lambda key: gpu.refuses(key.device_type)
        ),
        Implementation("reference", reference.top_k_top_p, always),
    ],
)


def top_k_top_p(scores: Tensor, cuts: Cuts, slots: Tensor | None = None) -> None:
    """Set the scores that each row's cuts exclude to -inf, in place. A row without cuts is unchanged.

    scores [R, V] fp32, rows contiguous, tempered: the largest of each is 0. In a row that holds NaN any score may be
    cut. Row r takes the cuts at `slots[r]` (int64 [R]), or none if that is negative; without `slots`, those at r.
    """
    assert scores.dtype == torch.float32 and scores.is_contiguous() and scores.shape[1] <= MAX_VOCAB
    assert cuts.top_k.dtype == torch.int64 and cuts.top_p.dtype == cuts.log_min_p.dtype == torch.float64
    assert all(of_slots.is_contiguous() for of_slots in cuts)
    assert len(cuts.top_k) == len(scores) if slots is None else slots.shape == scores.shape[:1]
    TOP_K_TOP_P.resolve(Key(scores.device.type, scores.shape[1]))(scores, *cuts, slots)
