"""Mixtral: Mistral with experts in every layer, and no window unless `sliding_window` is given."""

from __future__ import annotations

from inferd.engine.arch.description import Arch
from inferd.engine.arch.experts import with_experts
from inferd.engine.arch.families import mistral
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.tensors import TensorNames

NAMES = TensorNames(mlp="block_sparse_moe", gate_up=("w1", "w3"), down="w2")


def describe(architecture: str, fields: Fields) -> Arch:
    fields = fields.with_defaults(sliding_window=None)
    arch = mistral.describe(architecture, fields)
    return with_experts(arch, fields, count="num_local_experts", size="intermediate_size", normalizes=True)
