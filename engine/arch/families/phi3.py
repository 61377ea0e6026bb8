"""Phi-3, 3.5 and 4-mini: Llama with q, k, v in one stored matrix, and gate and up in another. LongRoPE rotates a part
of each head. If the config has a window, all layers have it."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import read_rope
from inferd.engine.arch.tensors import TensorNames
from inferd.engine.arch.windows import in_every_layer

NAMES = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))

_ROPE_TYPES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Older checkpoints use earlier names of LongRoPE."""


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(original_max_position_embeddings=4096)
    num_heads, _ = fields.heads()
    rope = read_rope(fields, fields.head_dim(num_heads), types=_ROPE_TYPES, has_partial_rotation=True)
    arch = base(architecture, fields, rope=rope)
    return dataclasses.replace(arch, windows=in_every_layer(fields, arch.num_layers, arch.max_positions))
