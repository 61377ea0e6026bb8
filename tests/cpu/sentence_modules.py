"""Folders as sentence-transformers writes them, around a model that is there already. Its weights come from torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from inferd.engine.api.sentence_folder import MODULES

Module = str | nn.Sequential | nn.LayerNorm
"""A module that follows the model: the name of a pooling; `Normalize`; a linear layer and its activation; a norm."""


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
        case nn.LayerNorm():
            tensors = {"norm.weight": module.weight.data, "norm.bias": module.bias.data}
            return "LayerNorm", {"dimension": module.normalized_shape[0]}, tensors
    matrix, activation = module
    assert isinstance(matrix, nn.Linear)
    kind = type(activation)
    config = {
        "in_features": matrix.in_features,
        "out_features": matrix.out_features,
        "bias": matrix.bias is not None,
        "activation_function": f"{kind.__module__}.{kind.__qualname__}",
    }
    return "Dense", config, {f"linear.{name}": tensor.data for name, tensor in matrix.named_parameters()}
