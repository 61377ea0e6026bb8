"""A vocabulary as a few flat arrays in one block of bytes, which processes can map: the bytes of every token, the
merges of its BPE model, and the words that the model takes whole.

Knows no tokenizer. Integers have the machine's byte order, since the block never leaves it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import msgspec
import tokenizers

MADE_BY = f"1 {tokenizers.__version__}"
"""Version of this layout, and of the library that read the tokenizer. Another one's block is not used: a server may
start an engine after an upgrade."""
DROPPED_ID = 2**32 - 1
"""Symbol of a character that the tokenizer drops. A word with one is no token, whatever the rest of it would be."""
SPACE = "\u2581"
"""Tokenizers in the style of SentencePiece write it in place of a space."""
_LENGTH_BYTES = 8
_ALIGNED_BYTES = 8
_ITEMS: tuple[Literal["B", "I", "Q"], ...] = ("B", "I", "Q", "Q", "B", "I", "I")
"""Type of the items of each array."""
_NONE = array("Q")


class VocabularyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a vocabulary beside its arrays."""

    num_rows: int
    """Number of embedding rows."""
    eos_id: int
    """The token that ends an answer by its name; 0 if none does."""
    eos_ids: tuple[int, ...] = ()
    """The ids that end an answer according to the checkpoint."""
    symbols: str = ""
    """The tokenizer without merges, as tokenizer.json writes it. It turns a text into words of single symbols. Empty if
    only the library's whole tokenizer tokenizes texts as the checkpoint does."""
    takes_words: bool = False
    """Whether a word that is a token becomes this token, whatever the merges say."""
    joins_with_space: str | None = None
    """The characters that merges join with a `SPACE` behind them. Such tokenizers do not cut texts into words, but no
    merge crosses the place before a space if another character is there. None if that is not so."""


class _Head(msgspec.Struct, frozen=True):
    made_by: str
    facts: VocabularyFacts
    sizes: tuple[int, ...]
    """Bytes of each array."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Arrays of bytes (B), and of integers of 32 (I) and 64 bits (Q)."""

    facts: VocabularyFacts
    spelled: memoryview
    """B: the bytes of all tokens, one after the other."""
    spelled_ends: memoryview
    """I: the end of those of each token."""
    pairs: memoryview
    """Q: left id x 2^32 + right id of every merge, sorted."""
    results: memoryview
    """Q: rank of the merge x 2^32 + id of what it makes."""
    words: memoryview
    """B: all words that are tokens in UTF-8, sorted, one after the other; none without `takes_words`."""
    word_ends: memoryview
    """I: the end of each word."""
    word_ids: memoryview
    """I: its id."""

    @classmethod
    def of(cls, block: memoryview) -> Tables | None:
        """None if another version wrote the block."""
        begin = _LENGTH_BYTES + int.from_bytes(block[:_LENGTH_BYTES], "little")
        try:
            head = msgspec.msgpack.decode(block[_LENGTH_BYTES:begin], type=_Head)
        except msgspec.MsgspecError:
            return None
        if head.made_by != MADE_BY:
            return None
        views = []
        for item, size in zip(_ITEMS, head.sizes, strict=True):
            begin += -begin % _ALIGNED_BYTES
            views.append(block[begin : begin + size].cast(item))
            begin += size
        return cls(head.facts, *views)

    def tokens(self) -> list[bytes]:
        """The bytes of every token."""
        spelled = bytes(self.spelled)
        return [spelled[begin:end] for begin, end in pairwise((0, *self.spelled_ends))]


def block_of(
    facts: VocabularyFacts,
    tokens: Sequence[bytes],
    pairs: array[int] = _NONE,
    results: array[int] = _NONE,
    words: Sequence[tuple[bytes, int]] = (),
) -> bytes:
    """The block that `Tables.of` reads. `words`: (word, id), in order."""
    arrays = (
        b"".join(tokens),
        array("I", accumulate(map(len, tokens))),
        pairs,
        results,
        b"".join(word for word, _ in words),
        array("I", accumulate(len(word) for word, _ in words)),
        array("I", (token_id for _, token_id in words)),
    )
    parts = [bytes(part) for part in arrays]
    head = msgspec.msgpack.encode(_Head(MADE_BY, facts, tuple(map(len, parts))))
    block = bytearray(len(head).to_bytes(_LENGTH_BYTES, "little") + head)
    for part in parts:
        block += bytes(-len(block) % _ALIGNED_BYTES) + part
    return bytes(block)
