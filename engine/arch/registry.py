"""The architectures that can be served, and the one door to them: config.json in, `Arch` and weight map out.

Adding a family is one short file beside this one and one line in `_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inferd.engine.arch import llama, qwen3
from inferd.engine.arch.description import Arch, ArchError
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.weights import WeightMap, standard_weights


@dataclass(frozen=True, slots=True)
class Family:
    """How to read a config of this family, and what its tensors are called."""

    describe: Callable[[str, Fields], Arch]
    weights: Callable[[Arch], WeightMap] = standard_weights


_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.describe),
    "Qwen3ForCausalLM": Family(qwen3.describe),
}


def known_architectures() -> tuple[str, ...]:
    """Names that `describe` takes, in alphabetical order."""
    return tuple(sorted(_FAMILIES))


def describe(config: Mapping[str, Any]) -> Arch:
    """The decoder that a parsed config.json describes.

    Raises `ArchError` for an unknown architecture, a missing field, a value that is not supported or contradicts
    another.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ArchError(f"config.json: architectures must be a list of one name, but it is {names!r}")
    architecture = names[0]
    if architecture not in _FAMILIES:
        raise ArchError(f"unknown architecture {architecture!r}; known are: {', '.join(known_architectures())}")
    if config.get("quantization_config") is not None:
        raise ArchError(f"{architecture}: checkpoints with a quantization_config are not supported")
    return _FAMILIES[architecture].describe(architecture, Fields(config, architecture))


def weights(arch: Arch) -> WeightMap:
    """The tensors that a checkpoint of `arch` must hold."""
    return _FAMILIES[arch.architecture].weights(arch)
