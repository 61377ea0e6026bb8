"""Token ids -> text as they arrive: each character once, as soon as it is complete.

The text is the joined bytes of the ids, decoded as UTF-8, after those of the prompt. It does not depend on how the ids
were cut into deltas. Bytes that are no UTF-8 become U+FFFD once that is certain: an incomplete character waits for its
remaining bytes until `finish`. Knows nothing of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from inferd.server.text.token_bytes import TokenBytes

_MAX_UTF8 = 4
_MAX_TAIL_IDS = 256
"""Ids at a prompt's end that are searched for its last character. Bounded because a prompt may end with any number of
special tokens, and each choice searches."""
_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one choice's output."""

    __slots__ = ("_decoder", "_is_start", "_is_text_start", "_kept_ids", "_skip_special", "_table")

    def __init__(
        self,
        table: TokenBytes,
        prompt_ids: Sequence[int],
        skip_special: bool,
        kept_ids: frozenset[int] = frozenset(),
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
