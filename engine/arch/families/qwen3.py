"""Qwen3, dense: Llama with a norm over each head of q and k, an explicit head size, and optional windows in late
layers."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.families import llama
from inferd.engine.arch.families.qwen2 import late_windows
from inferd.engine.arch.fields import Fields


def describe(architecture: str, fields: Fields) -> Arch:
    if not fields.has("head_dim"):
        raise fields.refuse("head_dim", "must be given")
    arch = llama.describe(architecture, fields)
    return dataclasses.replace(arch, qk_norm=QKNorm.HEAD, windows=late_windows(fields, arch))
