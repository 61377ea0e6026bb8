"""Patterns of texts that a template shows, as far as models deviate from them: blanks are free, and places stand for
names, ids and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from inferd.server.tools.format import ID, INDEX, KEY, NAME

TAG = re.compile(r"<[^<>\n]{1,80}>|\[/?[A-Z][A-Z_ ]{1,40}\]")
"""A marker of most templates: `<...>` or `[NAME]`."""

_BLANKS = re.compile(r"(\s+|(?<=>)(?=<))")
_PLACES = re.compile(f"({'|'.join((NAME, ID, INDEX, KEY))})")
_PATTERNS = {ID: r"[\w.:\-]{1,64}", INDEX: r"[0-9]{1,4}", KEY: r"(?P=key)"}


def flexible(text: str, name: str = "") -> str:
    """A pattern of `text` in which blanks are free. `name`: pattern of the first `NAME`; others repeat it."""
    return "".join(_flexible_parts(text, name))


def may_precede(text: str) -> str:
    """A pattern of a marker that may be missing before another one."""
    return rf"(?:{flexible(text.strip())}\s*)?" if text.strip() else ""


def may_follow(text: str) -> str:
    """A pattern of a marker that may be missing behind another one."""
    return rf"(?:\s*{flexible(text.strip())})?" if text.strip() else ""


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
