"""The rule for the names that clients send as `model`: those of models and of adapters.

They are in log lines, in labels of metrics and in answers, so they are short and visible. Files that people have may
have spaces in their names, and so may models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

MAX_NAME_CHARS = 256
NAME_RULE = f"a name of 1 to {MAX_NAME_CHARS} printable characters, with no space at its ends, such as sql-v2"


def is_name(text: str) -> bool:
    """Whether a model or an adapter may have this name. A lone surrogate, which JSON cannot carry, is not printable."""
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable() and text == text.strip()


def split_name(entry: str) -> tuple[str | None, str]:
    """The name in `name=model`, and the model. A path may hold "=" too, but a name holds no "/"."""
    name, is_named, model = entry.partition("=")
    return (name, model) if is_named and "/" not in name else (None, entry)


def is_reranker_by_name(architectures: Collection[str], names: Iterable[str]) -> bool:
    """Whether a model is a Qwen3-Reranker that only its names tell: its older folders are those of a chat model, and so
    are GGUF files without its labels."""
    return "Qwen3ForCausalLM" in architectures and any("reranker" in name.lower() for name in names)
