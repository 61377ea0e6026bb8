"""Granite 4: the multipliers of Granite 3, and Mamba-2 in layers without attention. Every layer has an MLP, and in some
models experts beside it. Models with Mamba-2 have no position embedding."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.description import Activation, Arch
from inferd.engine.arch.experts import with_experts
from inferd.engine.arch.families import granite
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.recurrent import Mamba2
from inferd.engine.arch.tensors import TensorNames

NAMES = TensorNames(
    mlp="shared_mlp",
    gate_up=("input_linear",),
    down="output_linear",
    experts="block_sparse_moe",
    router="router.layer",
    shared="shared_mlp",
    recurrent="mamba",
)

SPLIT_NAMES = dataclasses.replace(NAMES, gate_up=("gate_linear", "up_linear"), up="up_linear")
"""The names in GGUF files, in which gate and up lie one by one."""

_IS_RECURRENT = {"mamba": True, "attention": False, "linear_attention": True, "full_attention": False}
_HAS_ROPE = {"rope": True, "nope": False}
_NO_LIMIT = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""Spellings of no limit of a step: JSON has no infinity of its own."""


def describe(architecture: str, fields: Fields) -> Arch:
    """Without experts, `shared_intermediate_size` is that of the MLP."""
    fields.choice("normalization_function", {"rmsnorm": None}, default="rmsnorm")
    shared_size = fields.integer("shared_intermediate_size")
    has_experts = fields.integer("num_local_experts", minimum=0) > 0
    arch = granite.describe(architecture, fields)
    if not has_experts:
        arch = dataclasses.replace(arch, intermediate_size=shared_size)
    if not fields.choice("position_embedding_type", _HAS_ROPE, default="nope"):
        arch = dataclasses.replace(arch, ropes=(None,) * arch.num_layers)
    recurrent_layers = _recurrent_layers(fields, arch.num_layers)
    if recurrent_layers:
        arch = dataclasses.replace(arch, recurrent=_mamba2(fields, arch), recurrent_layers=recurrent_layers)
    if not has_experts:
        return arch
    return with_experts(
        arch,
        fields,
        count="num_local_experts",
        size="intermediate_size",
        normalizes=True,
        shared_size=shared_size,
        has_shared_gate=False,
    )


def _recurrent_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    is_recurrent = fields.choices("layer_types", _IS_RECURRENT, num_layers)
    if all(is_recurrent):
        raise fields.refuse("layer_types", "must name attention at least once")
    return tuple(layer for layer in range(num_layers) if is_recurrent[layer])


def _mamba2(fields: Fields, arch: Arch) -> Mamba2:
    if arch.activation is not Activation.SILU:
        raise fields.refuse("hidden_act", "must be silu in a model with Mamba-2")
    num_heads = fields.integer("mamba_n_heads", default=128)
    inner_size = fields.integer("mamba_expand", default=2) * arch.hidden_size
    if inner_size % num_heads:
        raise fields.refuse("mamba_n_heads", f"must divide mamba_expand * hidden_size, which is {inner_size}")
    head_dim = inner_size // num_heads
    if fields.has("mamba_d_head") and fields.value("mamba_d_head") not in ("auto", head_dim):
        raise fields.refuse("mamba_d_head", f"must be {head_dim}, which is mamba_expand * hidden_size / mamba_n_heads")
    num_groups = fields.integer("mamba_n_groups", default=1)
    if num_heads % num_groups:
        raise fields.refuse("mamba_n_groups", f"must divide mamba_n_heads, which is {num_heads}")
    limit = fields.value("time_step_limit")
    if limit is not None and not (isinstance(limit, list | tuple) and list(limit) in _NO_LIMIT):
        raise fields.refuse("time_step_limit", "must be null or from 0 to infinity: a limit is not supported")
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=fields.integer("mamba_d_state", default=256),
        num_groups=num_groups,
        conv_width=fields.integer("mamba_d_conv", default=4, minimum=2),
        has_conv_bias=fields.boolean("mamba_conv_bias", default=True),
        has_bias=fields.boolean("mamba_proj_bias", default=False),
    )
