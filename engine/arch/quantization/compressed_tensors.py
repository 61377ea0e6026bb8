"""Reads the quantization_config of `compressed-tensors` (https://github.com/vllm-project/compressed-tensors).

Each of its groups gives some modules one format. What it says of activations of integer formats is read by nobody: here
they are quantized to 8 bits with a scale for a group of inputs, which is never less exact than what it asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inferd.engine.arch.fields import Fields
from inferd.engine.arch.formats import Fp4, Fp8, IntQuantized, PackQuantized, Scales
from inferd.engine.arch.quantization.fp8 import check_block
from inferd.engine.arch.quantization.integers import group_size, num_bits
from inferd.engine.arch.quantization.modules import IsListed, check_count, check_time, expressions, listed, names_of
from inferd.engine.arch.stored import BLOCK, Format, FormatOf

_ANY_LINEAR = "Linear"
_MAX_GROUPS = 1_000


@dataclass(frozen=True, slots=True)
class _Group:
    format: Format
    names: IsListed
    """Whether the group's targets name a module."""
    has_all: bool
    """Whether its targets are all linear modules."""


def read(section: Fields, dtype: str) -> FormatOf:
    """The head is a linear module like any other. A group that names a module wins over one of all linear modules."""
    sparsity = section.section("sparsity_config")
    if sparsity is not None and sparsity.has("format"):
        sparsity.choice("format", {"dense": None})
    if section.value("transform_config"):
        raise section.refuse("transform_config", "must be absent: activations are not rotated")
    groups = _groups(section, dtype)
    is_left_out = listed(section, names_of(section, ("ignore",)))

    def format_of(module: str) -> Format | None:
        if is_left_out(module):
            return None
        named = (group.format for group in groups if group.names(module))
        return next(named, next((group.format for group in groups if group.has_all), None))

    return format_of


def _groups(section: Fields, dtype: str) -> list[_Group]:
    groups = section.section("config_groups")
    names = () if groups is None else groups.names()
    if groups is None or not 1 <= len(names) <= _MAX_GROUPS:
        raise section.refuse("config_groups", f"must hold 1 to {_MAX_GROUPS} groups of modules")
    sections = []
    for name in names:
        group = groups.section(name)
        if group is None:
            raise groups.refuse(name, "must be an object")
        sections.append(group)
    texts = [text for group in sections for text in group.strings("targets")]
    check_count(groups, "targets", len(texts))
    check_time(groups, expressions(texts))
    found = []
    for group in sections:
        targets = group.strings("targets")
        own = group if group.has("format") else section
        read_format = own.choice("format", _FORMATS)
        others = [target for target in targets if target != _ANY_LINEAR]
        found.append(_Group(read_format(group, dtype), listed(group, others), _ANY_LINEAR in targets))
    return found


def _weights(group: Fields) -> Fields:
    weights = group.section("weights")
    if weights is None:
        raise group.refuse("weights", "must be an object")
    if group.has("output_activations"):
        raise group.refuse("output_activations", "must be null: outputs are not quantized")
    if weights.boolean("dynamic", default=False):
        raise weights.refuse("dynamic", "must be false: weights are stored with their scales")
    return weights


# -- FP8 ---------------------------------------------------------------------------------------------------------------


def _fp8(group: Fields, dtype: str) -> Fp8:
    weights, inputs = _weights(group), group.section("input_activations")
    if inputs is None:
        raise group.refuse("input_activations", "must be an object: weights and activations are both in FP8")
    for part in (weights, inputs):
        _check_fp8(part)
    scales = weights.choice("strategy", {kind.value: kind for kind in Scales})
    if scales is Scales.BLOCK:
        check_block(weights, "block_structure")
        inputs.choice("strategy", {"group": None})
        _check_dynamic(inputs, True)
        if inputs.integer("group_size") != BLOCK:
            raise inputs.refuse("group_size", f"must be {BLOCK}, the width of a block of weights")
        return Fp8(scales, "weight_scale")
    is_static = inputs.choice("strategy", {"token": False, "tensor": True})
    _check_dynamic(inputs, not is_static)
    return Fp8(scales, "weight_scale", "input_scale" if is_static else None)


def _check_fp8(part: Fields) -> None:
    part.choice("type", {"float": None})
    if part.integer("num_bits") != 8:
        raise part.refuse("num_bits", "must be 8")
    if not part.boolean("symmetric", default=True):
        raise part.refuse("symmetric", "must be true")


def _check_dynamic(inputs: Fields, expected: bool) -> None:
    if inputs.boolean("dynamic", default=False) != expected:
        rule = "be true: each token has its own scale" if expected else "be false: one scale holds for all tokens"
        raise inputs.refuse("dynamic", f"must {rule}")


# -- integers ----------------------------------------------------------------------------------------------------------

_HAS_ORDER = {"group": True, "dynamic": True, "weight": False, "static": False}
"""Activation orders. `weight` orders inputs for calibration only, and stores them in their own order."""


def _packed(group: Fields, dtype: str) -> PackQuantized:
    weights = _integer_weights(group)
    strategy, size = _strategy(weights)
    has_order = weights.value("actorder") not in (None, False) and weights.choice("actorder", _HAS_ORDER)
    return PackQuantized(
        bits=num_bits(weights, "num_bits"),
        group_size=size,
        is_symmetric=weights.boolean("symmetric", default=True),
        has_order=has_order and size is not None,
        scale_dtype=dtype,
        has_tensor_scale=strategy == "tensor",
    )


def _whole_bytes(group: Fields, dtype: str) -> IntQuantized:
    weights = _integer_weights(group)
    strategy, size = _strategy(weights)
    return IntQuantized(
        bits=num_bits(weights, "num_bits"),
        group_size=size,
        is_symmetric=weights.boolean("symmetric", default=True),
        scale_dtype=dtype,
        has_tensor_scale=strategy == "tensor",
        declares_activations=_has_byte_rows(group.section("input_activations")),
    )


def _has_byte_rows(inputs: Fields | None) -> bool:
    """Whether activations are declared as signed bytes with one scale a token. Anything else is not read."""
    if inputs is None:
        return False
    declared = {"type": "int", "num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
    return all(inputs.value(name) == value for name, value in declared.items())


def _integer_weights(group: Fields) -> Fields:
    weights = _weights(group)
    weights.choice("type", {"int": None})
    return weights


def _strategy(weights: Fields) -> tuple[str, int | None]:
    """(strategy, number of inputs that share a scale). None: all inputs."""
    strategies = {name: name for name in ("tensor", "channel", "group")}
    strategy = weights.choice("strategy", strategies)
    return strategy, group_size(weights, "group_size") if strategy == "group" else None


# -- FP4 ---------------------------------------------------------------------------------------------------------------


def _nvfp4(group: Fields, dtype: str) -> Fp4:
    _check_fp4(group, "tensor_group", 16)
    return Fp4(global_scale="weight_global_scale", is_divisor=True)


def _mxfp4(group: Fields, dtype: str) -> Fp4:
    _check_fp4(group, "group", 32)
    return Fp4()


def _check_fp4(group: Fields, strategy: str, size: int) -> None:
    weights = _weights(group)
    weights.choice("type", {"float": None})
    weights.choice("strategy", {strategy: None})
    for name, expected in (("num_bits", 4), ("group_size", size)):
        if weights.integer(name) != expected:
            raise weights.refuse(name, f"must be {expected}")


def _naive(group: Fields, dtype: str) -> Format:
    weights = group.section("weights")
    is_integer = weights is not None and weights.value("type") == "int"
    return _whole_bytes(group, dtype) if is_integer else _fp8(group, dtype)


_FORMATS: dict[str, Callable[[Fields, str], Format]] = {
    "float-quantized": _fp8,
    "naive-quantized": _naive,
    "int-quantized": _whole_bytes,
    "pack-quantized": _packed,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}
