"""Split points: places where a long text can be split so that the tokens of its parts are the tokens of the whole.

To tokenize a text takes 60 to 630 bytes of memory a character (2 cores, AMD EPYC Zen 4, 2026-11-22), so a long text is
tokenized in parts. A split must be safe on both sides: the part before it has the same tokens whatever follows, and the
part behind it has the same tokens whatever precedes. Two kinds of tokenizer are known to have such places:

- Tokenizers that split a text into words by one of the patterns below, and tokenize each word alone. No alternative of
  these patterns matches across the places in `_WORD_SPLITS`, and none looks past them.
- SentencePiece's BPE, which merges characters of the whole text. Two characters that are neighbours in no token of the
  vocabulary are never merged, so the text can be split between them.

For any other tokenizer `split_points_of` returns None.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

PART = 16 * 1024
"""Fewest characters of a part."""
MAX_PART = 128 * 1024
"""Most characters that are tokenized at a time if there is no split point: they take about 80 MiB at most."""
_SEARCH = 16 * 1024
"""Characters that one call searches. It holds the interpreter lock for 2 ms."""
_MAX_TRIES = 16
"""Most candidates that one search checks: with 256 added tokens each takes 60 us."""
_MAX_ADDED_CHARS = 1_024
"""Longest added token that is looked for around a split."""

Span = tuple[int, int]
"""(first character of a part, the character behind its last)."""

_SHORT = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_CONTRACTIONS = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)", *_SHORT)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(
    rf"[^\r\n\p{{L}}\p{{N}}]?{letters}{suffix}"
    for letters in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
    for suffix in ("", f"{_CONTRACTIONS[0]}?")
)
_TRIPLES = r"\p{N}{1,3}"
_KNOWN = frozenset(
    (*_CONTRACTIONS, *_CASED, _TRIPLES, r"\p{N}", r"\p{N}{1}", r" ?\p{N}+", r"\p{N}+", r" ?\p{L}+",
     r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
     r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
     r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+", r"\s")
)  # fmt: skip
"""Alternatives in the patterns of GPT-2, GPT-4, GPT-4o and their descendants."""
_LETTERS = frozenset(known for known in _KNOWN if r"\p{L}+" in known or known in _CASED or r"[\p{L}\p{M}]+" in known)

_HAN = "\u4e00-\u9fa5"
_WORD_SPLITS = (
    r"\S(?= \S)",
    r"[A-Za-z](?=[0-9])",
    r"[0-9](?=[A-Za-z])",
    rf"\S\n(?=[A-Za-z0-9{_HAN}])",
    rf"[{_HAN}](?=[\uff0c\u3002])",
)
"""Ends of words: a split is at the end of a match. Unicode composes none of these ends with the character behind it."""
_DIGITS = "0123456789"


def split_points_of(state: Mapping[str, Any]) -> SplitPoints | None:
    """`state`: the content of tokenizer.json. None for a tokenizer that is not known to have split points."""
    model, added = state["model"], state["added_tokens"]
    if model["type"] != "BPE" or model["dropout"] or any(len(item["content"]) > _MAX_ADDED_CHARS for item in added):
        return None
    contents = frozenset(item["content"] for item in added)
    normalizer, splitter = state["normalizer"], state["pre_tokenizer"]
    if (normalizer is None or normalizer["type"] == "NFC") and (digits := _digits_of(splitter)) is not None:
        return SplitPoints(contents, _word_splits(digits), is_nfc=normalizer is not None)
    mark = _mark_of(normalizer, splitter)
    if mark is None or any(item["normalized"] for item in added) or not _is_by_character(model):
        return None
    contents |= {content.replace(mark[0], " ") for content in contents}
    return SplitPoints(contents, _pair_splits(model["vocab"], *mark), num_dropped=int(mark[1]))


class SplitPoints:
    """Finds the split points for one tokenizer."""

    __slots__ = ("_added", "_find", "_is_nfc", "_lengths", "_num_dropped")

    def __init__(
        self, added: frozenset[str], find: Callable[[str, int, int], int], *, is_nfc: bool = False, num_dropped: int = 0
    ) -> None:
        """`added`: tokens found before the text is split into words; no split is near one.

        `find(text, start, first)`: the first candidate from `first` up to `first + _SEARCH`, or -1; the part begins at
        `start`. `num_dropped`: spaces behind a split that the tokenizer itself puts before a text.
        """
        self._added, self._find, self._is_nfc, self._num_dropped = added, find, is_nfc, num_dropped
        self._lengths = sorted({len(content) for content in added if content})

    def with_added(self, contents: Iterable[str]) -> SplitPoints:
        """For a tokenizer that has these added tokens, too."""
        added = self._added.union(contents)
        return SplitPoints(added, self._find, is_nfc=self._is_nfc, num_dropped=self._num_dropped)

    def spans(self, text: str) -> Iterator[Span | None]:
        """The parts of a text in order. A part may be longer than `MAX_PART` if it has no split point.

        Yields None after each search that finds nothing, so that the caller can let other requests go first.
        """
        start, first = 0, PART
        while len(text) - first > PART:
            cut, num_tries = self._find(text, start, first), 1
            while cut > 0 and not self._is_apart(text, cut):
                goes_on = cut < first + _SEARCH and num_tries < _MAX_TRIES
                cut, num_tries = self._find(text, start, cut + 1) if goes_on else -1, num_tries + 1
            if cut > 0:
                yield start, cut
                start = cut + self._num_dropped
                first = start + PART
            else:
                yield None
                first += _SEARCH
        yield start, len(text)

    def _is_apart(self, text: str, cut: int) -> bool:
        """Whether no added token touches the characters around the split or a space beside it."""
        if self._is_nfc and not unicodedata.is_normalized("NFC", text[max(0, cut - _NEAR) : cut + _NEAR]):
            return False
        return not any(
            text[i : i + length] in self._added
            for length in self._lengths
            for i in range(max(0, cut - 1 - length), cut + 2)
        )


_NEAR = 64
"""Characters on both sides of a split that must be in Unicode's normal form, because an added token may be matched in
the normalized text."""


def _word_splits(digits: int) -> Callable[[str, int, int], int]:
    """`digits`: digits in one word, counted from the first of a run; 0: the whole run."""
    patterns = (*_WORD_SPLITS, "[0-9](?=[0-9])") if digits == 1 else _WORD_SPLITS
    search = re.compile("|".join(patterns)).search

    def find(text: str, start: int, first: int) -> int:
        # In a longer part, each search would read the whole part again.
        if digits == 3 and first - start <= MAX_PART:
            run = start + len(text[start:first].rstrip(_DIGITS))
            cut = first + (run - first) % 3
            is_counted = run == start or not unicodedata.category(text[run - 1]).startswith("N")
            if is_counted and run < cut < len(text) and not text[run : cut + 1].strip(_DIGITS):
                return cut
        match = search(text, first, first + _SEARCH)
        return -1 if match is None else match.end()

    return find


def _pair_splits(vocabulary: dict[str, int], mark: str, is_prepended: bool) -> Callable[[str, int, int], int]:
    """Splits between characters that are neighbours in no token. `mark`, `is_prepended`: see `_mark_of`."""

    @cache
    def neighbours() -> frozenset[str]:
        """Every two characters that are neighbours in a token. Computed with the first long text: for 262,000 tokens
        this takes half a second. Searching all tokens for each pair of a text would take minutes."""
        return frozenset(first + second for token in vocabulary for first, second in pairwise(token))

    def is_safe(pair: str) -> bool:
        # A token may take all blanks beside it.
        return not pair.isspace() and pair.replace(" ", mark) not in neighbours()

    words = re.compile(rf"\S(?= (?!{re.escape(mark)})\S)")  # the tokenizer puts nothing before the mark itself

    def find(text: str, start: int, first: int) -> int:
        end = min(first + _SEARCH, len(text))
        if is_prepended:
            found = (match.end() for match in words.finditer(text, first - 1, end))
            return next((i for i in found if is_safe(text[i - 1 : i + 1])), -1)
        return next((i for i in range(first, end) if is_safe(text[i - 1 : i + 1])), -1)

    return find


def _digits_of(splitter: Any) -> int | None:
    """How many digits of a run make a word (0: all of them); None for an unknown splitter."""
    parts = splitter["pretokenizers"] if splitter and splitter["type"] == "Sequence" else [splitter]
    digits, has_words = 0, False
    for part in parts:
        kind = part and part["type"]
        if kind == "Digits":
            digits = digits or int(part["individual_digits"])
        elif kind == "ByteLevel" and not part["add_prefix_space"]:
            has_words |= part["use_regex"]
        elif kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            alternatives = _alternatives(part["pattern"].get("Regex", ""))
            if not _KNOWN.issuperset(alternatives):
                return None
            has_words |= bool(_LETTERS.intersection(alternatives))
            digits = digits or {r"\p{N}": 1, r"\p{N}{1}": 1, _TRIPLES: 3}.get(
                next((each for each in alternatives if r"\p{N}" in each and "[" not in each), ""), 0
            )
        else:
            return None
    return digits if has_words else None


def _alternatives(pattern: str) -> list[str]:
    """Split a pattern at the bars outside of groups and classes."""
    parts, depth, is_class, i, first = [], 0, False, 0, 0
    while i < len(pattern):
        char = pattern[i]
        is_class = char == "[" or (is_class and char != "]")
        depth += 0 if is_class else (char == "(") - (char == ")")
        if char == "|" and not depth and not is_class:
            parts.append(pattern[first:i])
            first = i + 1
        i += 2 if char == "\\" else 1
    return [*parts, pattern[first:]]


def _mark_of(normalizer: Any, splitter: Any) -> tuple[str, bool] | None:
    """For SentencePiece's BPE, (how a space is written, whether one is put before the text); otherwise None."""
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    mark, is_prepended = "", False
    for step in filter(None, steps):
        if step["type"] == "Prepend":
            is_prepended = True
        elif step["type"] == "Replace" and step["pattern"] == {"String": " "} and not mark:
            mark = step["content"]
        else:
            return None
    if splitter and splitter["type"] == "Metaspace" and not mark:
        return splitter["replacement"], splitter["prepend_scheme"] != "never"
    # A split at spaces finds none, because the mark has replaced them.
    has_no_words = splitter is None or (splitter["type"] == "Split" and splitter["pattern"] == {"String": " "})
    return (mark, is_prepended) if has_no_words and mark == "\u2581" else None


def _is_by_character(model: Any) -> bool:
    """Whether a character's tokens depend only on merges with its neighbours."""
    of_bytes = {f"<0x{byte:02X}>" for byte in range(256)}
    has_bytes = model["byte_fallback"] and model["vocab"].keys() >= of_bytes
    is_plain = not model["continuing_subword_prefix"] and not model["end_of_word_suffix"] and not model["ignore_merges"]
    merges_bytes = any("<0x" in token and token not in of_bytes for token in model["vocab"])
    return is_plain and not merges_bytes and (has_bytes or not model["fuse_unk"])
