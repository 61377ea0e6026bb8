"""Common beginnings and ends of rendered texts, without half a tag, and patterns for texts with free blanks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from inferd.server.tools.format import ID, INDEX, KEY, NAME

TAG = re.compile(r"<[^<>\n]{1,80}>|\[/?[A-Z][A-Z_ ]{1,40}\]")
"""A marker of most templates: `<...>` or `[NAME]`."""

_SIDES = {"begin", "start", "open", "end", "close", "stop", "sep"}

_BLANKS = re.compile(r"(\s+|(?<=>)(?=<))")
_PLACES = re.compile(f"({'|'.join((NAME, ID, INDEX, KEY))})")
_PATTERNS = {ID: r"[\w.:\-]{1,64}", INDEX: r"[0-9]{1,4}", KEY: r"(?P=key)"}


def common_prefix(first: str, *others: str, has_words: bool = True) -> str:
    """The longest text that all begin with, without half a tag or half a word. `has_words`: whether blanks part the
    words."""
    texts = (first, *others)
    end = next((i for i in range(min(map(len, texts))) if len({text[i] for text in texts}) > 1), min(map(len, texts)))
    while True:
        cuts = [_cut_before(text, end, has_words=has_words) for text in texts]
        if min(cuts) == end:
            return first[:end]
        end = min(cuts)


def common_suffix(first: str, *others: str) -> str:
    """The longest text that all end with, without half a tag or half a word."""
    texts = (first, *others)
    most = min(map(len, texts))
    num = next((i for i in range(most) if len({text[-1 - i] for text in texts}) > 1), most)
    while True:
        cuts = [len(text) - _cut_after(text, len(text) - num) for text in texts]
        if min(cuts) == num:
            return first[len(first) - num :]
        num = min(cuts)


def tags_in(text: str) -> list[str]:
    return TAG.findall(text)


def words_of(tag: str) -> set[str]:
    """The words in a marker, without those for begin and end."""
    return {word.lower() for word in re.findall(r"[^\W\d_]{3,}", tag)} - _SIDES


def are_a_pair(begin: str, end: str) -> bool:
    """Whether both tags name the same."""
    return bool(words_of(begin) & words_of(end))


def flexible(text: str, name: str = "") -> str:
    """A pattern of `text` in which blanks are free. `name`: pattern of the first `NAME`; others repeat it."""
    return "".join(_flexible_parts(text, name))


def _flexible_parts(text: str, name: str) -> Iterator[str]:
    for part in _PLACES.split(text):
        if part == NAME:
            yield name or "(?P=name)"
            name = ""
        elif part in _PATTERNS:
            yield _PATTERNS[part]
        else:
            # Models also write blanks beside a tag if the template has none there.
            words = _BLANKS.split(part)
            yield r"\s*" if part != text[: len(part)] and part.startswith("<") else ""
            yield from (r"\s*" if i % 2 else re.escape(word) for i, word in enumerate(words))


def _cut_before(text: str, end: int, *, has_words: bool) -> int:
    """The last position up to `end` that is in no tag and in no word."""
    for tag in TAG.finditer(text):
        if tag.start() < end < tag.end():
            return tag.start()
    while has_words and 0 < end < len(text) and text[end - 1].isalnum() and text[end].isalnum():
        end -= 1
    return end


def _cut_after(text: str, start: int) -> int:
    """The first position from `start` on that is in no tag and in no word."""
    for tag in TAG.finditer(text):
        if tag.start() < start < tag.end():
            return tag.end()
    while 0 < start < len(text) and text[start - 1].isalnum() and text[start].isalnum():
        start += 1
    return start
