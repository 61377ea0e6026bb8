"""Reads `quantization_config` of config.json: how a checkpoint stores its linear layers in FP8.

Three conventions differ in names and in the part of a matrix that shares a scale:

- `fp8` with one scale for each tensor (AutoFP8);
- `fp8` with one scale for each block of 128 x 128 (DeepSeek-V3, arXiv:2412.19437);
- `compressed-tensors` (https://github.com/neuralmagic/compressed-tensors).

In all of them weight = stored number x scale. Each lists modules that were not quantized: whole layers, or some of
their matrices. Entries about a KV cache are ignored: its dtype is a setting, and in 8 bits it finds its own scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from inferd.engine.arch.description import ArchError
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.stored import BLOCK, Fp8, Scales, Stored

_MAX_NAMES = 10_000
_MAX_WILDCARDS = 3
"""Most wildcards in the name of a module that is left out: matching takes time to this power of the name's length."""
_PATTERN = re.compile(r"[\w\-$^]|\\?\.(?!\*)|\.\*")


def read_quantization(fields: Fields, layer_modules: Iterable[str], has_own_head: bool) -> Stored | None:
    """The quantization that config.json describes; None if it has none or leaves out every module.

    `layer_modules` are the checkpoint's names of the layers' linear modules, without the head. `has_own_head` is false
    if the head is the embedding. Raises `ArchError` with the name of a field that is not supported.
    """
    section = fields.section("quantization_config")
    if section is None:
        return None
    read, lists = section.choice(
        "quant_method",
        {
            "fp8": (_autofp8, ("ignored_layers", "modules_to_not_convert")),
            "compressed-tensors": (_compressed_tensors, ("ignore",)),
        },
    )
    (form, takes_head), modules = read(section), list(layer_modules)
    is_left_out = _left_out(section, lists)
    plain = tuple((module, None) for module in modules if is_left_out(module))
    head = form if takes_head and has_own_head and not is_left_out("lm_head") else None
    if len(plain) == len(modules) and head is None:
        return None
    return Stored(form, head, plain)


def _autofp8(section: Fields) -> tuple[Fp8, bool]:
    """(format, whether the head has it) of `fp8`. The head is never quantized, even if the config does not list it as
    left out."""
    if section.has("fmt"):
        section.choice("fmt", {"e4m3": None})
    if section.has("scale_fmt"):
        section.choice("scale_fmt", {"float": None})
    is_static = section.choice("activation_scheme", {"dynamic": False, "static": True})
    if not section.has("weight_block_size"):
        return Fp8(Scales.TENSOR, "weight_scale", "input_scale" if is_static else None), False
    _check_block(section, "weight_block_size")
    if is_static:
        raise section.refuse("activation_scheme", "must be dynamic beside a weight_block_size")
    return Fp8(Scales.BLOCK, "weight_scale_inv"), False


def _compressed_tensors(section: Fields) -> tuple[Fp8, bool]:
    """(format, whether the head has it) of `compressed-tensors`. The head is a linear layer like any other."""
    section.choice("format", {"float-quantized": None, "naive-quantized": None})
    sparsity = section.section("sparsity_config")
    if sparsity is not None and sparsity.has("format"):
        sparsity.choice("format", {"dense": None})
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
    if scales is Scales.BLOCK:
        _check_block(weights, "block_structure")
        inputs.choice("strategy", {"group": None})
        _check_dynamic(inputs, True)
        if inputs.integer("group_size") != BLOCK:
            raise inputs.refuse("group_size", f"must be {BLOCK}, the width of a block of weights")
        return Fp8(scales, "weight_scale"), True
    is_static = inputs.choice("strategy", {"token": False, "tensor": True})
    _check_dynamic(inputs, not is_static)
    return Fp8(scales, "weight_scale", "input_scale" if is_static else None), True


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
        rule = "be true: each token has its own scale" if expected else "be false: one scale holds for all tokens"
        raise inputs.refuse("dynamic", f"must {rule}")


def _check_block(section: Fields, name: str) -> None:
    if section.value(name) != [BLOCK, BLOCK]:
        raise section.refuse(name, f"must be [{BLOCK}, {BLOCK}]")


def _left_out(section: Fields, names: Iterable[str]) -> Callable[[str], bool]:
    """A test for modules that the lists called `names` leave out. An entry is a module's name, the name of a module
    above it, the end of its name, or a regular expression."""
    texts: list[str] = []
    for name in names:
        listed = section.strings(name) if section.has(name) else ()
        if len(listed) > _MAX_NAMES:
            raise ArchError(f"{section.owner}: {name} must hold at most {_MAX_NAMES} names, but holds {len(listed)}")
        texts += listed
    plain = {text for text in texts if not text.startswith("re:")}
    patterns = [_compiled(section, text) for text in texts if text.startswith("re:")]

    def is_left_out(module: str) -> bool:
        parts = module.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        below = {".".join(parts[first:]) for first in range(len(parts))}
        return not plain.isdisjoint(above | below) or any(pattern.match(module) for pattern in patterns)

    return is_left_out


def _compiled(section: Fields, text: str) -> re.Pattern[str]:
    """A regular expression of names, dots and few wildcards, so that no config can make matching take forever."""
    pattern = text.removeprefix("re:")
    if len(pattern) > 200 or pattern.count(".*") > _MAX_WILDCARDS or _PATTERN.sub("", pattern):
        raise ArchError(
            f"{section.owner}: a module to leave out must be a name, or an expression of names with at most "
            f"{_MAX_WILDCARDS} wildcards (.*), but it is {text[:200]!r}"
        )
    return re.compile(pattern)
