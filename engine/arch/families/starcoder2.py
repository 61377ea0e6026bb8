"""StarCoder2: layer norms, an MLP without a gate, and biases everywhere. If the config has a window, all layers have
it."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Activation, Arch, NormKind
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.tensors import TensorNames
from inferd.engine.arch.windows import in_every_layer

NAMES = TensorNames(up="c_fc", down="c_proj")


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(
        hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5, num_key_value_heads=2, tie_word_embeddings=True
    )
    arch = base(architecture, fields, norm_eps="norm_epsilon")
    if arch.activation is not Activation.GELU_TANH:
        raise fields.refuse("hidden_act", "must be gelu_pytorch_tanh in this family")
    has_bias = fields.boolean("use_bias", default=True)
    return dataclasses.replace(
        arch,
        norm=NormKind.LAYER,
        has_gate=False,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        has_mlp_bias=has_bias,
        windows=in_every_layer(fields, arch.num_layers, arch.max_positions),
    )
