"""Tool calls as languages: what a model may write if calls are required, restricted, or must follow their schemas.

Pure functions of a format's call syntax and of the tools' schemas. Knows no fields except the tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferd.server.errors import table as errors
from inferd.server.schema.caller_tool import TEXT_KEY, CallerTool, TextFormat
from inferd.server.structured.bounds import GrammarSize
from inferd.server.structured.language import (
    Language,
    either,
    free_text,
    free_text_until,
    lark,
    literal,
    marked,
    one_of,
    pattern,
    repeat,
    sequence,
    shared,
)
from inferd.server.structured.quoted import json_text
from inferd.server.structured.schema import has_reference, read_schema
from inferd.server.structured.tags import Tokens
from inferd.server.tools.format import CallSyntax, ReasoningSyntax, Tags

MAX_CALLS = 128
"""Most calls in one answer under a grammar."""

_BLANKS = pattern(r"[ \n]{0,4}")
"""Blanks between the end of reasoning and the answer."""

_NO_CALL = r"(\p{White_Space}*[^\p{White_Space}{\[](.|\n)*)?"
"""A text that does not begin with JSON, leading blanks aside."""

_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallRules:
    """The calls that an answer may hold."""

    tools: tuple[CallerTool, ...]
    """The tools that may be called."""
    is_required: bool
    """Whether the answer must be calls alone, apart from reasoning."""
    is_single: bool
    """Whether at most one call is allowed."""


def answer_with_calls(
    rules: CallRules, syntax: CallSyntax, tokens: Tokens, answer: Language | None, before: Language, opening: Language
) -> Language:
    """The language of the whole output: `before` (reasoning), then calls or `answer` (None: free text behind `opening`,
    with calls in it if `opening` is empty).

    `tokens`: special tokens that markers may consist of. Raises `RequestError` for a tool whose parameters cannot be
    enforced.
    """
    writer = _Writer(rules, syntax, tokens)
    if rules.is_required:
        return sequence(before, writer.calls(""))
    if answer is not None:
        return sequence(before, either(writer.calls(""), answer))
    if opening != literal(""):
        return sequence(before, either(writer.calls(""), sequence(opening, free_text())))
    return sequence(before, writer.text_with_calls())


def reasoning(
    syntax: ReasoningSyntax | None, tokens: Tokens, *, is_open: bool, is_done: bool, budget: int | None = None
) -> Language:
    """The language of reasoning before an answer.

    `is_open`: the prompt has begun the reasoning. `is_done`: the prompt has also ended it. Otherwise the model may
    begin it. `budget`: most tokens of reasoning; see `can_bound`.
    """
    if syntax is None or (is_done and not is_open):
        return literal("")
    text = _until(syntax.end, tokens) if budget is None else sequence(_bounded(budget), marked(syntax.end, tokens))
    # Blanks before a marker of the answer would part it from the start of its message.
    rest = text if syntax.answer else sequence(text, _BLANKS)
    return rest if is_open else either(literal(""), sequence(marked(syntax.begin, tokens), rest))


def can_bound(syntax: ReasoningSyntax | None, tokens: Tokens) -> bool:
    """Whether reasoning can be limited to a number of tokens: only if its end marker begins with a special token."""
    return syntax is not None and any(syntax.end.startswith(token) for token in tokens)


def _bounded(budget: int) -> Language:
    """Any text of at most so many tokens."""
    name = f"thought_{budget}"
    return Language(name, (f"{name}[max_tokens={budget}]: /(.|\\n)*/",)) if budget else literal("")


class _Writer:
    """Builds the language of one request's calls."""

    def __init__(self, rules: CallRules, syntax: CallSyntax, tokens: Tokens) -> None:
        self._rules, self._syntax, self._tokens = rules, syntax, tokens
        self._is_single = rules.is_single or syntax.is_single
        self._size = GrammarSize("tools")
        self._rest = shared(either(*map(self._call, rules.tools)))
        """Language of a call from its name on."""

    def calls(self, written: str) -> Language:
        """All calls of an answer, without `written`, the part of them that was already written."""
        syntax = self._syntax
        first = (syntax.before_all + syntax.begin).removeprefix(written)
        calls = sequence(marked(first, self._tokens), self._rest)
        if not self._is_single:
            further = sequence(marked(syntax.separator + syntax.begin, self._tokens), self._rest)
            calls = sequence(calls, repeat(further, 0, MAX_CALLS - 1))
        return sequence(calls, marked(syntax.after_all, self._tokens)) if syntax.after_all else calls

    def text_with_calls(self) -> Language:
        """Free text in which each call marker begins a call that follows its schema."""
        trigger = self._syntax.trigger
        if not trigger:
            # Calls without a marker are whole answers, recognized by their first character.
            return either(self.calls(""), pattern(_NO_CALL))
        called = sequence(_until(trigger, self._tokens), self.calls(trigger))
        if self._is_single:
            return either(called, free_text())
        return sequence(repeat(called, 0, None), free_text())

    def _call(self, tool: CallerTool) -> Language:
        """From a call's name to its end."""
        if tool.text is not None and tool.text.syntax != "text":
            return self._with_text(tool, tool.text)
        path = f"{tool.path}.function.parameters"
        schema = _parameters(tool.function.get("parameters"), path)
        arguments = read_schema(schema, path, is_strict=tool.is_strict)
        self._size.add(len(arguments.expression))
        if self._syntax.tags is not None:
            arguments = self._tagged(self._syntax.tags, schema, path, is_strict=tool.is_strict)
        return self._with_arguments(tool.name, arguments)

    def _with_arguments(self, name: str, arguments: Language) -> Language:
        parts = [marked(name + self._syntax.between, self._tokens), arguments]
        if self._syntax.end:
            parts.append(marked(self._syntax.end, self._tokens))
        return sequence(*parts)

    def _with_text(self, tool: CallerTool, text: TextFormat) -> Language:
        """A call whose only argument is a text of the caller's grammar."""
        self._size.add(len(text.definition))
        tags = self._syntax.tags
        try:
            if tags is None:
                return self._with_arguments(tool.name, json_text(TEXT_KEY, text))
            written = lark(text.definition) if text.syntax == "lark" else pattern(text.definition)
        except ValueError as error:
            raise errors.invalid_value(
                text.path, text.definition, f"The grammar cannot be enforced: {error}."
            ) from None
        begin = literal(f"{tags.before}{TEXT_KEY}{tags.between}")
        return self._with_arguments(tool.name, sequence(begin, written, literal(tags.end)))

    def _tagged(self, tags: Tags, schema: Mapping[str, object], path: str, *, is_strict: bool) -> Language:
        """Arguments in tags, in the order of the schema."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        assert isinstance(properties, Mapping) and isinstance(required, (list, tuple))
        required_names = {name for name in required if isinstance(name, str)}
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts: list[Language] = []
        for key, value in properties.items():
            value_path = f"{path}.properties.{key}"
            inner: Mapping[str, object] = value if isinstance(value, Mapping) else {}
            if has_reference(inner):
                inner = {**inner, **definitions}
            value_language = _tagged_value(tags.end, inner, value_path, is_strict=is_strict)
            self._size.add(len(value_language.expression))
            part = sequence(literal(f"{tags.before}{key}{tags.between}"), value_language)
            parts.append(part if key in required_names else repeat(part, 0, 1))
        return sequence(*parts) if parts else literal("")


def _tagged_value(end: str, schema: Mapping[str, object], path: str, *, is_strict: bool) -> Language:
    """A string is written as it is, any other value as JSON."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list) and listed and all(isinstance(item, str) for item in listed):
        return sequence(one_of(listed), literal(end))
    if schema.get("type") == "string":
        return free_text_until(end)
    return sequence(read_schema(schema, path, is_strict=is_strict), literal(end))


def _parameters(value: object, where: str) -> dict[str, object]:
    """The schema of a tool's arguments, which must be an object. Raises `RequestError`."""
    if value is None:
        return dict(_NO_PARAMETERS)
    if not isinstance(value, Mapping):
        raise errors.invalid_type(where, "an object", value)
    if value.get("type", "object") != "object":
        raise errors.invalid_value(f"{where}.type", value["type"], "The parameters of a function are an 'object'.")
    for key, kind in (("properties", Mapping), ("required", list)):
        if key in value and not isinstance(value[key], kind):
            raise errors.invalid_type(f"{where}.{key}", "an object" if kind is Mapping else "an array", value[key])
    return {**value, "type": "object"}


def _until(marker: str, tokens: Tokens) -> Language:
    """Any text up to and with the first `marker`. Free text cannot hold a marker that begins with a special token."""
    if any(marker.startswith(token) for token in tokens):
        return sequence(free_text(), marked(marker, tokens))
    return free_text_until(marker)
