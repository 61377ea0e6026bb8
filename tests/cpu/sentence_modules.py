"""Folders as sentence-transformers writes them, around a model that is there already. Its weights come from torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from inferd.engine.api.sentence_folder import MODULES


class Residual(nn.Sequential):
    """A linear layer and its activation, plus their input, by a matrix of its own if it has another size."""

    def __init__(self, matrix: nn.Linear, activation: nn.Module) -> None:
        super().__init__(matrix, activation)
        sizes = matrix.in_features, matrix.out_features
        self.residual = nn.Linear(*sizes, bias=False) if sizes[0] != sizes[1] else None

    def forward(self, x: Tensor) -> Tensor:
        matrix, activation = list(self)[:2]
        return activation(matrix(x)) + (x if self.residual is None else self.residual(x))  # type: ignore[no-any-return]


class Unit(nn.Module):
    """Vectors scaled to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, dim=-1)


Module = str | nn.Sequential | nn.LayerNorm | Unit | nn.Dropout
"""A module that follows the model: the name of a pooling; `Normalize`; a linear layer and its activation; a norm; what
scales to length 1, and what does nothing outside of training."""


def write_modules(path: Path, modules: Sequence[Module], **settings: Any) -> None:
    """Write modules.json and the folders of the modules. `settings`: content of config_sentence_transformers.json."""
    listed = [("Transformer", "")]
    for number, module in enumerate(modules, start=1):
        kind, config, tensors = _parts(module)
        listed.append((kind, f"{number}_{kind}"))
        folder = path / listed[-1][1]
        folder.mkdir()
        if config:
            (folder / "config.json").write_text(json.dumps(config))
        if tensors:
            save_file(tensors, folder / "model.safetensors")
    entries = [
        {"idx": number, "name": str(number), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, folder) in enumerate(listed)
    ]
    (path / MODULES).write_text(json.dumps(entries))
    if settings:
        (path / "config_sentence_transformers.json").write_text(json.dumps(settings))


def _parts(module: Module) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """(class, content of config.json, tensors)."""
    match module:
        case "Normalize":
            return "Normalize", {}, {}
        case str(name):
            return "Pooling", {"pooling_mode": name}, {}
        case Unit():
            return "Normalize", {"module_input_name": "sentence_embedding", "module_output_name": None}, {}
        case nn.Dropout():
            return "Dropout", {"dropout": module.p}, {}
        case nn.LayerNorm():
            tensors = {"norm.weight": module.weight.data, "norm.bias": module.bias.data}
            return "LayerNorm", {"dimension": module.normalized_shape[0]}, tensors
    matrix, activation = list(module)[:2]
    assert isinstance(matrix, nn.Linear)
    kind = type(activation)
    config = {
        "in_features": matrix.in_features,
        "out_features": matrix.out_features,
        "bias": matrix.bias is not None,
        "activation_function": f"{kind.__module__}.{kind.__qualname__}",
    }
    tensors = {f"linear.{name}": tensor.data for name, tensor in matrix.named_parameters()}
    if isinstance(module, Residual):
        config["use_residual"] = True
        tensors |= {} if module.residual is None else {"residual.weight": module.residual.weight.data}
    return "Dense", config, tensors
