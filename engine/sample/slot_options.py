"""Options of drawing by slot, in tensors on the device that keep their addresses, so that a recorded step finds them.

The order in which they apply is the kernels'. Knows no rules, no masks and no logprobs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.kernels.gpu import from_host
from inferd.kernels.top_k_top_p import MAX_VOCAB, Cuts

LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""A temperature too small for fp32 would become 0, which means greedy, and 0 / 0 is NaN. The least fp32 number draws
the greedy token."""


class SlotOptions:
    """Temperature, seed and cuts of `num_slots` requests."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        # Triton compiles a kernel anew if an address is no longer a multiple of 16 (two numbers): pad to an even count.
        width = num_slots + num_slots % 2
        self.temperatures = torch.zeros(width, dtype=torch.float32, device=device)
        """[slots] fp32: 0 or a normal number."""
        self._numbers = torch.zeros((4, width), dtype=torch.int64, device=device)
        self.seeds = self._numbers[0]
        """[slots] int64."""
        self.cuts = _cuts_in(self._numbers[1:])
        """By slot. A greedy slot has none."""

    def admit(self, slot: int, params: SamplingParams) -> None:
        """Fill a slot."""
        temperature = params.temperature
        self.temperatures[slot] = max(temperature, LEAST_TEMPERATURE) if temperature else 0.0
        numbers = torch.tensor((params.seed, *_numbers_of(params)))
        self._numbers[:, slot] = from_host(numbers, self._numbers.device)


def asks_for_cut(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p could exclude a token. A greedy request asks for none: the likeliest stays."""
    return params.temperature > 0.0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def cuts_of(params: Sequence[SamplingParams]) -> Cuts:
    """The cuts of these requests, on the host."""
    return _cuts_in(torch.tensor([_numbers_of(one) for one in params]).T.contiguous())


def _numbers_of(params: SamplingParams) -> tuple[int, int, int]:
    """Top-k, and the bits of top-p and of log(min-p), which are fp64."""
    if not asks_for_cut(params):
        return 0, _bits_of(1.0), _bits_of(-math.inf)
    floor = math.log(params.min_p) if params.min_p else -math.inf
    return min(params.top_k, MAX_VOCAB), _bits_of(params.top_p), _bits_of(floor)


def _bits_of(number: float) -> int:
    bits: int = struct.unpack("=q", struct.pack("=d", number))[0]
    return bits


def _cuts_in(numbers: Tensor) -> Cuts:
    """The cuts in [3, requests] int64."""
    top_k, top_p, log_min_p = numbers.unbind()
    return Cuts(top_k, top_p.view(torch.float64), log_min_p.view(torch.float64))
