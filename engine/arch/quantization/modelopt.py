"""Reads the quantization_config of NVIDIA's ModelOpt: in config.json, or as hf_quant_config.json holds it."""

from __future__ import annotations

from inferd.engine.arch.fields import Fields
from inferd.engine.arch.formats import Fp4, Fp8, Scales
from inferd.engine.arch.quantization.modules import listed, names_of, with_wildcards
from inferd.engine.arch.stored import Format, FormatOf

_FORMATS: dict[str, Format] = {
    "NVFP4": Fp4(weight="weight", global_scale="weight_scale_2"),
    "FP8": Fp8(Scales.TENSOR, "weight_scale", "input_scale"),
}


def read(section: Fields, dtype: str) -> FormatOf:
    """A module is left out by its name, by the name of a module above it, or by a name with wildcards (`*`)."""
    section = section.section("quantization") or section
    if not section.has("quant_algo"):
        return lambda module: None  # only the KV cache is quantized
    form = section.choice("quant_algo", _FORMATS)
    if section.has("group_size") and section.integer("group_size") != 16:
        raise section.refuse("group_size", "must be 16")
    texts = names_of(section, ("exclude_modules", "ignore"))
    is_left_out = listed(section, map(with_wildcards, texts))

    def format_of(module: str) -> Format | None:
        return None if is_left_out(module) else form

    return format_of
