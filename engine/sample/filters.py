"""Temperature, and what is cut from the tail of the distribution after it: top-k, then top-p, then min-p.

Each cut is a threshold on a row's own values, so tokens that tie at the border stay together, and a row's bits do not
depend on the rows beside it. Rows that ask for nothing are not touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.kernels.gpu import from_host
from inferd.kernels.top_k_top_p import MAX_VOCAB, Cuts, top_k_top_p

LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""One too small for fp32 would be 0, and 0 / 0 no number; the smallest there is draws the greedy token."""


def temper(logits: Tensor, temperatures: Tensor) -> Tensor:
    """(logits - the row's largest) / temperature, [R, V]; the difference first, so that no temperature overflows."""
    floored = temperatures.clamp_min(LEAST_TEMPERATURE)
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(floored[:, None])


def cut(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to -inf, in place, what each row's parameters exclude. scores [R, V], tempered."""
    if any(asks_for_cut(row_params) for row_params in params):
        top_k_top_p(scores, cuts_of(params, scores.device))


def asks_for_cut(params: SamplingParams) -> bool:
    """Whether `cut` could exclude a token."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def cuts_of(params: Sequence[SamplingParams], device: torch.device) -> Cuts:
    """What each of them asks for, in one copy to the device."""
    top_k = torch.tensor([min(row.top_k, MAX_VOCAB) for row in params])
    top_p = torch.tensor([row.top_p for row in params], dtype=torch.float64)
    log_min_p = [math.log(row.min_p) if row.min_p else -math.inf for row in params]
    floors = torch.tensor(log_min_p, dtype=torch.float64)
    rows = torch.stack([top_k, top_p.view(torch.int64), floors.view(torch.int64)])
    # Kernels are compiled by whether an address is a multiple of 16: of two numbers, whatever their number.
    packed = from_host(torch.nn.functional.pad(rows, (0, len(params) % 2)), device)[:, : len(params)]
    return Cuts(packed[0], packed[1].view(torch.float64), packed[2].view(torch.float64))
