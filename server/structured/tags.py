"""`structural_tag`: free text in which marked parts follow grammars.

Clients send two forms. The older one has `triggers` and `structures`; the newer one is a tree of `format` nodes. Pure
functions: a wrong part is refused with its path, and a tag that would be too long before it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from inferd.engine.api.wire.grammar_check import MAX_GRAMMAR_BYTES
from inferd.server.errors import messages as errors
from inferd.server.structured.bounds import GrammarSize, check_json
from inferd.server.structured.language import (
    REFERENCE_CHARS,
    Language,
    either,
    free_text,
    free_text_until_marked,
    lark,
    marked,
    pattern,
    repeat,
    sequence,
    shared,
)
from inferd.server.structured.schema import read_schema

Tokens = Mapping[str, int]
"""Special tokens of the vocabulary: text -> id."""

MAX_TAGS = 256
MAX_TAG_DEPTH = 16
_MAX_CHARS = 65_536


def read_tags(value: object, where: str, tokens: Tokens) -> Language:
    """The language of a structural tag. Raises `RequestError`."""
    if not isinstance(value, dict):
        raise errors.invalid_type(where, "an object", value)
    check_json(value, where, "the structural tag", MAX_GRAMMAR_BYTES)
    if "structures" in value or "triggers" in value:
        return _older_form(value, where, tokens)
    given = _properties(value, where, ("type", "format"), ())
    if given["type"] != "structural_tag":
        raise errors.not_among(f"{where}.type", given["type"], ("structural_tag",))
    return _Reader(tokens, where).node(given["format"], f"{where}.format", 0)


def _older_form(value: Mapping[str, object], where: str, tokens: Tokens) -> Language:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    given = _properties(value, where, ("structures", "triggers"), ("type",))
    reader = _Reader(tokens, where)
    tags = []
    for i, item in enumerate(_array(given["structures"], f"{where}.structures")):
        path = f"{where}.structures[{i}]"
        tag = _properties(item, path, ("begin", "end"), ("schema",))
        content = read_schema(tag.get("schema", True), f"{path}.schema", is_strict=True)
        begin = _text(tag["begin"], f"{path}.begin")
        end = _text(tag["end"], f"{path}.end", min_length=0, max_length=None)
        tags.append((begin, sequence(content, marked(end, tokens))))
    return reader.triggered(_texts(given["triggers"], f"{where}.triggers"), tags, where, 0, is_single=False)


class _Reader:
    """Reads the tree of the newer form for one vocabulary."""

    def __init__(self, tokens: Tokens, where: str) -> None:
        self._tokens, self._size = tokens, GrammarSize(where)
        self._readers: Mapping[str, Callable[[Mapping[str, object], str, int], Language]] = {
            "const_string": self._const,
            "json_schema": self._json,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def node(self, value: object, where: str, depth: int) -> Language:
        if depth > MAX_TAG_DEPTH:
            raise errors.invalid_value(where, value, f"At most {MAX_TAG_DEPTH} levels of formats are served.")
        if not isinstance(value, dict):
            raise errors.invalid_type(where, "an object", value)
        kind = value.get("type")
        if kind is None:
            raise errors.missing(f"{where}.type")
        if not isinstance(kind, str) or kind not in self._readers:
            raise errors.not_among(f"{where}.type", kind, self._readers)
        return self._readers[kind](value, where, depth)

    def triggered(
        self, triggers: list[str], tags: list[tuple[str, Language]], where: str, num_least: int, *, is_single: bool
    ) -> Language:
        """Free text in which the rest of a tag follows each trigger that the tag begins with."""
        rests: dict[str, list[Language]] = {trigger: [] for trigger in triggers}
        for begin, rest in tags:
            beginnings = [trigger for trigger in rests if begin.startswith(trigger)]
            if not beginnings:
                raise errors.invalid_value(f"{where}.triggers", begin, "Each tag must begin with one of the triggers.")
            once = shared(rest)
            for trigger in beginnings:
                self._size.add(len(begin) - len(trigger) + REFERENCE_CHARS)
                rests[trigger].append(self._begin(begin.removeprefix(trigger), once))
        tagged = either(
            *(
                sequence(free_text_until_marked(trigger, self._tokens), either(*those))
                for trigger, those in rests.items()
                if those
            )
        )
        if is_single:
            return tagged if num_least else either(tagged, free_text())
        return sequence(repeat(tagged, num_least, None), free_text())

    def _begin(self, begin: str, rest: Language) -> Language:
        return sequence(marked(begin, self._tokens), rest) if begin else rest

    def _const(self, value: Mapping[str, object], where: str, depth: int) -> Language:
        given = _properties(value, where, ("type", "value"), ())
        return marked(_text(given["value"], f"{where}.value"), self._tokens)

    def _json(self, value: Mapping[str, object], where: str, depth: int) -> Language:
        given = _properties(value, where, ("type", "json_schema"), ("style",))
        if given.get("style") not in (None, "json"):
            raise errors.not_among(f"{where}.style", given["style"], ("json",))
        return read_schema(given["json_schema"], f"{where}.json_schema", is_strict=True)

    def _regex(self, value: Mapping[str, object], where: str, depth: int) -> Language:
        given = _properties(value, where, ("type", "pattern"), ())
        return pattern(_text(given["pattern"], f"{where}.pattern"))

    def _grammar(self, value: Mapping[str, object], where: str, depth: int) -> Language:
        given = _properties(value, where, ("type", "grammar"), ())
        return lark(_text(given["grammar"], f"{where}.grammar"))

    def _any_text(self, value: Mapping[str, object], where: str, depth: int) -> Language:
        _properties(value, where, ("type",), ())
        return free_text()

    def _sequence(self, value: Mapping[str, object], where: str, depth: int) -> Language:
        return sequence(*self._elements(value, where, depth))

    def _or(self, value: Mapping[str, object], where: str, depth: int) -> Language:
        return either(*self._elements(value, where, depth))

    def _elements(self, value: Mapping[str, object], where: str, depth: int) -> list[Language]:
        given = _properties(value, where, ("type", "elements"), ())
        elements = _array(given["elements"], f"{where}.elements")
        return [self.node(item, f"{where}.elements[{i}]", depth + 1) for i, item in enumerate(elements)]

    def _tag(self, value: Mapping[str, object], where: str, depth: int) -> Language:
        return self._begin(*self._begun(value, where, depth))

    def _begun(self, value: object, where: str, depth: int) -> tuple[str, Language]:
        """(begin, language of the rest) of a tag. Free text as content reaches to the tag's end."""
        tag = _properties(value, where, ("begin", "content", "end"), ("type",))
        begin, end = (_text(tag[key], f"{where}.{key}", min_length=0) for key in ("begin", "end"))
        content = tag["content"]
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            self._any_text(content, f"{where}.content", depth + 1)
            return begin, free_text_until_marked(end, self._tokens)
        # A rule, because llguidance takes only some 30 nested brackets.
        inner = shared(self.node(content, f"{where}.content", depth + 1))
        return begin, sequence(inner, marked(end, self._tokens)) if end else inner

    def _tags(self, value: object, where: str, depth: int) -> list[tuple[str, Language]]:
        return [self._begun(item, f"{where}[{i}]", depth) for i, item in enumerate(_array(value, where))]

    def _triggered_tags(self, value: Mapping[str, object], where: str, depth: int) -> Language:
        given = _properties(value, where, ("type", "triggers", "tags"), ("at_least_one", "stop_after_first"))
        tags = self._tags(given["tags"], f"{where}.tags", depth)
        num_least = int(_flag(given, "at_least_one", where))
        triggers = _texts(given["triggers"], f"{where}.triggers")
        return self.triggered(triggers, tags, where, num_least, is_single=_flag(given, "stop_after_first", where))

    def _tags_with_separator(self, value: Mapping[str, object], where: str, depth: int) -> Language:
        given = _properties(value, where, ("type", "tags", "separator"), ("at_least_one", "stop_after_first"))
        tags = self._tags(given["tags"], f"{where}.tags", depth)
        tag = shared(either(*(self._begin(begin, rest) for begin, rest in tags)))
        separator = marked(_text(given["separator"], f"{where}.separator", min_length=0), self._tokens)
        if not _flag(given, "stop_after_first", where):
            tag = sequence(tag, repeat(sequence(separator, tag), 0, None))
        return tag if _flag(given, "at_least_one", where) else repeat(tag, 0, 1)


def _properties(
    value: object, where: str, required: Collection[str], optional: Collection[str]
) -> Mapping[str, object]:
    """An object with these keys and no others. Raises `RequestError` for the first that is unknown, then missing."""
    if not isinstance(value, dict):
        raise errors.invalid_type(where, "an object", value)
    unknown = next((key for key in value if key not in required and key not in optional), None)
    if unknown is not None:
        raise errors.unknown_parameter(f"{where}.{unknown}", None)
    for key in required:
        if value.get(key) is None:
            raise errors.missing(f"{where}.{key}")
    return value


def _text(value: object, where: str, *, min_length: int = 1, max_length: int | None = _MAX_CHARS) -> str:
    if not isinstance(value, str):
        raise errors.invalid_type(where, "a string", value)
    if len(value) < min_length:
        raise errors.empty_string(where)
    if max_length is not None and len(value) > max_length:
        raise errors.string_too_long(where, max_length, len(value))
    return value


def _flag(given: Mapping[str, object], name: str, where: str) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise errors.invalid_type(f"{where}.{name}", "a boolean", value)
    return bool(value)


def _array(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise errors.invalid_type(where, "an array of objects", value)
    if not value:
        raise errors.empty_array(where)
    if len(value) > MAX_TAGS:
        raise errors.array_too_long(where, MAX_TAGS, len(value))
    return value


def _texts(value: object, where: str) -> list[str]:
    return [_text(item, f"{where}[{i}]") for i, item in enumerate(_array(value, where))]
