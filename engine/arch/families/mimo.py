"""MiMo: Qwen2 with layers behind the last one that draft tokens (MTP layers)."""

from __future__ import annotations

import dataclasses

from inferd.engine.arch.base import base
from inferd.engine.arch.description import Arch
from inferd.engine.arch.families.qwen2 import late_windows
from inferd.engine.arch.fields import Fields


def describe(architecture: str, fields: Fields) -> Arch:
    arch, has_bias = base(architecture, fields), fields.boolean("attention_bias", default=True)
    return dataclasses.replace(arch, has_qkv_bias=has_bias, windows=late_windows(fields, arch))
