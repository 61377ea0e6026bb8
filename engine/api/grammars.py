"""Keywords of JSON schemas, and pieces of grammars, which the server and the engine must read and write alike.

The server refuses keywords by their path before a grammar is compiled. The engine enforces them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
TYPE_KEYWORDS = frozenset(
    (
        "type", *NUMBER_KEYWORDS, "minLength", "maxLength", "pattern", "format",
        "items", "prefixItems", "additionalItems", "minItems", "maxItems",
        "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
    )
)  # fmt: skip
"""The type of a value, and rules for values of one type."""
COMBINING_KEYWORDS = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")
ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
        "$schema", "$id", "id", "$anchor", "contentEncoding", "contentMediaType", "discriminator", "x-guidance",
        "$defs", "definitions",
    )
)  # fmt: skip
"""Keywords that allow no value and exclude none."""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats of strings that are enforced."""

BLANK = r"(\r?\n([ ]{0,40}|\t{0,10})|[ ])?"
"""Blanks that may stand between the tokens of JSON: a space, or a line break and an indentation of ten levels of four
spaces or a tab. Bounded, so that a model cannot spend its answer on blanks."""

PROPERTY = "\0key\0"
"""Stands for a property's name in the texts of tags."""

TagPart = str | int
"""A text, or the id of a special token."""


@dataclass(frozen=True, slots=True)
class TagTexts:
    """How an object is written as its properties in tags: `before` name `between` value `behind` for each."""

    before: tuple[TagPart, ...]
    between: tuple[TagPart, ...]
    behind: tuple[TagPart, ...]
    separator: tuple[TagPart, ...] = ()
    """Between two properties."""
    kinds: Mapping[str, tuple[TagPart, ...]] = field(default_factory=dict)
    """JSON type of a value -> text between name and value, if that depends on it."""
    is_raw: bool = True
    """Whether strings are written as they are. Otherwise they are JSON, as all other values are."""
    string_behind: tuple[TagPart, ...] | None = None
    """Text behind a string; None: the same as behind other values."""
    quote: tuple[TagPart, ...] = ()
    """Text before and behind each string inside of a value, with bare names there. Empty: both are JSON."""
    item: str = ""
    """Name of an item of an array, if objects and arrays inside of a value are in tags, too."""
    is_sorted: bool = False
    """Whether names are written in the order of the alphabet."""
    is_python: bool = False
    """Whether values may also be written as Python writes them."""

    def between_of(self, kind: str) -> tuple[TagPart, ...]:
        """The parts between the name and a value of a JSON type."""
        return self.kinds.get(kind, self.between)


@dataclass(frozen=True, slots=True)
class SchemaUse:
    """How a JSON schema is used. The server writes it beside the schema in a grammar, and the compiler reads it."""

    where: str = "schema"
    """Path of the schema in the request."""
    is_lenient: bool = False
    """Whether what cannot be enforced is left to the model and told, not refused."""
    way_out: str = ""
    """Advice of a refusal."""
    tool: str = ""
    """Name of the tool that has the schema, for messages."""
    tags: TagTexts | None = None
    """Given if an object is written as its properties in tags."""
    told: tuple[str, ...] = ()
    """Notices of what else is left to the model."""


_NOT_PLAIN = re.compile(r"[^0-9A-Za-z_ ,:;=@'\"!%`<>]")


def literal_regex(text: str) -> str:
    """A regular expression for exactly `text`, which may stand between slashes. That of one character may also stand in
    a class."""
    return _NOT_PLAIN.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    if char.isprintable():
        return f"\\{char}" if char.isascii() else char
    return f"\\x{ord(char):02x}" if char.isascii() else f"\\u{{{ord(char):x}}}"
