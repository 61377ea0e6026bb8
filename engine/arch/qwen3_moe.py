"""Qwen3 with experts in the layers that `decoder_sparse_step` and `mlp_only_layers` leave to them."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch import llama
from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.experts import with_experts
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.windows import in_every_layer


def describe(architecture: str, fields: Fields) -> Arch:
    if not fields.has("head_dim"):
        raise fields.refuse("head_dim", "must be given")
    fields = fields.with_defaults(use_sliding_window=False)
    arch = llama.describe(architecture, fields)
    windows = arch.windows
    if fields.boolean("use_sliding_window", default=False):
        windows = in_every_layer(fields, arch.num_layers, arch.max_positions)
    arch = dataclasses.replace(arch, qk_norm=QKNorm.HEAD, windows=windows)
    step, without = fields.integer("decoder_sparse_step", default=1), fields.value("mlp_only_layers") or []
    if not isinstance(without, list) or not all(type(layer) is int for layer in without):
        raise fields.refuse("mlp_only_layers", "must be a list of whole numbers")
    return with_experts(
        arch,
        fields,
        count="num_experts" if fields.has("num_experts") else "num_local_experts",
        size="moe_intermediate_size",
        normalizes=fields.boolean("norm_topk_prob", default=False),
        layers=tuple(layer for layer in range(arch.num_layers) if layer not in without and (layer + 1) % step == 0),
    )
