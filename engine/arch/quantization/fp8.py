"""Reads the quantization_config of `fp8`: AutoFP8 and transformers with one scale for each tensor, and DeepSeek-V3
(arXiv:2412.19437) with one scale for each block of 128 x 128."""

from __future__ import annotations

from inferd.engine.arch.fields import Fields
from inferd.engine.arch.formats import Fp8, Scales
from inferd.engine.arch.quantization.modules import listed, names_of
from inferd.engine.arch.stored import BLOCK, Format, FormatOf


def read(section: Fields, dtype: str) -> FormatOf:
    """The head is never quantized, even if the config does not list it as left out."""
    form = _format(section)
    is_left_out = listed(section, names_of(section, ("ignored_layers", "modules_to_not_convert")))

    def format_of(module: str) -> Format | None:
        return None if module == "lm_head" or is_left_out(module) else form

    return format_of


def _format(section: Fields) -> Fp8:
    if section.has("fmt"):
        section.choice("fmt", {"e4m3": None})
    if section.has("scale_fmt"):
        section.choice("scale_fmt", {"float": None})
    is_static = section.choice("activation_scheme", {"dynamic": False, "static": True})
    if not section.has("weight_block_size"):
        # transformers writes the field although it is null, and has names of its own for the scales.
        is_its_own = "weight_block_size" in section.names()
        scale, input_scale = ("weight_scale_inv", "activation_scale") if is_its_own else ("weight_scale", "input_scale")
        return Fp8(Scales.TENSOR, scale, input_scale if is_static else None)
    check_block(section, "weight_block_size")
    if is_static:
        raise section.refuse("activation_scheme", "must be dynamic beside a weight_block_size")
    return Fp8(Scales.BLOCK, "weight_scale_inv")


def check_block(section: Fields, name: str) -> None:
    if section.value(name) != [BLOCK, BLOCK]:
        raise section.refuse(name, f"must be [{BLOCK}, {BLOCK}]")
