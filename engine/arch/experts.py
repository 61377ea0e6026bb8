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
    chosen: str = "num_experts_per_tok",
    normalizes: bool,
    layers: tuple[int, ...] | None = None,
    shared_size: int = 0,
    has_shared_gate: bool = True,
    has_bias: bool = False,
    limit: GateLimit | None = None,
    activation: Activation = Activation.SILU,
    beside_mlp: bool = False,
) -> Arch:
    """`arch` with experts in `layers` (default: all). `count`, `size` and `chosen` are names of fields: the number of
    experts, the intermediate size of each, and how many a token goes to. `shared_size`: that of the shared expert; 0
    for none. `Experts` says what the others are."""
    layers = tuple(range(arch.num_layers)) if layers is None else layers
    if not layers:
        return arch
    num_experts = fields.integer(count, maximum=_MAX_EXPERTS // len(layers))
    num_chosen = fields.integer(chosen)
    if num_chosen > num_experts:
        raise fields.refuse(chosen, f"must be at most {count} ({num_experts})")
    if arch.activation is not activation:
        raise fields.refuse("hidden_act", f"must be {activation} in a model with experts")
    experts = Experts(
        num_experts,
        num_chosen,
        fields.integer(size),
        normalizes,
        layers,
        shared_size,
        has_shared_gate,
        has_bias=has_bias,
        limit=limit,
        beside_mlp=beside_mlp,
    )
    return dataclasses.replace(arch, experts=experts)


def with_sigmoid_router(arch: Arch, fields: Fields) -> Arch:
    """`arch`, which has experts, with the router of DeepSeek V3: sigmoids with a bias, in groups."""
    assert arch.experts is not None
    fields.choice("scoring_func", {"sigmoid": None}, default="sigmoid")
    fields.choice("topk_method", {"noaux_tc": None}, default="noaux_tc")
    num_experts, num_chosen = arch.experts.num_experts, arch.experts.num_chosen
    num_groups = fields.integer("n_group", default=1)
    if num_experts % num_groups or (num_groups > 1 and num_experts < 2 * num_groups):
        raise fields.refuse("n_group", f"must leave equal groups of two or more of {num_experts} experts")
    num_chosen_groups = fields.integer("topk_group", default=1, maximum=num_groups)
    if num_chosen > num_experts // num_groups * num_chosen_groups:
        raise fields.refuse("topk_group", f"must be so many groups that they have {num_chosen} experts")
    experts = dataclasses.replace(
        arch.experts,
        has_sigmoid=True,
        has_score_bias=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        factor=fields.positive("routed_scaling_factor", 1.0),
        added=1e-20,
    )
    return dataclasses.replace(arch, experts=experts)
