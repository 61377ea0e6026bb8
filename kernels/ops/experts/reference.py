"""Mixture of experts in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Router(NamedTuple):
    """How the experts of a row, and their weights, follow from its logits.

    A row has a score for each expert: a softmax of its logits, or their sigmoids. It goes to the experts with the
    largest scores. A bias decides about that alone: it is added to the scores that are compared, not to the weights.
    """

    num_chosen: int
    normalizes: bool
    """Whether the weights of a row's experts are divided by their sum."""
    has_sigmoid: bool = False
    num_groups: int = 1
    """Number of equal groups of experts that follow one another."""
    num_chosen_groups: int = 1
    """Number of groups that a row's experts are from: those whose two largest scores have the largest sums."""
    factor: float = 1.0
    """Factor of the weights."""
    added: float = 0.0
    """Number added to the sum that weights are divided by."""

    def compares_scores(self, bias: Tensor | None) -> bool:
        """Whether experts are compared by their scores. Otherwise it is by logits, which have the same order."""
        return bias is not None or self.num_groups > 1


class Routing(NamedTuple):
    """The experts of T rows, K of them for each, as pairs sorted by expert."""

    weights: Tensor
    """[T, K] fp32: weights of a row's experts, the largest first."""
    places: Tensor
    """[T, K] int32: the place of each of these pairs in the sorted order."""
    rows: Tensor
    """[T * K] int32: the row of each sorted pair."""
    offsets: Tensor
    """[experts + 1] int32: the place of each expert's first pair, and the number of pairs."""


def route(logits: Tensor, router: Router, bias: Tensor | None, loads: Tensor, scales: Tensor | None) -> Routing:
    num_experts, num_chosen = logits.shape[1], router.num_chosen
    scores, total = _scores(logits, router.has_sigmoid)
    compared = logits
    if router.compares_scores(bias):
        scores, total = scores / total, torch.ones_like(total)
        compared = _of_chosen_groups(scores if bias is None else scores + bias, router)
    chosen = compared.sort(dim=1, descending=True, stable=True)[1][:, :num_chosen]
    own = scores.gather(1, chosen)
    weights = own / (_sum_in_order(own) + router.added if router.normalizes else total)
    weights = weights * router.factor if scales is None else weights * router.factor * scales[chosen]
    experts = chosen.flatten()
    order = experts.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = (experts[:, None] == torch.arange(num_experts, device=logits.device)).sum(0)
    loads += counts
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Routing(
        weights,
        places.reshape(-1, num_chosen).to(torch.int32),
        (order // num_chosen).to(torch.int32),
        offsets.to(torch.int32),
    )


def _scores(logits: Tensor, has_sigmoid: bool) -> tuple[Tensor, Tensor]:
    """[T, experts] and [T, 1]: a score is the former divided by the latter."""
    if has_sigmoid:
        return 1.0 / (1.0 + torch.neg(logits).exp()), torch.ones_like(logits[:, :1])
    powers = (logits - logits.amax(1, keepdim=True)).exp()
    return powers, _sum_in_order(powers)


def _of_chosen_groups(compared: Tensor, router: Router) -> Tensor:
    """[T, experts]: the same numbers, and -inf for experts of other groups."""
    if router.num_groups == 1:
        return compared
    groups = compared.view(len(compared), router.num_groups, -1)
    largest, second = groups.topk(2, dim=2)[0].unbind(2)
    chosen = (largest + second).sort(dim=1, descending=True, stable=True)[1][:, : router.num_chosen_groups]
    is_chosen = torch.zeros_like(largest, dtype=torch.bool).scatter_(1, chosen, value=True)
    return groups.masked_fill(~is_chosen.unsqueeze(2), -torch.inf).flatten(1)


def _sum_in_order(values: Tensor) -> Tensor:
    """[T, n] -> [T, 1]. torch splits a sum over a row by the number of rows."""
    total = torch.zeros_like(values[:, :1])
    for column in torch.split(values, 1, 1):
        total = total + column
    return total


def bind(
    linears: Sequence[Callable[[Tensor], Tensor]], dtype: torch.dtype
) -> Callable[[Tensor, Routing, bool], Tensor]:
    """Calls the layer of each chosen expert."""

    def apply(x: Tensor, routing: Routing, by_row: bool) -> Tensor:
        ends = routing.offsets.tolist()
        x = x[routing.rows.long()] if by_row else x
        spans = list(zip(linears, ends[:-1], ends[1:], strict=True))
        return torch.cat([linear(x[start:end]) for linear, start, end in spans if start < end])

    return apply


def add_up(parts: Tensor, routing: Routing) -> Tensor:
    total = torch.zeros((len(routing.places), parts.shape[1]), device=parts.device)
    for weights, places in zip(routing.weights.T, routing.places.T, strict=True):
        total += weights[:, None] * parts[places.long()].to(torch.float32)
    return total.to(parts.dtype)
