"""Finds the draft model or draft head that `--speculative` names, and checks that it has the vocabulary of the served
model.

The engine does not import this module, because it imports `locate`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from inferd.engine.api.checkpoint import Checkpoint, Documents, read_config, read_json
from inferd.engine.api.config import AskedDraft
from inferd.engine.api.errors import ConfigError, ModelError
from inferd.engine.api.gguf import is_gguf
from inferd.engine.api.locate import locate
from inferd.engine.api.model import ModelFacts, of_mtp_layer
from inferd.engine.api.speculation import Speculative
from inferd.engine.arch.description import ArchError
from inferd.engine.arch.registry import describe_mtp_layer
from inferd.engine.arch.shown import shown

logger = logging.getLogger(__name__)

MTP = "mtp"
"""Value of `--speculative` that names the MTP layer of the served model."""
SOURCES: tuple[Speculative, ...] = ("none", "ngram", "suffix", "auto")
"""Values of `--speculative` that name no draft model."""


def source_of(asked: str) -> Speculative:
    """The kind of source that `--speculative` asks for: any other value is a draft model or a draft head."""
    return next((kind for kind in SOURCES if kind == asked), "model")


def read_draft(asked: str, served: Path, *, keeps_blocks: bool) -> tuple[AskedDraft, ModelFacts] | None:
    """The draft model or draft head that `--speculative` names for the model in `served`; None if it names none. Raises
    `ConfigError` or `ModelError`."""
    if source_of(asked) != "model":
        return None
    if not asked.strip():
        raise ConfigError(
            f"--speculative must be one of {', '.join((*SOURCES, MTP))}, or a draft model, but it is empty"
        )
    if asked == MTP:
        return _read_mtp(served, keeps_blocks=keeps_blocks)
    try:
        path = locate(asked)
    except ModelError as error:
        raise ConfigError(
            f"--speculative must be one of {', '.join((*SOURCES, MTP))}, or a draft model, given as MODEL is, but got "
            f"{asked!r}: {error}"
        ) from error
    checkpoint = Checkpoint.read(path, keeps_blocks=keeps_blocks)
    facts = ModelFacts.of(checkpoint)
    tokens, own = _tokens_of(served), _tokens_of(path)
    is_head = facts.arch.draft_head is not None
    if not is_head and (not tokens or not own):
        logger.warning(
            "the vocabularies of the served model and the draft model are compared by their sizes alone: "
            "%s has no tokenizer.json",
            path if tokens else served,
        )
    difference = _difference(tokens, own)
    if difference is not None:
        raise ConfigError(
            f"the draft model must have the vocabulary of the served model, but {difference}; give a draft model of "
            "the same family, or --speculative suffix"
        )
    return AskedDraft(model_path=str(path), keeps_blocks=keeps_blocks, name=asked, is_head=is_head), facts


def _read_mtp(served: Path, *, keeps_blocks: bool) -> tuple[AskedDraft, ModelFacts]:
    """The MTP layer in the checkpoint of the served model. A plan may have its config.json alone."""
    try:
        if is_gguf(served) or (served.is_dir() and any(served.glob("*.safetensors"))):
            checkpoint = Checkpoint.read(served, keeps_blocks=keeps_blocks)
            describe_mtp_layer(checkpoint.config)
            facts = ModelFacts.of(of_mtp_layer(checkpoint), is_mtp=True)
        else:
            config = read_config(served) if served.is_dir() else read_json(served)
            facts = ModelFacts.of_config(served, config, is_mtp=True)
    except (ArchError, ModelError) as error:
        raise ConfigError(
            f"--speculative {MTP}: {error}; give --speculative suffix, a draft model or a draft head"
        ) from error
    return AskedDraft(model_path=str(served), name=MTP, is_head=True, is_mtp=True), facts


def _difference(served: dict[str, int], draft: dict[str, int]) -> str | None:
    """A token that differs, or None. A model without a tokenizer is compared by its number of tokens alone."""
    if not served or not draft:
        return None
    for token in sorted(served.keys() | draft.keys()):
        ids = served.get(token), draft.get(token)
        if ids[0] != ids[1]:
            named = ["no token" if token_id is None else f"token {token_id}" for token_id in ids]
            return f"{shown(token)} is {named[0]} of the served model and {named[1]} of the draft model"
    return None


def _tokens_of(path: Path) -> dict[str, int]:
    """The ids of all tokens, by tokenizer.json; empty without one. Raises `ModelError` if it lists no tokens."""
    found = Documents(path)("tokenizer.json") if path.exists() else None
    if found is None:
        return {}
    try:
        vocabulary: Any = found["model"]["vocab"]
        if isinstance(vocabulary, list):
            vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
        tokens = {**vocabulary, **{token["content"]: token["id"] for token in found.get("added_tokens") or ()}}
        if not all(type(token) is str and type(token_id) is int for token, token_id in tokens.items()):
            raise TypeError("a token must be a text, and its id a whole number")
        return tokens
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelError(
            f"{path / 'tokenizer.json'} must have its tokens in model.vocab and added_tokens ({error!r}); the draft "
            "model's tokens cannot be compared with it: give --speculative suffix"
        ) from error
