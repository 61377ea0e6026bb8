"""Writes an object as its properties in tags, which are a caller's texts, as a grammar in Lark for llguidance.

A string is written as it is, up to the text behind it. Any other value is JSON, or has tags or quotes of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from inferd.engine.api.grammars import PROPERTY, TagPart, TagTexts, literal_regex
from inferd.engine.grammar.schemas.reader import Notices, Read, Reader
from inferd.engine.grammar.schemas.regexes import fault, is_empty, searched
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
    Reference,
    SchemaError,
    Strings,
)
from inferd.engine.grammar.schemas.strings import FORMATS, repeated
from inferd.engine.grammar.schemas.writer import Impossible, Writer, literal

_KINDS: dict[type, str] = {
    Null: "null", Booleans: "boolean", Numbers: "number", Strings: "string", Arrays: "array", Objects: "object",
}  # fmt: skip
_SHAPES: tuple[Node, ...] = (Null(), Booleans(), Numbers(), Strings(), Arrays(), Objects())
_ANY_NAME = r"/[A-Za-z_][\w.\-]{0,63}/"


class TagWriter(Writer):
    """Writes the grammar of one schema of an object."""

    def __init__(self, reader: Reader, read: Read, notices: Notices, tags: TagTexts, bare: Collection[str]) -> None:
        """`bare`: names of the properties whose strings are written as they are."""
        super().__init__(reader, read, notices)
        self._tags, self._bare_names = tags, bare

    def text(self) -> str:
        """The grammar of the properties in their order, without others. Raises `Impossible`, and `SchemaError`."""
        choices: dict[str, None] = {}
        reasons = ["it allows no object"]
        for node in self._options(self._read.root):
            found = self._read.definitions[node.pointer] if isinstance(node, Reference) else node
            if isinstance(found, Objects):
                try:
                    choices[self._in_tags(found)] = None
                except Impossible as error:
                    reasons.append(str(error))
        if not choices:
            raise Impossible(reasons[-1])
        return self._whole(" | ".join(choices))

    def _in_tags(self, node: Objects) -> str:
        items: list[tuple[str, bool]] = []
        """(property in its tags, whether it is required)"""
        names = dict.fromkeys((*node.properties, *node.required))
        for name in sorted(names, key=str.lower) if self._tags.is_sorted else names:
            is_required = name in node.required
            schema = self._reader.property_of(node, name)
            try:
                value = self._rule(" | ".join(self._values(name, schema)))
            except Impossible as error:
                if is_required:
                    raise Impossible(f"the required property {name[:80]!r} allows no value: {error}") from error
                continue
            items.append((value, is_required))
        num_required = sum(is_required for _, is_required in items)
        if node.min_properties > num_required:
            self._notices.leave(f"{node.path}.minProperties", "it is enforced only if the properties are required")
        if node.max_properties is not None and node.max_properties < len(items):
            self._notices.leave(f"{node.path}.maxProperties", "it is enforced only if the properties are required")
        return self._rule(self._in_given_order(items, self._parts(self._tags.separator, "")))

    def _in_given_order(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """The items in their order, with the separator between those that are written."""
        if separator == '""':
            written = [self._rule(item) if is_required else f"({self._rule(item)})?" for item, is_required in items]
            return " ".join(written) or '""'
        first = further = '""'
        """The items from here on, as the first ones and behind others."""
        for item, is_required in reversed(items):
            rest = self._rule(f"{item} {further}")
            behind = self._rule(f"{separator} {rest}")
            first = rest if is_required else self._rule(f"{rest} | {first}")
            further = behind if is_required else self._rule(f"{behind} | {further}")
        return first

    def _values(self, name: str | None, schema: Node) -> Iterator[str]:
        """Alternatives of a property in its tags; None: of any name. Raises `Impossible` if there is none."""
        tags = self._tags
        before, behind = (*tags.before, PROPERTY), self._parts(tags.behind, name)
        string_behind = tags.behind if tags.string_behind is None else tags.string_behind
        if name is not None and name in self._bare_names:
            begin = self._parts((*before, *tags.between_of("string")), name)
            yield f"{begin} {self._bare(schema, string_behind, name)}"
            return
        if not (tags.kinds or tags.item):
            yield f"{self._parts((*before, *tags.between), name)} {self._item(schema)} {behind}"
            return
        by_text: dict[str, list[Node]] = {}
        for option in self._options(schema):
            found = self._read.definitions[option.pointer] if isinstance(option, Reference) else option
            for shape in _SHAPES if isinstance(found, Anything) else (found,):
                begin_parts = (*before, *tags.between_of(_KINDS.get(type(shape), "string")))
                by_text.setdefault(self._parts(begin_parts, name), []).append(shape)
        for between, shapes in by_text.items():
            strings = [shape for shape in shapes if isinstance(shape, Strings)]
            if strings:
                yield f"{between} {self._bare(AnyOf(tuple(strings)), string_behind, name)}"
            others = [shape for shape in shapes if not isinstance(shape, Strings)]
            if others:
                yield f"{between} {self._item(AnyOf(tuple(others)))} {behind}"

    def _bare(self, node: Node, behind: Sequence[TagPart], name: str | None) -> str:
        """Strings as they are, with the parts `behind` them. They do not hold the first of these."""
        first = behind[0] if behind and isinstance(behind[0], str) else ""
        end = first.partition(PROPERTY)[0] if name is None else first.replace(PROPERTY, name)
        rest = self._parts((first[len(end) :], *behind[1:]) if name is None and first else behind[bool(end) :], name)
        rules = []
        reasons = ["it allows no string"]
        for option in self._options(node):
            found = self._read.definitions[option.pointer] if isinstance(option, Reference) else option
            if isinstance(found, Anything):
                found = Strings()
            if isinstance(found, Strings) and (reason := fault(found)):
                raise SchemaError(f"its rules for a string cannot be followed together: {reason}")
            if not isinstance(found, Strings) or is_empty(found):
                reasons.append("no string follows all of its rules")
            elif found == Strings():
                # Free text holds no special token, so it ends at one by itself.
                text = f"/(.|\\n)*{literal_regex(end)}/{self._no_tag()}"
                rules.append(self._named("until", text, "[lazy]") if end else self._terminal("/(.|\\n)*/"))
            elif found.value is not None:
                rules.append(self._terminal(literal(found.value + end)))
            elif end:
                rules.append(self._terminal(f"({_bare_rules(found, end)}) {literal(end)}"))
            else:
                rules.append(self._terminal(_bare_rules(found, end)))
        if not rules:
            raise Impossible(reasons[-1])
        return f"{rules[0] if len(rules) == 1 else self._rule(' | '.join(rules))} {rest}"

    def _no_tag(self) -> str:
        """An expression behind that of a string which may stand in the place of tags."""
        first = self._tags.before[0] if self._tags.item and self._tags.before else ""
        return f" & ~/{literal_regex(first)}(.|\\n)*/" if first and isinstance(first, str) else ""

    # -- values inside of values -------------------------------------------------------------------------------------

    def _texts(self, node: Node) -> Iterator[tuple[bool, str]]:
        yield from super()._texts(node)
        if not self._tags.is_python:
            return
        # Python's spelling beside JSON's: models write the one that they know.
        match node:
            case Null():
                yield True, '"None"'
            case Booleans():
                yield True, "/True|False/" if node.value is None else f'"{node.value}"'
            case Strings(value=None, patterns=(), formats=()):
                yield True, f"/'[^'\\\\]{repeated(node.min_length, node.max_length)}'/"
            case Strings(value=str() as value) if not set("'\\\n") & set(value):
                yield True, literal(f"'{value}'")

    def _string(self, node: Strings) -> tuple[bool, str]:
        quote = self._tags.quote
        if not quote:
            return super()._string(node)
        return False, self._rule(f"{self._parts(quote, '')} {self._bare(node, quote, '')}")

    def _name(self, name: str) -> str:
        return literal(name) if self._tags.quote else super()._name(name)

    def _object(self, node: Objects) -> str:
        if not self._tags.item:
            in_order = sorted(node.properties.items(), key=lambda item: item[0].lower())
            return super()._object(replace(node, properties=dict(in_order)) if self._tags.is_sorted else node)
        if node.properties or node.required or isinstance(node.rest, Nothing):
            return self._in_tags(node)
        # The name at the end is free, too: no grammar can repeat it.
        return self._once("any_object" if node == Objects() else "", None, node.rest, "*")

    def _array(self, node: Arrays) -> str:
        if not self._tags.item:
            return super()._array(node)
        number = repeated(node.min_items, node.max_items)
        try:
            return self._once("any_array" if node == Arrays() else "", self._tags.item, node.rest, number)
        except Impossible:
            return self._rule('""')

    def _once(self, rule: str, name: str | None, schema: Node, number: str) -> str:
        """A rule for so many properties of one name. `rule`: its name, if its own values may hold it again."""
        if not rule:
            return self._rule(f"({self._rule(' | '.join(self._values(name, schema)))}){number}")
        if rule not in self._rules:
            self._rules[rule] = rule
            self._lines.append(f"{rule}: ({' | '.join(self._values(name, schema))}){number}")
        return rule

    def _other_properties(self, node: Objects, taken: Sequence[str]) -> list[str]:
        if not self._tags.quote:
            return super()._other_properties(node, taken)
        try:
            value = self._item(node.rest)
        except Impossible:
            return []
        names = f" & ~({' | '.join(map(literal, taken))})" if taken else ""
        return [self._rule(f"{self._terminal(f'{_ANY_NAME}{names}')} COLON {value}")]

    def _parts(self, parts: Sequence[TagPart], name: str | None) -> str:
        """Items of a rule for texts and special tokens of a property; None: one of any name."""
        items: list[str] = []
        text = ""
        for part in (*parts, 0):
            if isinstance(part, str):
                text += part if name is None else part.replace(PROPERTY, name)
                continue
            for i, piece in enumerate(text.split(PROPERTY)):
                items += [self._terminal(_ANY_NAME)] if i else []
                items += [literal(piece)] if piece else []
            items.append(f"<[{part}]>")
            text = ""
        return " ".join(items[:-1]) or '""'


def _bare_rules(node: Strings, end: str) -> str:
    parts = [f"~/(.|\\n)*{literal_regex(end)}(.|\\n)*/"] if end else []
    parts += [f"/(?s:.{repeated(node.min_length, node.max_length)})/"]
    for name in node.formats:
        expression, longest = FORMATS[name]
        parts += [f"/{expression}/", *([f"/(?s:.{{0,{longest}}})/"] if longest is not None else ())]
    for pattern in node.patterns:
        found = searched(pattern)
        if found is None:
            raise SchemaError(f"the anchors of the pattern {pattern[:80]!r} are too intricate")
        parts.append(f"/{found}/")
    return " & ".join(parts)
