"""Qwen 2 and Qwen 3 with experts in the layers that `decoder_sparse_step` and `mlp_only_layers` leave to them. Qwen 2
has a shared expert too."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.experts import with_experts
from inferd.engine.arch.families import llama
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.windows import if_used, in_every_layer


def describe(architecture: str, fields: Fields) -> Arch:
    if not fields.has("head_dim"):
        raise fields.refuse("head_dim", "must be given")
    fields = fields.with_defaults(use_sliding_window=False)
    arch = llama.describe(architecture, fields)
    windows = arch.windows
    if fields.boolean("use_sliding_window", default=False):
        windows = in_every_layer(fields, arch.num_layers, arch.max_positions)
    arch = dataclasses.replace(arch, qk_norm=QKNorm.HEAD, windows=windows)
    return with_experts(
        arch,
        fields,
        count="num_experts" if fields.has("num_experts") else "num_local_experts",
        size="moe_intermediate_size",
        normalizes=fields.boolean("norm_topk_prob", default=False),
        layers=expert_layers(fields, arch.num_layers),
    )


def describe_qwen2(architecture: str, fields: Fields) -> Arch:
    """If `use_sliding_window` is true, every second layer has a window, up to `max_window_layers`."""
    fields = fields.with_defaults(sliding_window=4096, max_window_layers=28)
    arch = base(architecture, fields)

    def is_windowed(layer: int) -> bool:
        return layer % 2 == 0 and layer < fields.integer("max_window_layers", minimum=0)

    has_bias = fields.boolean("qkv_bias", default=True)
    windows = if_used(fields, arch.num_layers, arch.max_positions, is_windowed)
    return with_experts(
        dataclasses.replace(arch, has_qkv_bias=has_bias, windows=windows),
        fields,
        count="num_experts",
        size="moe_intermediate_size",
        normalizes=fields.boolean("norm_topk_prob", default=False),
        layers=expert_layers(fields, arch.num_layers),
        shared_size=fields.integer("shared_expert_intermediate_size"),
    )


def expert_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Those that `decoder_sparse_step` and `mlp_only_layers` leave to experts."""
    step, without = fields.integer("decoder_sparse_step", default=1), fields.value("mlp_only_layers") or []
    if not isinstance(without, list) or not all(type(layer) is int for layer in without):
        raise fields.refuse("mlp_only_layers", "must be a list of whole numbers")
    return tuple(layer for layer in range(num_layers) if layer not in without and (layer + 1) % step == 0)
