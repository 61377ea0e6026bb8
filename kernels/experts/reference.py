"""Mixture of experts in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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


def route(logits: Tensor, num_chosen: int, normalizes: bool, loads: Tensor) -> Routing:
    num_experts = logits.shape[1]
    largest, chosen = logits.sort(dim=1, descending=True, stable=True)
    powers = (logits - largest[:, :1]).exp()
    own = powers.gather(1, chosen[:, :num_chosen])
    total = _sum_in_order(own if normalizes else powers)
    experts = chosen[:, :num_chosen].flatten()
    order = experts.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = (experts[:, None] == torch.arange(num_experts, device=logits.device)).sum(0)
    loads += counts
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Routing(
        own / total,
        places.reshape(-1, num_chosen).to(torch.int32),
        (order // num_chosen).to(torch.int32),
        offsets.to(torch.int32),
    )


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
