"""The adapter of `record` as a directory in PEFT's format, and how likely a server finds a text with it."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from safetensors.torch import save_file

from inferd.engine.api.checkpoint import Checkpoint
from tests.real.record import MODULES, RANK, adapter

NAME = "waves"
SERVED_TOLERANCE = 1e-4
"""Relative, of what a server tells. It adds an adapter's products to those of the weights, and transformers adds the
adapter to the weights. Found: up to 2e-5."""


def write_adapter(path: Path, gguf: Path) -> str:
    """Write the adapter for the model of a file. Returns what `--lora` takes."""
    tensors = Checkpoint.read(gguf).tensors
    modules = {name.removesuffix(".weight"): info.shape for name, info in tensors.items()}
    shapes = {
        name: (shape[0], shape[1])
        for name, shape in modules.items()
        if name.startswith("model.layers.") and name.endswith(MODULES)
    }
    weights = {}
    for name, (a, b) in adapter(shapes).items():
        weights[f"base_model.model.{name}.lora_A.weight"] = a
        weights[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "target_modules": list(MODULES)}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return f"{NAME}={path}"


def served_nll(url: str, model: str, ids: list[int]) -> float:
    """Mean negative log probability of the tokens after the first, as a completion that echoes its prompt tells it."""
    body = {"model": model, "prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=250)
    assert answer.status_code == 200, answer.text
    first, *scored = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert first is None and len(scored) == len(ids) - 1
    return -sum(scored) / len(scored)
