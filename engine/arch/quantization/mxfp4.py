"""Reads the quantization_config of gpt-oss: the experts are in MXFP4, and all else is not quantized."""

from __future__ import annotations

from inferd.engine.arch.fields import Fields
from inferd.engine.arch.formats import Fp4
from inferd.engine.arch.quantization.modules import listed, names_of, with_wildcards
from inferd.engine.arch.stored import Format, FormatOf


def read(section: Fields, dtype: str) -> FormatOf:
    is_left_out = listed(section, map(with_wildcards, names_of(section, ("modules_to_not_convert",))))

    def format_of(module: str) -> Format | None:
        return Fp4() if ".experts." in module and not is_left_out(module) else None

    return format_of
