"""How a checkpoint stores its linear layers in FP8: `quantization_config` of config.json, read, or refused by name.

Three conventions, which differ in names and in what shares a scale: `fp8` with one scale for each tensor (AutoFP8),
`fp8` with one for each block of 128 x 128 (DeepSeek-V3, arXiv:2412.19437), and `compressed-tensors`
(https://github.com/neuralmagic/compressed-tensors). The numbers mean the same in all: weight = stored x scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from inferd.engine.arch.description import BLOCK, ArchError, Scales, StoredFp8
from inferd.engine.arch.fields import Fields

_MAX_NAMES = 10_000
_MAX_WILDCARDS = 3
"""In a name to be left out: matching takes time to this power of the name's length."""
_PATTERN = re.compile(r"[\w\-$^]|\\?\.(?!\*)|\.\*")


def read_quantization(fields: Fields, layer_modules: Iterable[str], has_own_head: bool) -> StoredFp8 | None:
    """What config.json says, None where it says nothing. `layer_modules` are the names of the layers' linear modules in
    the checkpoint; the head is none of them, and not `has_own_head` where it is the embedding.

    Raises `ArchError` for what is not supported, by name.
    """
    section = fields.section("quantization_config")
    if section is None:
        return None
    method = section.choice("quant_method", {"fp8": _autofp8, "compressed-tensors": _compressed_tensors})
    return method(section, list(layer_modules), has_own_head)


def _autofp8(section: Fields, layer_modules: list[str], has_own_head: bool) -> StoredFp8:
    """`fp8`: its head is never quantized, whether or not it is among those left out."""
    if section.has("fmt"):
        section.choice("fmt", {"e4m3": None})
    if section.has("scale_fmt"):
        section.choice("scale_fmt", {"float": None})
    for name in ("ignored_layers", "modules_to_not_convert"):
        _refuse_mixed(section, name, layer_modules)
    _refuse_kv(section, "kv_cache_quant_method")
    is_static = section.choice("activation_scheme", {"dynamic": False, "static": True})
    if not section.has("weight_block_size"):
        return StoredFp8(Scales.TENSOR, "weight_scale", "input_scale" if is_static else None)
    _check_block(section, "weight_block_size")
    if is_static:
        raise section.refuse("activation_scheme", "must be dynamic beside a weight_block_size")
    return StoredFp8(Scales.BLOCK, "weight_scale_inv")


def _compressed_tensors(section: Fields, layer_modules: list[str], has_own_head: bool) -> StoredFp8:
    section.choice("format", {"float-quantized": None, "naive-quantized": None})
    _refuse_kv(section, "kv_cache_scheme")
    sparsity = section.section("sparsity_config")
    if sparsity is not None and sparsity.has("format"):
        sparsity.choice("format", {"dense": None})
    ignores_head = _refuse_mixed(section, "ignore", layer_modules)
    group = _only_group(section)
    if group.has("output_activations"):
        raise group.refuse("output_activations", "must be null: outputs are not quantized")
    weights, inputs = group.section("weights"), group.section("input_activations")
    if weights is None or inputs is None:
        name = "weights" if weights is None else "input_activations"
        raise group.refuse(name, "must be an object: weights and activations are both in FP8")
    for part in (weights, inputs):
        _check_fp8(part)
    scales = weights.choice("strategy", {kind.value: kind for kind in Scales})
    if weights.boolean("dynamic", default=False):
        raise weights.refuse("dynamic", "must be false: weights are stored with their scales")
    has_head = has_own_head and not ignores_head
    if scales is Scales.BLOCK:
        _check_block(weights, "block_structure")
        inputs.choice("strategy", {"group": None})
        _check_dynamic(inputs, True)
        if inputs.integer("group_size") != BLOCK:
            raise inputs.refuse("group_size", f"must be {BLOCK}, the width of a block of weights")
        return StoredFp8(scales, "weight_scale", None, has_head)
    is_static = inputs.choice("strategy", {"token": False, "tensor": True})
    _check_dynamic(inputs, not is_static)
    return StoredFp8(scales, "weight_scale", "input_scale" if is_static else None, has_head)


def _only_group(section: Fields) -> Fields:
    groups = section.section("config_groups")
    names = () if groups is None else groups.names()
    if groups is None or len(names) != 1:
        raise section.refuse("config_groups", "must hold one group, for all linear layers")
    group = groups.section(names[0])
    if group is None or group.strings("targets") != ("Linear",):
        raise groups.refuse(names[0], 'must have the targets ["Linear"]')
    return group


def _check_fp8(part: Fields) -> None:
    part.choice("type", {"float": None})
    if part.integer("num_bits") != 8:
        raise part.refuse("num_bits", "must be 8")
    if not part.boolean("symmetric", default=True):
        raise part.refuse("symmetric", "must be true")


def _check_dynamic(inputs: Fields, expected: bool) -> None:
    if inputs.boolean("dynamic", default=False) != expected:
        rule = "be true: the scale of a token is its own" if expected else "be false: one scale is for all tokens"
        raise inputs.refuse("dynamic", f"must {rule}")


def _check_block(section: Fields, name: str) -> None:
    if section.value(name) != [BLOCK, BLOCK]:
        raise section.refuse(name, f"must be [{BLOCK}, {BLOCK}]")


def _refuse_kv(section: Fields, name: str) -> None:
    if section.has(name):
        raise section.refuse(name, "must be null: a KV cache is not quantized")


def _refuse_mixed(section: Fields, name: str, layer_modules: list[str]) -> bool:
    """Whether the names to be left out name the head. Raises `ArchError` where they name some linear layers."""
    left_out = section.strings(name) if section.has(name) else ()
    if len(left_out) > _MAX_NAMES:
        raise ArchError(f"{section.owner}: {name} must hold at most {_MAX_NAMES} names, but holds {len(left_out)}")
    plain = {text for text in left_out if not text.startswith("re:")}
    patterns = [_compiled(section, name, text) for text in left_out if text.startswith("re:")]

    def is_left_out(module: str) -> bool:
        parts = module.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        below = {".".join(parts[first:]) for first in range(len(parts))}
        return not plain.isdisjoint(above | below) or any(pattern.match(module) for pattern in patterns)

    mixed = [module for module in layer_modules if is_left_out(module)]
    if mixed:
        raise ArchError(
            f"{section.owner}: {name} leaves out {mixed[0]} and {len(mixed) - 1} others of {len(layer_modules)} linear "
            "layers: all of them have to be quantized, or none"
        )
    return is_left_out("lm_head")


def _compiled(section: Fields, name: str, text: str) -> re.Pattern[str]:
    """A regular expression of names, dots and few wildcards: no config may make matching take for ever."""
    pattern = text.removeprefix("re:")
    if len(pattern) > 200 or pattern.count(".*") > _MAX_WILDCARDS or _PATTERN.sub("", pattern):
        raise ArchError(
            f"{section.owner}: {name} must hold names, or expressions of names with at most {_MAX_WILDCARDS} wildcards "
            f"(.*), but it holds {text[:200]!r}"
        )
    return re.compile(pattern)
