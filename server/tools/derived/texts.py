"""Common beginnings and ends of rendered texts, without half a tag."""

from __future__ import annotations

import re

from inferd.server.tools.patterns import TAG

_RARE = re.compile(r"[<>{}\[\]|@^\\$\u00a4-\u00b7\u2022-\u2bff]")
"""Symbols that prose in no language needs."""
_SIDES = {"begin", "start", "open", "end", "close", "stop", "sep"}


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


def parted(after: str, way: str, before: str) -> tuple[str, str, str]:
    """(end of an item, text between two items, begin of an item). `after`: text behind the last item, `way`: between
    two, and `before`: before the first."""
    end = common_prefix(after, way)
    rest = way[len(end) :]
    begin = common_suffix(before, rest) if rest else ""
    longest = common_suffix(before, way)
    both = longest[: len(longest) - len(begin)]
    if both.strip() and rest == begin and end.endswith(both) and end != both:
        # A text that stands before each marker, also before the one behind the last item.
        return end[: len(end) - len(both)], "", longest
    return end, rest[: len(rest) - len(begin)], begin


def tags_in(text: str) -> list[str]:
    return TAG.findall(text)


def words_of(tag: str) -> set[str]:
    """The words in a marker, without those for begin and end."""
    return {word.lower() for word in re.findall(r"[^\W\d_]{3,}", tag)} - _SIDES


def is_rare(text: str) -> bool:
    """Whether no ordinary answer has this text: it has a tag, several words, or a symbol beside a word."""
    text = text.strip()
    has_symbol = bool(_RARE.search(text)) and len(text) > 2 and any(char.isalpha() for char in text)
    return bool(TAG.search(text)) or len(text.split()) > 3 or has_symbol


def are_a_pair(begin: str, end: str) -> bool:
    """Whether both tags name the same."""
    return bool(words_of(begin) & words_of(end))


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
