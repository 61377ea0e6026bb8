"""Tokens of grammars in llguidance's dialect of Lark, and the terminals that each grammar may import."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

COMMON = {
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"(\+|-)?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*)|(\.[0-9]+)",
    "_EXP": r"[eE](\+|-)?[0-9]+",
    "FLOAT": r"([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+",
    "SIGNED_FLOAT": r"(\+|-)?(([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+)",
    "NUMBER": r"([0-9]+)|([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+",
    "SIGNED_NUMBER": r"(\+|-)?(([0-9]+)|([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+)",
    "ESCAPED_STRING": r"\"([^\"\\]|\\.)*\"",
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[A-Za-z]",
    "WORD": r"[A-Za-z]+",
    "CNAME": r"[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""The terminals of `%import common`, as llguidance 1.9.1 defines them; a test compares them."""

_TOKENS = re.compile(
    r"""
      (?P<skip>(?:\#|//)[^\n]*|[ \t]+)
    | (?P<newline>(?:\r?\n)+[ \t]*)
    | (?P<keyword>%[a-z]+)
    | (?P<string>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1F\x7F])*"i?)
    | (?P<regexp>/(?:\\[^\n]|[^/\\])+/[imslux]*)
    | (?P<rule>!?[_?]?[a-z][_a-z0-9-]*)
    | (?P<terminal>_?[A-Z][_A-Z0-9-]*)
    | (?P<number>[+-]?[0-9]+)
    | (?P<op>[+*?])
    | (?P<token><[^<>\s]+>)
    | (?P<grammar>@[a-zA-Z0-9_-]+)
    | (?P<mark>->|\.\.|::|[:,.(){}\[\]~|&=_])
    """,
    re.VERBOSE,
)


class Token(NamedTuple):
    """A piece of a grammar's text."""

    kind: str
    """Name of a group of `_TOKENS`, or "end"."""
    text: str
    at: int
    """Position of its first character."""


def tokens_of(text: str) -> list[Token]:
    """The tokens of a grammar without blanks and comments, and one of the kind "end" behind them. Raises ValueError."""
    tokens, at = [], 0
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None:
            raise error_at(text, at, f"{text[at : at + 20]!r} begins nothing that Lark knows")
        kind, at = str(match.lastgroup), match.end()
        if kind == "keyword" and match[0] == "%llguidance":
            at = _end_of_options(text, at)
        elif kind != "skip":
            tokens.append(Token(kind, match[0], match.start()))
    return [*tokens, Token("end", "the end of the grammar", len(text))]


def _end_of_options(text: str, at: int) -> int:
    """Checks the object behind `%llguidance`, and returns the position of its end."""
    begin = len(text) - len(text[at:].lstrip())
    try:
        options, end = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        raise error_at(text, at, "'%llguidance' needs an object of JSON behind it") from error
    for name in options if isinstance(options, dict) else ("",):
        if name != "no_forcing":
            raise error_at(text, at, f"'%llguidance' sets {name!r}; only 'no_forcing' may be set")
    return end


def error_at(text: str, at: int, reason: str) -> ValueError:
    """The error with the number of the line of a position."""
    return ValueError(f"line {text.count(chr(10), 0, at) + 1} of the grammar: {reason}")
