"""The checkpoint's vocabulary for llguidance: the bytes of every token, and the tokenizer for text.

Built from tokenizer.json, plus the tokens that only tokenizer_config.json adds, or from a GGUF file. Embedding rows
without a token are never allowed. llguidance could read tokenizer.json itself, in one call that holds the interpreter's
lock throughout. Here the lock is free between the parts, and what parsing leaves behind is given back to the system.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from inferd.engine.api.byte_alphabet import BYTE_OF_CHAR
from inferd.engine.api.checkpoint import documents_of
from inferd.engine.api.gguf import is_gguf
from inferd.engine.api.pinned_files import is_file, source_of
from inferd.engine.grammar.ports import GrammarError

_SPECIAL = b"\xff"
"""Mark of llguidance before the bytes of a token that no text can spell."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_END_NAMES = frozenset(("</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>"))
"""Tokens that end an answer by their names, as llguidance knows them."""

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [_IN_STRING + "{1,10}", _IN_STRING + "{1,30}", _IN_STRING + "+"]
"""Sets of tokens whose masks llguidance keeps, for characters in strings of JSON; they change no mask. Its own fourth
set, of blanks, takes 15 MiB more with 262,000 tokens, and no grammar that was measured gains by it. Without the shorter
two a mask in a string with a length limit takes ten times as long (0.7 instead of 0.07 ms; AMD EPYC (Zen 4),
2026-11-28)."""

Documents = Callable[[str], dict[str, Any] | None]


def load_vocabulary(path: Path, vocab_size: int) -> LLTokenizer:
    """`path`: the checkpoint's folder, or its GGUF file. `vocab_size`: number of embedding rows. Raises `GrammarError`
    for a tokenizer it cannot read."""
    try:
        return _read(path, vocab_size)
    except GrammarError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot read
        raise GrammarError(f"the tokenizer of {path.name} cannot constrain output: {str(error)[:200]}") from error
    finally:
        _give_memory_back()


def _read(path: Path, vocab_size: int) -> LLTokenizer:
    read = documents_of(path)
    tokenizer = _tokenizer_of(path, read)
    source = _Source(tokenizer, _added_tokens(tokenizer, read("tokenizer_config.json") or {}), vocab_size)
    vocabulary = LLTokenizer(source, eos_token=_eos_ids(read), slices=[])
    source.tokens = ()
    return vocabulary.with_slices(_SLICES)


class _Source(TokenizerWrapper):
    """The tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, added: Mapping[int, tuple[str, bool]], vocab_size: int) -> None:
        """`added`: id -> (text, whether it is special), of the tokens that are found before a text is split."""
        self.is_tokenizer_wrapper = True
        self.bos_token_id, self.special_token_ids = None, ()
        self._tokenizer = tokenizer
        self.tokens = list(_bytes_of_tokens(tokenizer, added, vocab_size))
        named = [token_id for token_id, (text, _) in sorted(added.items()) if text in _END_NAMES]
        self.eos_token_id = named[-1] if named else 0

    def __call__(self, text: str) -> list[int]:
        """The ids of a text that a grammar forces, as the checkpoint's tokenizer would write it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _tokenizer_of(path: Path, read: Documents) -> Tokenizer:
    """The checkpoint's tokenizer, without the space that it would put before a text. Texts here go on after others."""
    if is_gguf(path):
        tokenizer = Tokenizer.from_str(json.dumps(read("tokenizer.json")))
    else:
        file = path / "tokenizer.json"
        if not is_file(file):
            raise GrammarError(f"{path.name} has no tokenizer.json, which constrained output is built from")
        tokenizer = Tokenizer.from_file(str(source_of(file)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    normalizer, splitter = _state_of(tokenizer.normalizer), _state_of(tokenizer.pre_tokenizer)
    plain = _without_space(normalizer), _without_space(splitter)
    if plain != (normalizer, splitter):
        parts = _tokenizer_with(*plain)
        tokenizer.normalizer, tokenizer.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
    return tokenizer


def _state_of(part: Any) -> Any:
    """A normalizer or pre-tokenizer as tokenizer.json writes it."""
    return None if part is None else json.loads(part.__getstate__())


def _without_space(state: Any) -> Any:
    """A normalizer or pre-tokenizer that adds no space; None if nothing is left."""
    if not isinstance(state, dict):
        return state
    kind = state.get("type")
    if kind == "Prepend":
        return None
    if kind == "Metaspace":
        return {**state, "prepend_scheme": "never"}
    for name in ("normalizers", "pretokenizers"):
        if name in state:
            parts = [part for part in map(_without_space, state[name]) if part is not None]
            return {**state, name: parts} if parts else None
    return state


def _tokenizer_with(normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    """A tokenizer of no tokens, which has these parts."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return Tokenizer.from_str(json.dumps({"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model}))


def _added_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Id -> (text, whether it is special) of the tokens that tokenizer.json or tokenizer_config.json adds."""
    added = {
        int(token_id): (token["content"], bool(token.get("special")))
        for token_id, token in (config.get("added_tokens_decoder") or {}).items()
    }
    known = tokenizer.get_added_tokens_decoder().items()
    return added | {token_id: (token.content, token.special) for token_id, token in known}


def _bytes_of_tokens(tokenizer: Tokenizer, added: Mapping[int, tuple[str, bool]], vocab_size: int) -> Iterator[bytes]:
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
    decoders = list(_parts(_state_of(tokenizer.decoder)))
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
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes((int(match[1], 16),)) if match else token.replace(space, " ").encode()


def _of_byte_level(token: str) -> bytes | None:
    values = [BYTE_OF_CHAR.get(char) for char in token]
    return None if None in values else bytes(value for value in values if value is not None)


def _eos_ids(read: Documents) -> list[int] | None:
    """The ids that end an answer according to the checkpoint; None leaves them to the tokenizer's own names."""
    ids: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        given = (read(name) or {}).get("eos_token_id")
        for token_id in given if isinstance(given, list) else [given]:
            if type(token_id) is int:
                ids[token_id] = None
    return list(ids) or None


def _give_memory_back() -> None:
    """Return to the system what parsing has left behind, if the allocator can (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
