"""Reads the quantization_config of GPTQ, AutoAWQ and AutoRound, and the fields that conventions for integers share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from inferd.engine.arch.fields import Fields
from inferd.engine.arch.formats import Awq, Fp4, Gptq
from inferd.engine.arch.quantization.modules import check_count, compiled, names_of
from inferd.engine.arch.stored import GROUP_SIZES, Format, FormatOf

_UNQUANTIZED_BITS = 16
_MAX_GROUP_SIZE = 2**20
_OVERRIDABLE = (
    "bits", "group_size", "sym", "desc_act", "pack_dtype", "format", "checkpoint_format", "data_type", "packing_format",
)  # fmt: skip
"""Fields that may have other values for some modules."""


def num_bits(section: Fields, name: str) -> Literal[4, 8]:
    value = section.integer(name)
    if value not in (4, 8):
        raise section.refuse(name, "must be 4 or 8")
    return 4 if value == 4 else 8


def group_size(section: Fields, name: str) -> int | None:
    """Number of inputs that share a scale; None, as -1 in the config: all inputs."""
    if section.value(name) == -1:
        return None
    value = section.integer(name, maximum=_MAX_GROUP_SIZE)
    if value not in GROUP_SIZES and value % GROUP_SIZES[-1]:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise section.refuse(name, f"must be one of {sizes}, a multiple of {GROUP_SIZES[-1]}, or -1 for all inputs")
    return value


# -- GPTQ --------------------------------------------------------------------------------------------------------------


def gptq(section: Fields, dtype: str) -> FormatOf:
    """GPTQ as AutoGPTQ and GPTQModel write it. `dynamic` has, for expressions that modules' names begin with, other
    fields (`+:`), or leaves the modules out (`-:`); the first expression that matches decides."""
    form = _gptq(section)
    overrides = _dynamic(section)
    is_in_blocks = _in_blocks(section)
    has_head = section.boolean("lm_head", default=False)

    def format_of(module: str) -> Format | None:
        if module == "lm_head" and not has_head:
            return None
        for pattern, own in overrides:
            if pattern.match(module):
                return own
        return form if module == "lm_head" or is_in_blocks(module) else None

    return format_of


def _gptq(section: Fields) -> Gptq:
    if section.has("pack_dtype"):
        section.choice("pack_dtype", {"int32": None})
    version = "checkpoint_format" if section.has("checkpoint_format") else "format"
    return Gptq(
        bits=num_bits(section, "bits"),
        group_size=group_size(section, "group_size"),
        is_symmetric=section.boolean("sym", default=True),
        has_order=section.boolean("desc_act", default=False),
        is_v2=section.choice(version, {"gptq": False, "gptq_v2": True}, default="gptq"),
    )


def _dynamic(section: Fields) -> list[tuple[re.Pattern[str], Gptq | None]]:
    dynamic = section.section("dynamic")
    if dynamic is None:
        return []
    names = dynamic.names()
    check_count(section, "dynamic", len(names))
    patterns = compiled(dynamic, [name.removeprefix("-:").removeprefix("+:") for name in names])
    base = {name: section.value(name) for name in _OVERRIDABLE}
    found: list[tuple[re.Pattern[str], Gptq | None]] = []
    for name, pattern in zip(names, patterns, strict=True):
        own = dynamic.section(name)
        found.append((pattern, None if name.startswith("-:") or own is None else _gptq(own.with_defaults(**base))))
    return found


def _in_blocks(section: Fields) -> Callable[[str], bool]:
    """A test for modules that `modules_in_block_to_quantize`, a list of lists of names within a layer, holds."""
    lists = section.value("modules_in_block_to_quantize")
    if not lists:
        return lambda module: True
    rows = lists if isinstance(lists, list) else None
    names = None if rows is None else [name for row in rows for name in (row if isinstance(row, list) else [row])]
    if names is None or not all(isinstance(name, str) for name in names):
        raise section.refuse("modules_in_block_to_quantize", "must be a list of lists of names")
    check_count(section, "modules_in_block_to_quantize", len(names))
    ends = tuple(f".{name}" for name in names)
    return lambda module: module.endswith(ends)


# -- AutoAWQ -----------------------------------------------------------------------------------------------------------


def awq(section: Fields, dtype: str) -> FormatOf:
    """AutoAWQ. The head is never quantized. A module is left out if its name holds a listed text."""
    bits, size = ("w_bit" if section.has("w_bit") else "bits"), ("q_" if section.has("q_group_size") else "")
    if num_bits(section, bits) != 4:
        raise section.refuse(bits, "must be 4")
    version = section.value("version")
    if version is not None and not (isinstance(version, str) and version.lower() == "gemm"):
        raise section.refuse("version", "must be gemm")
    form = Awq(
        group_size=group_size(section, f"{size}group_size"),
        is_symmetric=not section.boolean("zero_point", default=True),
    )
    left_out = names_of(section, ("modules_to_not_convert",))

    def format_of(module: str) -> Format | None:
        return None if module == "lm_head" or any(text in module for text in left_out) else form

    return format_of


# -- AutoRound ---------------------------------------------------------------------------------------------------------


def auto_round(section: Fields, dtype: str) -> FormatOf:
    """AutoRound, which packs as others do. `extra_config` has other fields for modules by their names, or by
    expressions that are found in their names. The head is quantized only if it is there."""
    if section.value("rotation_config"):
        raise section.refuse("rotation_config", "must be absent: activations are not rotated")
    form, base = _auto_round(section), {name: section.value(name) for name in _OVERRIDABLE}
    extra = section.section("extra_config") or Fields({}, section.owner)
    check_count(section, "extra_config", len(extra.names()))
    own = {name: _auto_round((extra.section(name) or extra).with_defaults(**base)) for name in extra.names()}
    expressions = [name for name in own if _is_expression(name)]
    patterns = list(zip(compiled(extra, expressions), expressions, strict=True))
    blocks = _block_names(section)

    def format_of(module: str) -> Format | None:
        if module in own:
            return own[module]
        if module == "lm_head" or not module.startswith(blocks):
            return None
        return next((own[name] for pattern, name in patterns if pattern.search(module)), form)

    return format_of


def _auto_round(section: Fields) -> Format | None:
    bits = section.integer("bits")
    if bits >= _UNQUANTIZED_BITS:
        return None
    data_type = section.choice("data_type", {"int": "int", "mx_fp": "mx_fp", "nv_fp": "nv_fp"}, default="int")
    if data_type != "int":
        if bits != 4:
            raise section.refuse("bits", f"must be 4 with the data_type {data_type}")
        return Fp4() if data_type == "mx_fp" else Fp4(global_scale="weight_global_scale", is_divisor=True)
    packing = section.value("packing_format") or "auto_round:auto_gptq"
    if not isinstance(packing, str) or not packing.startswith("auto_round"):
        raise section.refuse("packing_format", "must begin with auto_round")
    size, is_symmetric = group_size(section, "group_size"), section.boolean("sym", default=True)
    if "awq" in packing:
        if bits != 4:
            raise section.refuse("bits", "must be 4 in AWQ's packing")
        return Awq(group_size=size, is_symmetric=is_symmetric)
    is_v2 = "gptqmodel" in packing or "gptq" not in packing
    return Gptq(bits=num_bits(section, "bits"), group_size=size, is_symmetric=is_symmetric, is_v2=is_v2)


def _is_expression(name: str) -> bool:
    return re.fullmatch(r"[\w.\-]+", name) is None


def _block_names(section: Fields) -> tuple[str, ...]:
    """Beginnings of the names of modules that are quantized."""
    field = "block_name_to_quantize" if section.has("block_name_to_quantize") else "to_quant_block_names"
    value = section.value(field)
    if value is None:
        return ("",)
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise section.refuse(field, "must be a text, or a list of texts")
    check_count(section, field, len(texts))
    return tuple(text.strip() for text in texts)
