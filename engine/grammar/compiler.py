"""Compiles grammar text to a matcher with limits.

The limits count work, not time, so that a grammar is accepted or refused the same way every time. Knows no requests and
no processes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import is_lark_syntax

from inferd.engine.api.grammars import SchemaUse
from inferd.engine.api.wire.grammar_check import MAX_REASON, Left
from inferd.engine.grammar.gbnf import lark_of
from inferd.engine.grammar.ports import GrammarError
from inferd.engine.grammar.schemas.compile import schema_grammar

LIMITS = LLParserLimits(
    max_items_in_row=4_000,
    step_max_items=20_000,
    step_lexer_fuel=100_000,
    max_lexer_states=50_000,
    # The parser states in a message are of no use to a caller, and may be long.
    verbose_errors=False,
)
"""Most work of one mask and most memory of one matcher. An object of 900 optional properties is within them."""

_SOURCE_LINE = re.compile(r"\d+ \||\^+$")
_REGEX_SOURCE = re.compile(r"regex parse error:.*?^\s*error: ", re.DOTALL | re.MULTILINE)
"""The part of an error that repeats the regular expression, which stands before it."""
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")


@dataclass(frozen=True, slots=True)
class NormalForm:
    """A grammar in Lark alone."""

    text: str
    left: tuple[Left, ...] = ()
    """Parts of schemas that are left to the model."""


def normal_form(text: str) -> NormalForm:
    """The grammar with every schema and every part in GBNF written in Lark. Raises `GrammarError`."""
    if not text.lstrip().startswith("{"):
        return NormalForm(_to_lark(text))
    parts, left = [], list[Left]()
    for part in json.loads(text)["grammars"]:
        name, schema = part.pop("name"), part.pop("json_schema", None)
        if schema is None:
            lark = _to_lark(part["lark_grammar"])
        else:
            lark, found = schema_grammar(schema, msgspec.convert(part, SchemaUse))
            left += found
        parts.append({"name": name, "lark_grammar": lark})
    return NormalForm(json.dumps({"grammars": parts}, ensure_ascii=False), tuple(left))


def _to_lark(text: str) -> str:
    if "::=" not in text or is_lark_syntax(text):
        return text
    try:
        return lark_of(text)
    except Exception as error:  # the converter raises bare Exception for what it cannot read
        raise GrammarError(f"not a grammar in GBNF: {brief(str(error))}") from error


def compile_grammar(vocabulary: LLTokenizer, text: str) -> LLMatcher:
    """A matcher at the start of the grammar. Raises `GrammarError`."""
    matcher = LLMatcher(vocabulary, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(brief(matcher.get_error()))
    return matcher


_ENDLESS = "a reference or a rule leads back to itself before it allows any text"
"""Replaces llguidance's own name for this error."""


def brief(reason: str) -> str:
    """An error of llguidance in one bounded line, without the source text and the notes for its developers."""
    if "NoExtensionBias" in reason:
        return _ENDLESS
    reason = _REGEX_SOURCE.sub("", reason)
    lines = (line.strip() for line in reason.replace("<non-verbose/>", "").splitlines())
    reason = " ".join(line for line in lines if line and not _SOURCE_LINE.match(line))
    return _PLACE.sub("", reason)[:MAX_REASON] or "no reason was given"
