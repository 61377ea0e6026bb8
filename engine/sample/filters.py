"""Temperature, then the filters that cut the tail of the distribution: top-k, top-p, min-p, in this order.

Each filter is a threshold on a row's own values. So tokens that tie at the threshold are kept or cut together, and a
row's bits do not depend on other rows. Rows without filters are not touched.
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
"""A temperature too small for fp32 would become 0, and 0 / 0 is NaN. The least fp32 number draws the greedy token."""


def apply_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """(logits - the row's largest) / temperature, [R, V]. Subtracting first keeps small temperatures from overflow."""
    floored = temperatures.clamp_min(LEAST_TEMPERATURE)
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(floored[:, None])


def cut(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the tokens that each row's filters exclude to -inf, in place. scores [R, V], after temperature."""
    if any(asks_for_cut(row_params) for row_params in params):
        top_k_top_p(scores, cuts_of(params, scores.device))


def asks_for_cut(params: SamplingParams) -> bool:
    """Whether `cut` could exclude a token."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def cuts_of(params: Sequence[SamplingParams], device: torch.device) -> Cuts:
    """The filters of each row on the device, moved there in one copy."""
    top_k = torch.tensor([min(row.top_k, MAX_VOCAB) for row in params])
    top_p = torch.tensor([row.top_p for row in params], dtype=torch.float64)
    log_min_p = [math.log(row.min_p) if row.min_p else -math.inf for row in params]
    floors = torch.tensor(log_min_p, dtype=torch.float64)
    rows = torch.stack([top_k, top_p.view(torch.int64), floors.view(torch.int64)])
    # Triton compiles a kernel anew if an address is no longer a multiple of 16 (two numbers): pad to an even count.
    packed = from_host(torch.nn.functional.pad(rows, (0, len(params) % 2)), device)[:, : len(params)]
    return Cuts(packed[0], packed[1].view(torch.float64), packed[2].view(torch.float64))
