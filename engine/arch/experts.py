"""Reads the fields of config.json that describe a mixture of experts."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.description import Activation, Arch, Experts, GateLimit
from inferd.engine.arch.fields import Fields

_MAX_EXPERTS = 2**16
"""Most experts of all layers together. A description names each expert's tensors. The bound is above any model, and far
below what exhausts memory."""


def with_experts(
    arch: Arch,
    fields: Fields,
    *,
    count: str,
    size: str,
    normalizes: bool,
    layers: tuple[int, ...] | None = None,
    shared_size: str = "",
    has_bias: bool = False,
    limit: GateLimit | None = None,
) -> Arch:
    """`arch` with experts in `layers` (default: all). `count`, `size` and `shared_size` are names of fields: the number
    of experts, the intermediate size of each, and that of the shared expert, if there is one. `Experts` says what
    `has_bias` and `limit` are."""
    layers = tuple(range(arch.num_layers)) if layers is None else layers
    if not layers:
        return arch
    num_experts = fields.integer(count, maximum=_MAX_EXPERTS // len(layers))
    num_chosen = fields.integer("num_experts_per_tok")
    if num_chosen > num_experts:
        raise fields.refuse("num_experts_per_tok", f"must be at most {count} ({num_experts})")
    if arch.activation is not Activation.SILU:
        raise fields.refuse("hidden_act", "must be silu in a model with experts")
    shared = fields.integer(shared_size) if shared_size else 0
    experts = Experts(num_experts, num_chosen, fields.integer(size), normalizes, layers, shared, has_bias, limit)
    return dataclasses.replace(arch, experts=experts)
