"""A caller's grammar of free texts, for texts that a model writes inside a string of JSON.

The quoted grammar matches `json.dumps(text, ensure_ascii=False)[1:-1]` exactly for the texts that the grammar itself
matches. Knows no fields of requests.
"""

from __future__ import annotations

import json
from functools import lru_cache

from inferd.engine.api.grammars import BLANK
from inferd.engine.api.wire.grammar_check import MAX_GRAMMAR_BYTES
from inferd.server.structured.escaping import Quoter
from inferd.server.structured.language import Language, TextFormat, lark, literal, pattern, sequence
from inferd.server.structured.larks import parse_grammar
from inferd.server.structured.quoted_grammar import GrammarWriter
from inferd.server.structured.regexes import parse
from inferd.server.structured.sources import TOO_LARGE, regex_source
from inferd.server.structured.trees import NOTHING

MAX_DEFINITION_CHARS = 64 * 1024
"""Most characters of a caller's grammar."""


MAX_KEPT = 8
"""Grammars of free texts that are kept as they were rewritten, of at most 1.3 MB each. An agent sends the same one with
each turn of a conversation."""


@lru_cache(MAX_KEPT)
def json_text(key: str, text: TextFormat) -> Language:
    """The JSON objects with one member, `key`, whose value is a text of the grammar.

    Raises ValueError with the reason if the grammar cannot be enforced in a string of JSON.
    """
    blanks = pattern(BLANK)
    quoted = lark(quoted_lark(text.definition)) if text.syntax == "lark" else pattern(quoted_regex(text.definition))
    name = literal(json.dumps(key, ensure_ascii=False))
    begin = sequence(literal("{"), blanks, name, blanks, literal(":"), blanks, literal('"'))
    return sequence(begin, quoted, literal('"'), blanks, literal("}"))


def quoted_regex(regex: str) -> str:
    """A regular expression of the same texts, each as it stands inside a string of JSON.

    Both are in Rust's `regex` syntax. Raises ValueError for what has no such expression.
    """
    check_size(regex)
    node = Quoter({}).behind(parse(regex), "")
    text = regex_source(node if node is not None else NOTHING)
    if len(text) > MAX_GRAMMAR_BYTES:
        raise ValueError(TOO_LARGE)
    return text


def quoted_lark(text: str) -> str:
    """A grammar of the same texts, each as it stands inside a string of JSON.

    Both are in llguidance's dialect of Lark. The quoted grammar may not take what `%ignore` allows before the first
    lexeme or behind the last. Raises ValueError for what has no such grammar.
    """
    check_size(text)
    return GrammarWriter(parse_grammar(text)).text()


def check_size(definition: str) -> None:
    """Raises ValueError for a grammar that is too long."""
    if len(definition) > MAX_DEFINITION_CHARS:
        raise ValueError(f"it has {len(definition)} characters, but at most {MAX_DEFINITION_CHARS} are allowed")
