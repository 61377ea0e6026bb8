"""Reads `quantization_config` of config.json: which format each matrix of a checkpoint has.

A convention is a `quant_method`. Entries about a KV cache are ignored: its dtype is a setting, and in 8 bits it finds
its own scales. To add a convention, write one short file beside this one and one line in `_METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from inferd.engine.arch.fields import Fields
from inferd.engine.arch.quantization import compressed_tensors, fp8, integers, modelopt, mxfp4
from inferd.engine.arch.stored import FormatOf, Stored

Read = Callable[[Fields, str], FormatOf]
"""Takes the quantization_config, and the dtype of the checkpoint's other tensors as safetensors headers name it. Raises
`ArchError` with the name of a field that is not supported."""

_METHODS: dict[str, Read] = {
    "fp8": fp8.read,
    "compressed-tensors": compressed_tensors.read,
    "gptq": integers.gptq,
    "awq": integers.awq,
    "auto-round": integers.auto_round,
    "modelopt": modelopt.read,
    "mxfp4": mxfp4.read,
}
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def read_quantization(fields: Fields, layer_modules: Iterable[str], has_own_head: bool) -> Stored | None:
    """The quantization that config.json describes; None if it has none or leaves out every module.

    `layer_modules` are the checkpoint's names of the layers' linear modules, without the head. `has_own_head` is false
    if the head is the embedding. Raises `ArchError` with the name of a field that is not supported.
    """
    section = fields.section("quantization_config")
    if section is None:
        return None
    format_of = section.choice("quant_method", _METHODS)(section, _DTYPES[fields.dtype()])
    formats = {module: format_of(module) for module in layer_modules}
    head = format_of("lm_head") if has_own_head else None
    stored = Stored.of(formats, head)
    return None if stored.layers is None and head is None else stored
