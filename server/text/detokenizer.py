"""Token ids -> text as they arrive: every character once, as soon as it is whole.

The text is the UTF-8 reading of the joined bytes of the ids, after those of the prompt; it is the same for every way of
cutting the ids into deltas. What is no UTF-8 becomes U+FFFD once that is certain: an unfinished character waits for its
remaining bytes until `finish`. Knows nothing of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from inferd.server.text.token_bytes import TokenBytes

_MAX_UTF8 = 4
_MAX_TAIL_IDS = 256
"""Ids at a prompt's end in which the character that it ends with is looked for: a prompt may end with any number of
special tokens, and each choice looks."""
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
        """Where the prompt ends inside a character, the output that completes it begins with that whole character.

        `kept_ids`: special tokens that are text all the same, because what reads the text must see them.
        """
        self._table, self._skip_special, self._kept_ids = table, skip_special, kept_ids
        self._decoder = _new_decoder("replace")
        self._is_start = True
        tail = self._tail(prompt_ids)
        self._is_text_start = not tail
        self._decoder.decode(tail)

    def feed(self, token_id: int) -> str:
        """The characters that this id completes; often one or more, sometimes none."""
        if self._skip_special and self._table.is_special(token_id) and token_id not in self._kept_ids:
            return ""
        piece = self._table.of(token_id)
        if self._is_start and piece:
            piece = self._begin(piece)
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left of a character that will never be whole: U+FFFD, or nothing."""
        return self._decoder.decode(b"", True)

    def _begin(self, piece: bytes) -> bytes:
        self._is_start = False
        if not _is_continuation(piece[0]):
            # The prompt's own unfinished character stays the prompt's: it will not be finished now.
            self._decoder.reset()
        return self._table.strip_start(piece) if self._is_text_start else piece

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The unfinished character at the prompt's end with what stands before it; empty where there is no text."""
        tail = b""
        for token_id in prompt_ids[: -_MAX_TAIL_IDS - 1 : -1]:
            if not (self._skip_special and self._table.is_special(token_id)):
                tail = self._table.of(token_id) + tail
            if len(tail) >= _MAX_UTF8:
                break
        return _from_character_start(tail[-_MAX_UTF8:])


def _from_character_start(tail: bytes) -> bytes:
    """Without leading continuation bytes, whose beginning was cut off; but never nothing of something."""
    start = next((i for i, byte in enumerate(tail) if not _is_continuation(byte)), None)
    return tail if start is None else tail[start:]


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def token_text(table: TokenBytes, token_id: int) -> str:
    """One token as a text of its own; a part of a character shows as U+FFFD."""
    return table.of(token_id).decode("utf-8", "replace")
