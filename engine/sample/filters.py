"""Temperature, and what is cut from the tail of the distribution after it: top-k, then top-p, then min-p.

Each cut is a threshold on a row's own values, so tokens that tie at the border stay together, and a row's bits do not
depend on the rows beside it. Rows that ask for nothing are not touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from inferd.engine.api.params import SamplingParams
from inferd.kernels.gpu import from_host

_NEVER = float("-inf")
_FIRST_PREFIX = 64
_PREFIX_GROWTH = 16


def temper(logits: Tensor, temperatures: Tensor) -> Tensor:
    """(logits - the row's largest) / temperature, [R, V]; the difference first, so that no temperature overflows."""
    # A temperature too small for fp32 would be 0, and 0 / 0 no number; the smallest there is draws the greedy token.
    floored = temperatures.clamp_min(torch.finfo(torch.float32).tiny)
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(floored[:, None])


def cut(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to -inf, in place, what each row's parameters exclude. scores [R, V], tempered."""
    vocab_size = scores.shape[1]
    top_k = {row: min(row_params.top_k, vocab_size) for row, row_params in enumerate(params) if row_params.top_k}
    if top_k:
        rows = _index(top_k, scores.device)
        _keep_at_least(scores, rows, _kth_largest(scores[rows], list(top_k.values())))
    top_p = {row: row_params.top_p for row, row_params in enumerate(params) if row_params.top_p < 1.0}
    if top_p:
        masses = torch.tensor(list(top_p.values()), dtype=torch.float64)
        _cut_nucleus(scores, _index(top_p, scores.device), from_host(masses, scores.device))
    min_p = {row: math.log(row_params.min_p) for row, row_params in enumerate(params) if row_params.min_p > 0.0}
    if min_p:
        rows = _index(min_p, scores.device)
        offsets = from_host(torch.tensor(list(min_p.values()), dtype=torch.float32), scores.device)
        _keep_at_least(scores, rows, scores[rows].amax(dim=-1) + offsets)


def _index(rows: Iterable[int], device: torch.device) -> Tensor:
    return from_host(torch.tensor(list(rows)), device)


def _keep_at_least(values: Tensor, rows: Tensor, floors: Tensor) -> None:
    kept = values[rows]
    values[rows] = kept.masked_fill_(kept < floors[:, None], _NEVER)


def _kth_largest(values: Tensor, k: list[int]) -> Tensor:
    """[n]: of each row its k-th largest value."""
    largest = values.topk(max(k), dim=-1).values
    return largest.gather(1, _index(k, values.device)[:, None] - 1)[:, 0]


def _cut_nucleus(scores: Tensor, rows: Tensor, top_p: Tensor) -> None:
    """Keep the most likely tokens up to and with the one that brings their mass to `top_p` (Holtzman et al. 2020)."""
    kept = scores[rows]
    probabilities = kept.softmax(dim=-1)
    floors = _nucleus_floors(probabilities, top_p)
    scores[rows] = kept.masked_fill_(probabilities < floors[:, None], _NEVER)


def _nucleus_floors(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """[n]: the smallest probability in each row's nucleus.

    The running mass is summed from the largest down, in order and in fp64, over a sorted prefix that grows until it
    holds every nucleus: the prefix sums do not depend on how long the prefix is, so neither does the result. To look
    whether it does is to wait for the device, so on an accelerator the prefix is all there is.
    """
    vocab_size = probabilities.shape[1]
    width = min(_FIRST_PREFIX, vocab_size) if probabilities.device.type == "cpu" else vocab_size
    while True:
        largest = probabilities.topk(width, dim=-1).values
        mass = largest.to(torch.float64).cumsum(dim=-1)
        if width == vocab_size or bool((mass[:, -1] >= top_p).all()):
            break
        width = min(width * _PREFIX_GROWTH, vocab_size)
    inside = (mass < top_p[:, None]).sum(dim=-1).clamp_(max=width - 1)
    return largest.gather(1, inside[:, None])[:, 0]
