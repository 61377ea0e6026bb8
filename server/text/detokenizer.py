"""Token ids -> text as they arrive: each character once, as soon as it is complete.

The text is the joined bytes of the ids, decoded as UTF-8, after those of the prompt. It does not depend on how the ids
were cut into deltas. Bytes that are no UTF-8 become U+FFFD once that is certain: an incomplete character waits for its
remaining bytes until `finish`.

A table of the bytes that each id adds is computed once from the tokenizer's decoder. Streams, log probabilities and
offsets use it instead of calling `decode` on a window of ids. Decoders that do not work token by token, such as CTC,
are refused by name when the tokenizer is loaded. Knows nothing of stop strings.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from tokenizers import Tokenizer

from inferd.engine.api.byte_alphabet import BYTE_OF_CHAR
from inferd.engine.api.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_JOINED_AT_ONCE = 2**15

_Piece = str | bytes
_Step = Callable[[_Piece], _Piece]


class TokenBytes:
    """The bytes of every id. Ids without a token (padding rows of the embedding) have none."""

    __slots__ = ("_known", "_special_ids", "_step", "_strip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `ModelError` for a decoder that cannot be read token by token."""
        decoder = tokenizer.decoder
        steps, self._strip = _WORDS if decoder is None else _steps_of(json.loads(decoder.__getstate__()))
        self._step = _compose(steps)
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text. Special tokens have bytes too."""
        known = self._known.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            known = b"" if token is None else _as_bytes(self._step(token))
            self._known[token_id] = known
        return known

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def join(self, token_ids: Iterable[int], skip_special: bool) -> bytes:
        """The bytes of a text that begins with these ids."""
        special = self._special_ids if skip_special else frozenset()
        pieces = (self.of(token_id) for token_id in token_ids if token_id not in special)
        # Some at a time: joining two million pieces in one call holds the interpreter lock for 40 ms.
        parts: list[bytes] = []
        while some := tuple(islice(pieces, _JOINED_AT_ONCE)):
            parts.append(b"".join(some))
        return self.strip_start(b"".join(parts))

    def strip_start(self, text: bytes) -> bytes:
        """`text` without the space that some tokenizers put before the first word of a text."""
        for _ in range(self._strip):
            text = text.removeprefix(b" ")
        return text


def _as_bytes(piece: _Piece) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace")


def _compose(steps: list[_Step]) -> _Step:
    def run(piece: _Piece) -> _Piece:
        for step in steps:
            piece = step(piece)
        return piece

    return run


def _steps_of(decoder: dict[str, object]) -> tuple[list[_Step], int]:
    """(steps applied to each token, number of spaces stripped from the start of the text)."""
    kind = decoder.get("type")
    if kind == "Sequence":
        return _sequence(decoder["decoders"])
    if kind == "ByteLevel":
        return [_byte_level], 0
    if kind == "ByteFallback":
        return [_byte_fallback], 0
    if kind == "Fuse":
        return [], 0
    if kind == "Replace":
        return [_replace(decoder)], 0
    if kind == "Metaspace":
        mark = str(decoder.get("replacement", "\u2581"))
        steps: list[_Step] = [_on_text(lambda text: text.replace(mark, " "))]
        return steps, 0 if decoder.get("prepend_scheme") == "never" else 1
    if kind == "WordPiece":
        return [_on_text(partial(_word_piece, str(decoder["prefix"]), bool(decoder["cleanup"])))], 1
    if kind == "Strip" and decoder.get("content") == " " and decoder.get("stop") == 0:
        start = decoder.get("start")
        assert isinstance(start, int)
        return [], start
    raise ModelError(
        f"the tokenizer's decoder {kind!r} cannot be read token by token; known are ByteLevel, ByteFallback, "
        "Metaspace, Replace, Strip (at the start), Fuse and WordPiece"
    )


def _sequence(decoders: object) -> tuple[list[_Step], int]:
    assert isinstance(decoders, list)
    steps: list[_Step] = []
    strip, is_fused = 0, False
    for decoder in decoders:
        new_steps, new_strip = _steps_of(decoder)
        if (new_strip and not is_fused and decoder["type"] == "Strip") or (new_steps and is_fused):
            raise ModelError(
                f"the tokenizer's decoder applies {decoder['type']!r} where it cannot be read token by token"
            )
        is_fused = is_fused or decoder["type"] == "Fuse"
        steps += new_steps
        strip += new_strip
    return steps, strip


def _on_text(change: Callable[[str], str]) -> _Step:
    """A step that changes text and leaves bytes as they are."""
    return lambda piece: piece if isinstance(piece, bytes) else change(piece)


def _word_piece(prefix: str, is_cleaned: bool, token: str) -> str:
    """A word with the space before it, or a part of a word, which begins with `prefix`. `is_cleaned`: no space comes
    before the marks of `_CLEANED`."""
    if token.startswith(prefix):
        return token.removeprefix(prefix)
    text = f" {token}"
    for spaced, tight in _CLEANED if is_cleaned else ():
        text = text.replace(spaced, tight)
    return text


_WORDS: tuple[list[_Step], int] = ([_on_text(" {}".format)], 1)
"""Tokens that are words, as of a tokenizer without a decoder: one space stands between two."""
_CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
    (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""As the tokenizers library cleans the text of each token."""


def _replace(decoder: dict[str, object]) -> _Step:
    pattern, content = decoder["pattern"], str(decoder["content"])
    assert isinstance(pattern, dict)
    if "String" not in pattern:
        raise ModelError("the tokenizer's decoder replaces by a regular expression, which is not read token by token")
    old = str(pattern["String"])
    return _on_text(lambda text: text.replace(old, content))


def _byte_fallback(piece: _Piece) -> _Piece:
    match = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return piece if match is None else bytes((int(match[1], 16),))


def _byte_level(piece: _Piece) -> _Piece:
    if isinstance(piece, bytes):
        return piece
    values = [BYTE_OF_CHAR.get(char) for char in piece]
    # An added token may hold characters that stand for no byte. Then its text is meant literally.
    return piece if None in values else bytes(value for value in values if value is not None)


_MAX_UTF8 = 4
_MAX_TAIL_IDS = 256
"""Ids at a prompt's end that are searched for its last character. Bounded because a prompt may end with any number of
special tokens, and each choice searches."""
_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one choice's output."""

    __slots__ = ("_decoder", "_is_start", "_is_text_start", "_kept_ids", "_skip_special", "_table")

    def __init__(
        self, table: TokenBytes, prompt_ids: Sequence[int], skip_special: bool, kept_ids: frozenset[int] = frozenset()
    ) -> None:
        """If the prompt ends inside a character, an output that completes it begins with the whole character.

        `kept_ids`: special tokens that are never skipped, because the parser of the text must see them.
        """
        self._table, self._skip_special, self._kept_ids = table, skip_special, kept_ids
        self._decoder = _new_decoder("replace")
        self._is_start = True
        tail = self._tail(prompt_ids)
        self._is_text_start = not tail
        self._decoder.decode(tail)

    def feed(self, token_id: int) -> str:
        """The characters that this id completes, or an empty text."""
        if self._skip_special and self._table.is_special(token_id) and token_id not in self._kept_ids:
            return ""
        piece = self._table.of(token_id)
        if self._is_start and piece:
            piece = self._begin(piece)
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """U+FFFD for a character that stays incomplete, or an empty text."""
        return self._decoder.decode(b"", True)

    def _begin(self, piece: bytes) -> bytes:
        self._is_start = False
        if not _is_continuation(piece[0]):
            # The prompt's last character will not be completed: it belongs to the prompt.
            self._decoder.reset()
        return self._table.strip_start(piece) if self._is_text_start else piece

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt's text, from the start of a character on; empty if there is no text."""
        tail = b""
        for token_id in prompt_ids[: -_MAX_TAIL_IDS - 1 : -1]:
            if not (self._skip_special and self._table.is_special(token_id)):
                tail = self._table.of(token_id) + tail
            if len(tail) >= _MAX_UTF8:
                break
        return _from_character_start(tail[-_MAX_UTF8:])


def _from_character_start(tail: bytes) -> bytes:
    """`tail` without leading continuation bytes, whose character was cut off; `tail` itself if it has nothing else."""
    start = next((i for i, byte in enumerate(tail) if not _is_continuation(byte)), None)
    return tail if start is None else tail[start:]


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def token_text(table: TokenBytes, token_id: int) -> str:
    """One token as text; a part of a character becomes U+FFFD."""
    return table.of(token_id).decode("utf-8", "replace")
