"""The checkpoint's vocabulary for llguidance: the bytes of every token, and the tokenizer for text.

Built from tokenizer.json, plus the tokens that only tokenizer_config.json adds, or from a GGUF file. Embedding rows
without a token are never allowed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from inferd.engine.api.checkpoint import documents_of
from inferd.engine.api.errors import ModelError
from inferd.engine.api.gguf import is_gguf
from inferd.engine.grammar.ports import GrammarError


def load_vocabulary(path: Path, vocab_size: int) -> LLTokenizer:
    """`path`: the checkpoint's folder, or its GGUF file. `vocab_size`: number of embedding rows. Raises `GrammarError`
    for a tokenizer it cannot read."""
    try:
        read = documents_of(path)
        return LLTokenizer(_text_of(path, read), n_vocab=vocab_size, eos_token=_eos_ids(read))
    except (ValueError, KeyError, TypeError, ModelError) as error:
        raise GrammarError(f"the tokenizer of {path.name} cannot constrain output: {str(error)[:200]}") from error


def _text_of(path: Path, read: Callable[[str], dict[str, Any] | None]) -> str:
    """The text of tokenizer.json. That of a folder is not parsed if it is complete."""
    if is_gguf(path):
        return json.dumps(read("tokenizer.json"))
    file = path / "tokenizer.json"
    if not file.is_file():
        raise GrammarError(f"{path.name} has no tokenizer.json, which constrained output is built from")
    return _with_added_tokens(file.read_text(encoding="utf-8"), read("tokenizer_config.json") or {})


def _with_added_tokens(text: str, config: Mapping[str, Any]) -> str:
    """The text of tokenizer.json, with the tokens that the configuration adds."""
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict) or not added:
        return text
    tokenizer = json.loads(text)
    known = {token["id"] for token in tokenizer.get("added_tokens", ())}
    missing = [{"id": int(number), **token} for number, token in added.items() if int(number) not in known]
    if not missing:
        return text
    tokenizer["added_tokens"] = sorted([*tokenizer.get("added_tokens", ()), *missing], key=lambda token: token["id"])
    return json.dumps(tokenizer)


def _eos_ids(read: Callable[[str], dict[str, Any] | None]) -> list[int] | None:
    """The ids that end an answer according to the checkpoint; None leaves them to the tokenizer's own names."""
    ids: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        given = (read(name) or {}).get("eos_token_id")
        for token_id in given if isinstance(given, list) else [given]:
            if type(token_id) is int:
                ids[token_id] = None
    return list(ids) or None
