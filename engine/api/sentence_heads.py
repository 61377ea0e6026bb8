"""The modules of sentence-transformers that change a pooled vector: dense layers, norms and scalings, as data.

A dense layer and a layer norm have weights in a safetensors file of their own. Its header must agree with its config,
so that a wrong head is refused before an engine exists. This file knows no other module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from inferd.engine.api.checkpoint import read_header, read_json
from inferd.engine.api.errors import ModelError
from inferd.engine.api.pinned_files import exists
from inferd.engine.arch.shown import shown
from inferd.engine.arch.stored import FLOATS

CONFIG, WEIGHTS = "config.json", "model.safetensors"
"""Names of a module's files."""
_PICKLE = "pytorch_model.bin"
_MAX_CONFIG_BYTES = 2**20
_MAX_SIZE = 2**16
"""Most components of a vector before or after a head."""


class DenseActivation(StrEnum):
    """Activation behind a dense layer."""

    IDENTITY = "identity"
    TANH = "tanh"
    RELU = "relu"
    GELU_ERF = "gelu_erf"


_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": DenseActivation.IDENTITY,
    "torch.nn.modules.activation.Tanh": DenseActivation.TANH,
    "torch.nn.modules.activation.ReLU": DenseActivation.RELU,
    "torch.nn.modules.activation.GELU": DenseActivation.GELU_ERF,
}
"""Class in a module's config -> the activation."""
_DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"


@dataclass(frozen=True, slots=True)
class DenseHead:
    """activation(W x + b), and with a residual that plus x, or plus R x if the sizes differ."""

    folder: str
    """Folder of its files, inside the model's."""
    num_inputs: int
    num_outputs: int
    has_bias: bool = True
    activation: DenseActivation = DenseActivation.TANH
    has_residual: bool = False

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of its file."""
        shape = self.num_outputs, self.num_inputs
        bias = {"linear.bias": shape[:1]} if self.has_bias else {}
        residual = {"residual.weight": shape} if self.has_residual and shape[0] != shape[1] else {}
        return {"linear.weight": shape, **bias, **residual}


@dataclass(frozen=True, slots=True)
class NormHead:
    """A layer norm with weight and bias."""

    folder: str
    """Folder of its files, inside the model's."""
    num_inputs: int

    @property
    def num_outputs(self) -> int:
        return self.num_inputs

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of its file."""
        return {"norm.weight": (self.num_inputs,), "norm.bias": (self.num_inputs,)}


@dataclass(frozen=True, slots=True)
class UnitHead:
    """A vector is scaled to length 1 before other heads read it."""

    folder: str
    num_inputs: int

    @property
    def num_outputs(self) -> int:
        return self.num_inputs

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {}


Head = DenseHead | NormHead | UnitHead
KINDS = ("Dense", "LayerNorm")
"""Classes of modules with weights, which `read_head` knows."""
SCALES = "Normalize"
"""Class of the module that scales a vector to length 1."""
NEUTRAL = ("Dropout",)
"""Classes of modules that change nothing outside of training."""


class UnsupportedHead(Exception):
    """A module that cannot be computed here. The message says why."""


def read_heads(path: Path, modules: Sequence[tuple[str, str]]) -> tuple[tuple[Head, ...], bool]:
    """(the heads, whether vectors are scaled to length 1 behind them) of the modules (class, folder) behind a pooling.
    Raises as `read_head`."""
    heads: list[Head] = []
    normalizes = False
    for kind, folder in reversed([module for module in modules if module[0] not in NEUTRAL]):
        if kind != SCALES:
            heads.append(read_head(path, kind, folder))
            continue
        if exists(path / folder / CONFIG):
            _refuse_other_names(read_json(path / folder / CONFIG, _MAX_CONFIG_BYTES), folder)
        if heads:
            heads.append(UnitHead(folder, heads[-1].num_inputs))
        normalizes = normalizes or not heads
    return tuple(reversed(heads)), normalizes


def read_head(path: Path, kind: str, folder: str) -> Head:
    """The module of class `kind` in a folder of the model's folder `path`. Raises `UnsupportedHead`, and `ModelError`
    for files that cannot be read or contradict one another."""
    config = read_json(path / folder / CONFIG, _MAX_CONFIG_BYTES)
    if kind == "LayerNorm":
        head: Head = NormHead(folder, _size(config, "dimension", folder))
    else:
        _refuse_other_forms(config, folder)
        head = DenseHead(
            folder,
            _size(config, "in_features", folder),
            _size(config, "out_features", folder),
            config.get("bias", True) is True,
            _ACTIVATIONS[config.get("activation_function", _DEFAULT_ACTIVATION)],
            config.get("use_residual", False) is True,
        )
    file = path / folder / WEIGHTS
    if not exists(file):
        has_pickle = exists(path / folder / _PICKLE)
        why = f"{_PICKLE}, a pickle, which can carry code: convert it to {WEIGHTS}" if has_pickle else f"no {WEIGHTS}"
        raise UnsupportedHead(f"{folder} has {why}")
    _check(file, head)
    return head


def _refuse_other_forms(config: Mapping[str, Any], folder: str) -> None:
    activation = config.get("activation_function", _DEFAULT_ACTIVATION)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedHead(f"{folder} has the activation {shown(activation)}; known are: {known}")
    _refuse_other_names(config, folder)
    adds = config.get("use_residual", False)
    if type(adds) is not bool:
        raise ModelError(f"{folder}/{CONFIG}: use_residual must be true or false, but is {shown(adds)}")


def _refuse_other_names(config: Mapping[str, Any], folder: str) -> None:
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, "sentence_embedding"):
            raise UnsupportedHead(f"{folder} has {name} {shown(config[name])}, and only sentence_embedding is computed")


def _size(config: Mapping[str, Any], name: str, folder: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= _MAX_SIZE:
        rule = f"must be a whole number from 1 to {_MAX_SIZE}"
        raise ModelError(f"{folder}/{CONFIG}: {name} {rule}, but is {shown(value)}")
    return value


def _check(file: Path, head: Head) -> None:
    """Raises `ModelError` if the tensors of a head's file are not those that its config says."""
    found = read_header(file, _MAX_CONFIG_BYTES)
    shapes = {info.name: info.shape for info in found}
    if shapes != head.tensors:
        raise ModelError(f"{file}: the weights contradict {CONFIG}: it needs {head.tensors}, but has {shown(shapes)}")
    for info in found:
        if info.dtype not in FLOATS:
            raise ModelError(f"{file}: {info.name} is stored as {info.dtype}; known are: {', '.join(FLOATS)}")
