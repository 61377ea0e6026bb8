"""Sets of characters, as far as they must be known: which characters of ASCII are in them.

Each is a class of Rust's `regex` syntax. Knows the names of classes and properties, and no syntax.
"""

from __future__ import annotations

import re
import string
import unicodedata
from dataclasses import dataclass

from inferd.server.structured.trees import SPECIAL

ASCII = frozenset(map(chr, range(0x80)))
_BLANKS = frozenset("\t\n\x0b\x0c\r ")
_LOWER, _UPPER, DIGITS = map(frozenset, (string.ascii_lowercase, string.ascii_uppercase, string.digits))
LETTERS = _LOWER | _UPPER
_CONTROLS = frozenset(map(chr, range(0x20))) | {"\x7f"}
PERL = {"d": DIGITS, "w": LETTERS | DIGITS | {"_"}, "s": _BLANKS}
_GRAPHIC = frozenset(map(chr, range(0x21, 0x7F)))
PUNCTUATION = _GRAPHIC - LETTERS - DIGITS
POSIX = {
    "alnum": LETTERS | DIGITS, "alpha": LETTERS, "ascii": ASCII, "blank": frozenset("\t "), "cntrl": _CONTROLS,
    "digit": DIGITS, "graph": _GRAPHIC, "lower": _LOWER, "print": _GRAPHIC | {" "},
    "punct": PUNCTUATION, "space": _BLANKS, "upper": _UPPER, "word": PERL["w"],
    "xdigit": DIGITS | frozenset("abcdefABCDEF"),
}  # fmt: skip
_PROPERTIES = {
    "any": SPECIAL, "ascii": SPECIAL, "assigned": SPECIAL, "common": SPECIAL, "zyyy": SPECIAL,
    "whitespace": _BLANKS, "wspace": _BLANKS, "space": _BLANKS, "patternwhitespace": _BLANKS, "patws": _BLANKS,
    "patternsyntax": frozenset('"\\'), "patsyn": frozenset('"\\'), "graphemebase": frozenset('"\\'),
    "grbase": frozenset('"\\'), "quotationmark": frozenset('"'), "qmark": frozenset('"'),
}  # fmt: skip
"""Properties of Unicode that hold for some special characters. No other script or binary property does."""
_CATEGORIES = {
    "othercontrol": "cc", "control": "cc", "cntrl": "cc", "other": "c", "punctuation": "p", "punct": "p",
    "otherpunctuation": "po", "separator": "z", "letter": "l", "mark": "m", "number": "n", "symbol": "s",
    "uppercaseletter": "lu", "lowercaseletter": "ll", "decimalnumber": "nd", "digit": "nd", "spaceseparator": "zs",
}  # fmt: skip
_CATEGORY = re.compile("c[cfnos]?|l[cltmou]?|m[cen]?|n[dlo]?|p[cdefios]?|s[ckmo]?|z[lps]?")


@dataclass(frozen=True, slots=True)
class CharSet:
    """A set of characters."""

    ascii: frozenset[str] = frozenset()
    """Those of ASCII."""
    is_ascii: bool = True
    """Whether it has no others."""
    is_exact: bool = True
    """Whether `ascii` is right for all of ASCII, and not only for the characters that JSON escapes."""

    @classmethod
    def of(cls, char: str) -> CharSet:
        return cls(ASCII & {char}, char in ASCII)

    @classmethod
    def between(cls, first: str, last: str) -> CharSet:
        """Both ends included."""
        return cls(frozenset(char for char in ASCII if first <= char <= last), last in ASCII)

    def __or__(self, other: CharSet) -> CharSet:
        return self._joined(other, self.ascii | other.ascii, self.is_ascii and other.is_ascii)

    def __and__(self, other: CharSet) -> CharSet:
        return self._joined(other, self.ascii & other.ascii, self.is_ascii or other.is_ascii)

    def __sub__(self, other: CharSet) -> CharSet:
        return self._joined(other, self.ascii - other.ascii, self.is_ascii)

    def __xor__(self, other: CharSet) -> CharSet:
        return self._joined(other, self.ascii ^ other.ascii, self.is_ascii and other.is_ascii)

    def __invert__(self) -> CharSet:
        return CharSet(ASCII - self.ascii, is_ascii=False, is_exact=self.is_exact)

    def _joined(self, other: CharSet, ascii: frozenset[str], is_ascii: bool) -> CharSet:
        return CharSet(ascii, is_ascii, self.is_exact and other.is_exact)


def with_property(name: str) -> CharSet:
    """The characters with a property of Unicode. Raises ValueError if it is not known which they are."""
    if "!=" in name:
        raise ValueError(f"has '\\p{{{name}}}', which Rust reads as '='; write '\\P{{..=..}}'")
    kind, _, value = re.sub(r"[\s_-]", "", name.lower()).replace(":", "=").rpartition("=")
    if kind in ("gcb", "graphemeclusterbreak", "wb", "wordbreak", "sb", "sentencebreak"):
        raise ValueError(f"uses the property '{name}', which is not supported in a text that JSON escapes")
    category = _CATEGORIES.get(value, value)
    if kind == "age":
        held = SPECIAL
    elif value in _PROPERTIES and kind not in ("gc", "generalcategory"):
        held = _PROPERTIES[value]
    elif kind not in ("sc", "script", "scx", "scriptextensions") and _CATEGORY.fullmatch(category):
        held = frozenset(char for char in SPECIAL if unicodedata.category(char).lower().startswith(category))
    else:
        held = frozenset()
    return CharSet(held, is_ascii=False, is_exact=False)
