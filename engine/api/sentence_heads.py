"""The modules of sentence-transformers that change a pooled vector: dense layers and layer norms, as data.

A head has weights in a safetensors file of its own. Its header must agree with its config, so that a wrong head is
refused before an engine exists. This file knows no other module.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """activation(W x + b)."""

    folder: str
    """Folder of its files, inside the model's."""
    num_inputs: int
    num_outputs: int
    has_bias: bool = True
    activation: DenseActivation = DenseActivation.TANH

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of its file."""
        bias = {"linear.bias": (self.num_outputs,)} if self.has_bias else {}
        return {"linear.weight": (self.num_outputs, self.num_inputs), **bias}


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


Head = DenseHead | NormHead
KINDS = ("Dense", "LayerNorm")
"""Classes of modules that `read_head` knows."""


class UnsupportedHead(Exception):
    """A module that cannot be computed here. The message says why."""


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
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, "sentence_embedding"):
            raise UnsupportedHead(f"{folder} has {name} {shown(config[name])}, and only sentence_embedding is computed")
    if config.get("use_residual", False) is not False:
        raise UnsupportedHead(f"{folder} adds its input (use_residual), which inferd does not compute")


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
