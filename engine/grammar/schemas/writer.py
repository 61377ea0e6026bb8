"""Writes nodes (`shapes`) as a grammar in Lark for llguidance.

Values of one text each (numbers, strings, constants) that may stand in one place become one terminal. Blanks are parts
of the terminals of punctuation, so nothing is skipped and every run of blanks is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from inferd.engine.api.grammars import BLANK
from inferd.engine.grammar.schemas.numbers import described, expressions_of
from inferd.engine.grammar.schemas.reader import Notices, Read, Reader
from inferd.engine.grammar.schemas.regexes import fault, is_empty, nested, schema_of, searched
from inferd.engine.grammar.schemas.shapes import (
    AnyOf,
    Anything,
    Arrays,
    Booleans,
    Node,
    Nothing,
    Null,
    Numbers,
    Objects,
    OneOf,
    Reference,
    SchemaError,
    Strings,
)
from inferd.engine.grammar.schemas.strings import CHARACTER, FORMATS, PLAIN_CHARACTER, all_spellings, quoted, repeated

_PUNCTUATION = {
    "OPEN": rf"/\{{{BLANK}/",
    "CLOSE": rf"/{BLANK}\}}/",
    "BEGIN": rf"/\[{BLANK}/",
    "END": rf"/{BLANK}\]/",
    "COMMA": rf"/{BLANK},{BLANK}/",
    "COLON": rf"/{BLANK}:{BLANK}/",
    "CHARACTER": f"/{CHARACTER}/",
    "PLAIN": f"/{PLAIN_CHARACTER}/",
}


class Impossible(Exception):
    """A node that allows no value; the text says why."""


class Writer:
    """Writes the grammar of one schema."""

    def __init__(self, reader: Reader, read: Read, notices: Notices) -> None:
        self._reader, self._read, self._notices = reader, read, notices
        self._lines: list[str] = []
        self._rules: dict[str, str] = {}
        """Names of rules and terminals by their bodies."""
        self._references: dict[str, str] = {}
        """Names of rules by pointer."""

    def text(self) -> str:
        """The grammar. Raises `Impossible` if it allows no value, and `SchemaError`."""
        return self._whole(self._item(self._read.root))

    def _whole(self, start: str) -> str:
        return "\n".join(
            (
                '%llguidance {"no_forcing": true}',
                f"start: {start}",
                *self._lines,
                *(f"{name}: {body}" for name, body in _PUNCTUATION.items()),
                "",
            )
        )

    def _rule(self, body: str) -> str:
        return self._named("r", body)

    def _terminal(self, body: str) -> str:
        return self._named("T", body)

    def _named(self, kind: str, body: str, options: str = "") -> str:
        name = self._rules.get(body)
        if name is None:
            name = self._rules[body] = f"{kind}{len(self._rules)}"
            self._lines.append(f"{name}{options}: {body}")
        return name

    # -- values ------------------------------------------------------------------------------------------------------

    def _item(self, node: Node) -> str:
        """The name of a rule or terminal. Raises `Impossible`."""
        terminals: list[str] = []
        rules: dict[str, None] = {}
        reasons: list[str] = []
        for option in self._options(node):
            try:
                for is_terminal, body in self._texts(option):
                    if is_terminal:
                        terminals.append(body)
                    else:
                        rules[body] = None
            except Impossible as error:
                reasons.append(str(error))
        if terminals:
            rules[self._terminal(" | ".join(dict.fromkeys(terminals)))] = None
        if not rules:
            raise Impossible(reasons[0] if reasons else "it lists no alternative")
        if len(rules) == 1:
            (only,) = rules
            return only
        return self._rule(" | ".join(rules))

    def _options(self, node: Node) -> Iterator[Node]:
        if isinstance(node, OneOf):
            reason = "its alternatives may overlap, so that at least one is enforced, not exactly one"
            self._notices.leave(node.path, reason)
        if isinstance(node, (AnyOf, OneOf)):
            for option in node.options:
                yield from self._options(option)
        else:
            yield node

    def _texts(self, node: Node) -> Iterator[tuple[bool, str]]:
        """(whether it is a terminal, body or name of a rule) of the texts of a node without alternatives."""
        match node:
            case Nothing():
                raise Impossible(node.reason)
            case Anything():
                yield False, self._anything()
            case Reference():
                yield False, self._reference(node.pointer)
            case Null():
                yield True, '"null"'
            case Booleans():
                yield True, "/true|false/" if node.value is None else f'"{str(node.value).lower()}"'
            case Numbers():
                expressions, schemas = expressions_of(node)
                if not expressions and not schemas:
                    raise Impossible(f"no {described(node)}")
                yield from ((True, f"/{expression}/") for expression in expressions)
                if schemas:
                    yield False, self._rule(nested({"anyOf": schemas}))
            case Strings():
                yield self._string(node)
            case Arrays():
                yield False, self._array(node)
            case Objects():
                yield False, self._object(node)

    def _anything(self) -> str:
        name = self._rules.get("anything")
        if name is None:
            name = self._rules["anything"] = "anything"
            inner = [self._item(node) for node in (Arrays(), Objects())]
            simple = self._item(AnyOf((Null(), Booleans(), Numbers(), Strings())))
            self._lines.append(f"anything: {' | '.join([simple, *inner])}")
        return name

    def _reference(self, pointer: str) -> str:
        name = self._references.get(pointer)
        if name is None:
            name = self._references[pointer] = f"d{len(self._references)}"
            try:
                self._lines.append(f"{name}: {self._item(self._read.definitions[pointer])}")
            except Impossible as error:
                self._references[pointer] = ""
                raise Impossible(f"the definition {pointer[:80]!r} allows no value: {error}") from error
        if not name:
            raise Impossible(f"the definition {pointer[:80]!r} allows no value")
        return name

    def _string(self, node: Strings) -> tuple[bool, str]:
        low, high = node.min_length, node.max_length
        if high is not None and low > high:
            raise Impossible("minLength is above maxLength")
        if node.value is not None and not node.patterns and not node.formats:
            if not low <= len(node.value) <= (len(node.value) if high is None else high):
                raise Impossible("a constant is too short or too long")
            return True, f"/{quoted(node.value)}/"
        if not node.patterns and not node.formats:
            return True, _quoted_characters(low, high)
        if len(node.formats) == 1 and not node.patterns and node.value is None and not low and high is None:
            expression, longest = FORMATS[node.formats[0]]
            limit = "" if longest is None else f" & /.{{0,{longest}}}/"
            return True, f'"\\"" (/{expression}/{limit}) "\\""'
        reason = fault(node)
        if reason:
            raise SchemaError(f"its rules for a string cannot be followed together: {reason}")
        if is_empty(node):
            raise Impossible("no string follows all of its rules")
        if node.value is not None:
            return True, f"/{quoted(node.value)}/"
        return False, self._rule(nested(schema_of(node)))

    # -- arrays ------------------------------------------------------------------------------------------------------

    def _array(self, node: Arrays) -> str:
        low, high = node.min_items, node.max_items
        if high is not None and low > high:
            raise Impossible("minItems is above maxItems")
        items: list[str] = []
        for schema in node.first[:high]:
            try:
                items.append(self._item(schema))
            except Impossible as error:
                if len(items) < low:
                    raise Impossible(f"item {len(items)}, which is required, allows no value: {error}") from error
                high = len(items)
                break
        num_first = len(items)
        tail = "" if high is not None and high <= num_first else self._more_items(node.rest, num_first, low, high)
        for i in reversed(range(num_first)):
            body = " ".join(part for part in ("COMMA" if i else "", items[i], tail) if part)
            tail = self._rule(body if i < low else f"({body})?")
        return self._rule(f"BEGIN {tail} END" if tail else "BEGIN END")

    def _more_items(self, schema: Node, num_before: int, low: int, high: int | None) -> str:
        """The items after `num_before` others, with the commas before them."""
        low = max(0, low - num_before)
        high = None if high is None else high - num_before
        try:
            item = self._item(schema)
        except Impossible as error:
            if low:
                raise Impossible(f"its items, of which {low} are required, allow no value: {error}") from error
            return ""
        if num_before:
            return _times(f"(COMMA {item})", low, high)
        more = f"{item} {_times(f'(COMMA {item})', max(0, low - 1), None if high is None else high - 1)}".rstrip()
        return more if low else f"({more})?"

    # -- objects -----------------------------------------------------------------------------------------------------

    def _object(self, node: Objects) -> str:
        items: list[tuple[str, bool]] = []
        """(property, whether it is required)"""
        taken: list[str] = []
        names = dict.fromkeys((*node.properties, *node.required))
        for name in names:
            is_required = name in node.required
            taken.append(name)
            try:
                value = self._item(self._reader.property_of(node, name))
            except Impossible as error:
                if is_required:
                    raise Impossible(f"the required property {name[:80]!r} allows no value: {error}") from error
                continue
            items.append((f"{self._name(name)} COLON {value}", is_required))
        num_required = sum(is_required for _, is_required in items)
        low = max(0, node.min_properties - num_required)
        high = None if node.max_properties is None else node.max_properties - num_required
        others = self._other_properties(node, taken)
        if num_required < len(items) and (low or high is not None):
            if not others and low <= 1 and high in (None, 1):
                return self._few_of(items, low, high)
            rule = "it is enforced only if all listed properties are required, or as a bound of 1"
            key = "minProperties" if low else "maxProperties"
            self._notices.leave(f"{node.path}.{key}", rule)
            low, high = 0, None
        if others and low > 1:
            rule = (
                "a name that the schema does not list may be repeated, so that it counts once: list the names in "
                f"'properties' and 'required', or ask for at most {num_required + 1}"
            )
            self._notices.leave(f"{node.path}.minProperties", rule)
        if others and high != 0:
            other = others[0] if len(others) == 1 else self._rule(" | ".join(others))
            more = _times(f"(COMMA {other})", max(0, low - 1), None if high is None else high - 1)
            items.append((f"{other} {more}".rstrip(), low > 0))
        elif low:
            raise Impossible("minProperties is above the number of properties that it allows")
        return self._rule(f"OPEN {self._in_order(items)} CLOSE" if items else "OPEN CLOSE")

    def _name(self, name: str) -> str:
        """An item of a rule for the name of a property."""
        return literal(json.dumps(name, ensure_ascii=False))

    def _few_of(self, items: Sequence[tuple[str, bool]], low: int, high: int | None) -> str:
        """Objects with at least `low` and at most `high` of the properties that are not required, each 0, 1 or None."""
        items = [(self._rule(item), is_required) for item, is_required in items]
        choices: list[list[tuple[str, bool]]] = []
        for i, (_, is_required) in enumerate(items):
            if not is_required and high == 1:
                choices.append([(item, True) for k, (item, needed) in enumerate(items) if needed or k == i])
            elif not is_required:
                choices.append([(item, needed or k == i) for k, (item, needed) in enumerate(items)])
        if not low:
            choices.append([(item, True) for item, needed in items if needed])
        return self._rule(" | ".join(f"OPEN {self._in_order(choice)} CLOSE" for choice in choices))

    def _in_order(self, items: Sequence[tuple[str, bool]]) -> str:
        """The properties one after the other, with commas between them."""
        num_first = next((i for i, (_, is_required) in enumerate(items) if is_required), len(items) - 1)
        """Index of the last property that may be the first one written."""
        if num_first:  # properties up to this one are written twice
            begin = [(self._rule(item), is_required) for item, is_required in items[: num_first + 1]]
            items = [*begin, *items[num_first + 1 :]]
        behind = [f"COMMA {item}" if is_required else f"(COMMA {item})?" for item, is_required in items]
        rest = " ".join(behind[num_first + 1 :])
        rest = self._rule(rest) if num_first and rest else rest
        first = ""
        for i in reversed(range(num_first + 1)):
            item, is_required = items[i]
            begun = f"{item} {rest}".rstrip()
            first = self._rule(begun if is_required else f"{begun} | {first}" if first else f"({begun})?")
            rest = f"{behind[i]} {rest}".rstrip()
            rest = self._rule(rest) if i and " " in rest else rest
        return first

    def _other_properties(self, node: Objects, taken: Sequence[str]) -> list[str]:
        """Rules for the properties that are not named."""
        found = []
        for pattern, schema in node.patterns.items():
            excluded = [name for name in taken if self._reader.names.matches(pattern, name)]
            try:
                value = self._item(schema)
            except Impossible:
                continue
            found.append(self._rule(f"{self._pattern_name(pattern, excluded, node.path)} COLON {value}"))
        try:
            value = self._item(node.rest)
        except Impossible:
            return found
        if not taken and not node.patterns:
            name = self._terminal(_quoted_characters(0, None))
            return [*found, self._rule(f"{name} COLON {value}")]
        spellings = [f"/{all_spellings(name)}/" for name in taken]
        expressions = [self._searched(pattern, node.path) for pattern in node.patterns]
        spellings += [f'"\\"" /{expression}/ "\\""' for expression in expressions if expression is not None]
        character = "PLAIN" if node.patterns else "CHARACTER"
        name = self._terminal(f'("\\"" {character}* "\\"") & ~({" | ".join(spellings)})')
        return [*found, self._rule(f"{name} COLON {value}")]

    def _pattern_name(self, pattern: str, excluded: Sequence[str], path: str) -> str:
        """Names that the pattern matches, apart from some."""
        if not excluded:
            return self._rule(nested(schema_of(Strings(patterns=(pattern,)))))
        expression = self._searched(pattern, path) or "(?s:.*)"
        names = " | ".join(f"/{quoted(name)}/" for name in excluded)
        return self._terminal(f'("\\"" (/{expression}/ & PLAIN*) "\\"") & ~({names})')

    def _searched(self, pattern: str, path: str) -> str | None:
        expression = searched(pattern)
        if expression is None:
            self._notices.leave(f"{path}.patternProperties.{pattern}", "its anchors are too intricate")
        return expression


def _quoted_characters(low: int, high: int | None) -> str:
    """A terminal for the strings of so many characters."""
    return " ".join(part for part in ('"\\""', _times("CHARACTER", low, high), '"\\""') if part)


def literal(text: str) -> str:
    """An item of a rule or a terminal for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def _times(item: str, low: int, high: int | None) -> str:
    """An item of a rule so many times, which Lark does not take as {0}."""
    return "" if high == 0 else f"{item}{repeated(low, high)}"
