"""The bytes of every token, from the way in which the vocabulary of a tokenizer writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from inferd.engine.api.byte_alphabet import BYTE_OF_CHAR

_SPECIAL = b"\xff"
"""Mark of llguidance before the bytes of a token that no text can spell."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of one byte."""


def bytes_of_tokens(tokenizer: Tokenizer, added: Mapping[int, tuple[str, bool]], vocab_size: int) -> Iterator[bytes]:
    """The bytes of every embedding row. Those of special tokens, and of rows without a token, have the mark."""
    num_tokens = max((tokenizer.get_vocab_size(with_added_tokens=True), *(token_id + 1 for token_id in added)))
    if num_tokens > vocab_size:
        raise ValueError(f"it has {num_tokens} tokens, but the embedding has {vocab_size} rows")
    spell = _speller(tokenizer)
    for token_id in range(vocab_size):
        text, is_special = added.get(token_id, ("", False))
        token = tokenizer.id_to_token(token_id)
        if is_special or (text.startswith("<") and text.endswith(">")):
            yield _SPECIAL + text.encode()
        elif token_id >= num_tokens:
            yield _SPECIAL + f"<[{token_id}]>".encode()
        else:
            spelled = None if token is None else spell(token)
            yield text.encode() if spelled is None else spelled


def _speller(tokenizer: Tokenizer) -> Callable[[str], bytes | None]:
    """A function from a token, as the vocabulary writes it, to its bytes; to None if it is not written so."""
    decoders = list(_parts(state_of(tokenizer.decoder)))
    kinds = {part.get("type") for part in decoders}
    if "ByteFallback" in kinds:
        spaces = [part["pattern"]["String"] for part in decoders if _is_space(part)]
        return lambda token: _with_byte_tokens(token, spaces[-1] if spaces else " ")
    if "ByteLevel" in kinds:
        return _of_byte_level
    raise ValueError(f"its decoder is neither ByteLevel nor ByteFallback, but {sorted(map(str, kinds))}")


def _parts(decoder: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(decoder, dict):
        yield decoder
        for part in decoder.get("decoders", ()):
            yield from _parts(part)


def _is_space(part: Mapping[str, Any]) -> bool:
    """Whether this decoder writes a space in place of one character."""
    pattern = part.get("pattern")
    return part.get("content") == " " and isinstance(pattern, dict) and len(pattern.get("String", "")) == 1


def _with_byte_tokens(token: str, space: str) -> bytes:
    match = BYTE_TOKEN.fullmatch(token)
    return bytes((int(match[1], 16),)) if match else token.replace(space, " ").encode()


def _of_byte_level(token: str) -> bytes | None:
    values = [BYTE_OF_CHAR.get(char) for char in token]
    return None if None in values else bytes(value for value in values if value is not None)


def state_of(part: Any) -> Any:
    """A normalizer or pre-tokenizer as tokenizer.json writes it."""
    return None if part is None else json.loads(part.__getstate__())
