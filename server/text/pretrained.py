"""Reads a checkpoint's tokenizer from its files, as transformers reads it, or out of a GGUF file.

Knows what the files say, and not how texts are tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from inferd.engine.api.checkpoint import Documents
from inferd.engine.api.errors import ModelError
from inferd.server.text.tokenizer import as_model_error

_MAX_FILE_BYTES = 128 * 2**20
"""Four times the largest tokenizer.json known, of 262,000 tokens. Such files are read completely into memory."""
_READ_WHOLE = ("*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A checkpoint's tokenizer, and what its configuration says about it."""

    backend: Backend
    special_tokens: Mapping[str, object]
    """Tokens that chat templates may name, such as "bos_token"."""
    eos_token_id: int | None
    class_name: str
    chat_template: object
    response_template: object = None


def pretrained_of(path: Path, read: Documents) -> Pretrained:
    """The tokenizer of a checkpoint folder or GGUF file, whose documents `read` has. Raises `ModelError`."""
    made = read.made_tokenizer()
    return load_pretrained(path) if made is None else _made(path, made, read("tokenizer_config.json") or {})


def load_pretrained(path: Path) -> Pretrained:
    """The checkpoint's tokenizer as transformers reads it. Raises `ModelError`."""
    for file in (file for pattern in _READ_WHOLE for file in path.glob(pattern) if file.is_file()):
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ModelError(f"{file} is larger than {_MAX_FILE_BYTES} bytes: no file of a tokenizer is")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")):
        raise ModelError(f"{path.name} holds no tokenizer: expected tokenizer.json beside the weights")
    # Only a folder needs it, and it takes 0.7 s of processor time (one core, AMD EPYC Zen 3, 2026-11-29).
    from transformers.tokenization_utils_tokenizers import TokenizersBackend  # noqa: PLC0415

    with as_model_error(f"the tokenizer of {path.name} cannot be loaded"):
        loaded = TokenizersBackend.from_pretrained(path, local_files_only=True)
    if not isinstance(loaded, TokenizersBackend):
        raise ModelError(f"the tokenizer of {path.name} is a {type(loaded).__name__}, which is not served")
    return Pretrained(
        loaded.backend_tokenizer,
        loaded.special_tokens_map,
        loaded.eos_token_id,
        type(loaded).__name__,
        loaded.chat_template,
        loaded.response_template,
    )


def _made(path: Path, tokenizer: bytes, config: Mapping[str, Any]) -> Pretrained:
    """The tokenizer of a GGUF file, from its tokenizer.json and the content of tokenizer_config.json. Raises
    `ModelError`."""
    with as_model_error(f"the tokenizer of {path.name} cannot be loaded"):
        backend = Backend.from_buffer(tokenizer)
    special = {name: token for name, token in config.items() if name.endswith("_token") and isinstance(token, str)}
    eos = special.get("eos_token")
    eos_token_id = None if eos is None else backend.token_to_id(eos)
    return Pretrained(backend, special, eos_token_id, "TokenizersBackend", config.get("chat_template"))
