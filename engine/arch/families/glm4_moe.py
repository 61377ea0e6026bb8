"""GLM-4.5, 4.6 and 4.7: experts and a shared one behind a few layers with an MLP, and DeepSeek's router. Rope turns
half of each head. Behind the last layer a checkpoint has an MTP layer."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.experts import with_experts, with_sigmoid_router
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import read_rope
from inferd.engine.arch.tensors import TensorNames

NAMES = TensorNames(shared="mlp.shared_experts")


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(partial_rotary_factor=0.5)
    rope = read_rope(fields, fields.head_dim(fields.heads()[0]), has_partial_rotation=True)
    has_norms = fields.boolean("use_qk_norm", default=False)
    arch = dataclasses.replace(
        base(architecture, fields, rope=rope),
        qk_norm=QKNorm.HEAD if has_norms else QKNorm.NONE,
        has_qkv_bias=fields.boolean("attention_bias", default=False),
    )
    size, num_layers = "moe_intermediate_size", arch.num_layers
    num_dense = fields.integer("first_k_dense_replace", default=1, minimum=0, maximum=num_layers - 1)
    arch = with_experts(
        arch,
        fields,
        count="n_routed_experts",
        size=size,
        normalizes=fields.boolean("norm_topk_prob", default=True),
        layers=tuple(range(num_dense, num_layers)),
        shared_size=fields.integer(size) * fields.integer("n_shared_experts", default=1, minimum=0),
        has_shared_gate=False,
    )
    return with_sigmoid_router(arch, fields)
