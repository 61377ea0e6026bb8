"""What top-k, top-p and min-p leave of each row of tempered scores, in place: three thresholds on a row's own values,
found without sorting the vocabulary.

The nucleus is defined in whole numbers, so that a sum is the same in any order: a token weighs e^score in units of
2^-42, rounded down, by one sequence of rounded operations (`weights.py`) that every implementation makes. Decisions
are then equal bit for bit on every device. A token below e^-29 of the likeliest weighs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu, native
from inferd.kernels.registry import Deferred, Implementation, Op, always
from inferd.kernels.top_k_top_p import cpu, reference

MAX_VOCAB = 1 << 20
"""Weights of as many tokens, 2^42 each, add up below 2^63."""


class Cuts(NamedTuple):
    """What S rows, or slots, ask for, on the device."""

    top_k: Tensor
    """[S] int64, >= 0: the k largest stay, and what ties with the last of them; 0, or all there are: no cut."""
    top_p: Tensor
    """[S] fp64: of those, the largest that bring their share of the mass to top_p, and ties; 1 or more: no cut."""
    log_min_p: Tensor
    """[S] fp64: log(min_p), the lowest score that stays, as fp32 has it; -inf: no cut."""


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
    """Set to -inf, in place, what each row's cuts exclude; a row that asks for none is left as it is.

    scores [R, V] fp32, rows contiguous, tempered: the largest of each is 0. Of a row that holds NaN any may go. Row r
    asks for what `cuts` holds at `slots[r]` (int64 [R]), for nothing where that is below 0; without `slots`, at r.
    """
    assert scores.dtype == torch.float32 and scores.is_contiguous() and scores.shape[1] <= MAX_VOCAB
    assert cuts.top_k.dtype == torch.int64 and cuts.top_p.dtype == cuts.log_min_p.dtype == torch.float64
    assert all(of_slots.is_contiguous() for of_slots in cuts)
    assert len(cuts.top_k) == len(scores) if slots is None else slots.shape == scores.shape[:1]
    TOP_K_TOP_P.resolve(Key(scores.device.type, scores.shape[1]))(scores, *cuts, slots)
