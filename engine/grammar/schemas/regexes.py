"""Regular expressions of callers, which llguidance judges: can they be followed, what do they match?"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache

from llguidance import LLMatcher, regex_to_lark

from inferd.engine.grammar.schemas.shapes import SchemaError, Strings
from inferd.engine.grammar.schemas.strings import FORMATS, MOST_REPETITIONS

_ERROR = re.compile(r"(?:error: |JSON schema: )([^\n]*)")
_NO_TEXT = "Unsatisfiable schema"


def schema_of(strings: Strings) -> dict[str, object]:
    """The schema by which llguidance follows strings with patterns."""
    most = strings.max_length
    lengths: dict[str, object] = {"minLength": min(strings.min_length, MOST_REPETITIONS)} if strings.min_length else {}
    if most is not None and most <= MOST_REPETITIONS:
        lengths["maxLength"] = most
    if strings.value is not None:
        lengths["const"] = strings.value
    patterns = [*strings.patterns]
    for name in strings.formats:
        expression, longest = FORMATS[name]
        patterns.append(f"^({expression})$")
        if longest is not None:
            patterns.append(f"^(?s:.{{0,{longest}}})$")
    if len(patterns) == 1:
        return {"type": "string", "pattern": patterns[0], **lengths}
    return {"type": "string", **lengths, "allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}


def nested(schema: object) -> str:
    """The item of a rule in Lark for a schema that llguidance compiles."""
    assert isinstance(schema, dict)
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})


def fault(strings: Strings) -> str:
    """Why llguidance cannot follow these strings; empty if it can, or if there are none."""
    return "" if is_empty(strings) else _reason(strings)


def is_empty(strings: Strings) -> bool:
    """Whether no string follows all the rules."""
    return _NO_TEXT in _judged(strings)


def _reason(strings: Strings) -> str:
    message = _judged(strings)
    found = _ERROR.findall(message)
    return (found[-1] if found else message[:200]).strip().rstrip(".")


@cache
def _judged(strings: Strings) -> str:
    """llguidance's error; empty if it compiles."""
    return LLMatcher.validate_grammar(f"start: {nested(schema_of(strings))}\n")


class PatternNames:
    """Names of properties and the patterns that match them."""

    def matches(self, pattern: str, name: str) -> bool:
        return not is_empty(Strings(patterns=(pattern,), value=name))

    def check_apart(self, patterns: Sequence[str]) -> None:
        """Raises `SchemaError` if two patterns may match one name."""
        for i, one in enumerate(patterns):
            for other in patterns[i + 1 :]:
                if not is_empty(Strings(patterns=(one, other))):
                    raise SchemaError(f"the patterns {one!r} and {other!r} may match the same name")


@cache
def searched(pattern: str) -> str | None:
    """An expression between slashes for the texts of which the pattern matches a part; None if the pattern has
    anchors in places that this cannot express."""
    parts = [_anchored(part) for part in _alternatives(regex_to_lark(pattern, "dw"))]
    found = "|".join(parts)
    is_right = not LLMatcher.validate_grammar(f"start: /({found})/\n")
    return f"({found})" if is_right else None


def _anchored(part: str) -> str:
    begins, ends = part.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", part) is not None
    inner = part[1 if begins else 0 : len(part) - 1 if ends else len(part)]
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern outside of all its brackets."""
    parts, depth, is_class, start, i = [], 0, False, 0, 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 1
        elif is_class:
            is_class = char != "]"
        elif char == "[":
            is_class = True
            i += pattern.startswith("[^", i)
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            parts.append(pattern[start:i])
            start = i + 1
        i += 1
    return [*parts, pattern[start:]]
