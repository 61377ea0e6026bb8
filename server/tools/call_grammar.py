"""Tool calls as languages: what a model may write if calls are required, restricted, or must follow their schemas.

Also the language of the reasoning before them. Pure functions of a format's syntax and of the tools' schemas. Knows no
fields except the tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from inferd.engine.api.grammars import TagTexts
from inferd.server.errors import messages as errors
from inferd.server.schema.caller_tool import TEXT_KEY, CallerTool
from inferd.server.structured.bounds import GrammarSize
from inferd.server.structured.language import (
    Language,
    TextFormat,
    begins_with_token,
    either,
    free_text,
    free_text_until_marked,
    literal,
    marked,
    parts_of,
    pattern,
    repeat,
    sequence,
    shared,
)
from inferd.server.structured.quoted import json_text
from inferd.server.structured.schema import OR_NOT_STRICT, read_schema
from inferd.server.structured.tagged import text_until
from inferd.server.structured.tags import Tokens
from inferd.server.tools.format import ID, INDEX, KEY, NAME, CallSyntax, ReasoningSyntax

MAX_CALLS = 128
"""Most calls in one answer under a grammar."""

_BLANKS = pattern(r"[ \n]{0,4}")
"""Blanks between the end of reasoning and the answer."""

_AN_ID, _AN_INDEX = pattern("[0-9A-Za-z]{9}"), pattern("[0-9]{1,3}")
"""An id and a number of a call. Some templates accept only ids of nine letters and digits."""

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
    rules: CallRules,
    syntax: CallSyntax,
    tokens: Tokens,
    answer: Language | None,
    before: Language,
    opening: Language,
    written: str = "",
) -> Language:
    """The language of the whole output: `before` (reasoning), then calls or `answer` (None: free text behind `opening`,
    with calls in it if `opening` is empty). `written`: the beginning of the first call that the prompt holds.

    `tokens`: special tokens that markers may consist of. Raises `RequestError` for a tool whose parameters cannot be
    enforced.
    """
    writer = _Writer(rules, syntax, tokens)
    if rules.is_required:
        return sequence(before, writer.only_calls(written))
    if answer is not None:
        return sequence(before, either(writer.only_calls(written), answer))
    if opening != literal(""):
        return sequence(before, either(writer.only_calls(), sequence(opening, free_text())))
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
    if budget is None:
        text = free_text_until_marked(syntax.end, tokens)
    else:
        text = sequence(_bounded(budget), marked(syntax.end, tokens))
    # Blanks before a marker of the answer would part it from the start of its message.
    rest = text if syntax.answer else sequence(text, _BLANKS)
    return rest if is_open else either(literal(""), sequence(marked(syntax.begin, tokens), rest))


def can_bound(syntax: ReasoningSyntax | None, tokens: Tokens) -> bool:
    """Whether reasoning can be limited to a number of tokens: only if its end marker begins with a special token."""
    return syntax is not None and begins_with_token(syntax.end, tokens)


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
        self._bare = syntax.bare if rules.is_required else None
        """Syntax of calls without markers if they are allowed, too."""
        self._end = syntax.end if self._bare is None else self._bare.end
        """Text behind the arguments that calls with and without markers have."""
        self._rest = shared(either(*map(self._call, rules.tools)))
        """Language of a call from its name to that text."""

    def only_calls(self, written: str = "") -> Language:
        """An answer of calls alone, without `written`, the part of them that the prompt holds. If calls are required,
        the markers around their JSON may be missing."""
        calls = self._ended(self._syntax, written)
        return calls if self._bare is None or written else either(calls, self._ended(self._bare))

    def _ended(self, syntax: CallSyntax, written: str = "") -> Language:
        """All calls of an answer and its end, which may follow the blanks between two calls: a model that has written
        them must not be forced to call again."""
        separator = syntax.separator
        blanks = separator[: len(separator) - len(separator.lstrip())]
        calls = self._calls(syntax, written)
        return sequence(calls, repeat(literal(blanks), 0, 1)) if blanks and not self._is_single else calls

    def _calls(self, syntax: CallSyntax, written: str) -> Language:
        """All calls of an answer, without `written`, the part of them that was already written."""
        closing = syntax.end.removeprefix(self._end)
        rest = sequence(self._rest, marked(closing, self._tokens)) if closing else self._rest
        first = (syntax.before_all + syntax.begin).removeprefix(written)
        calls = sequence(self._marked(first), rest)
        if not self._is_single:
            further = sequence(self._marked(syntax.separator + syntax.begin), rest)
            calls = sequence(calls, repeat(further, 0, MAX_CALLS - 1))
        return sequence(calls, marked(syntax.after_all, self._tokens)) if syntax.after_all else calls

    def text_with_calls(self) -> Language:
        """Free text in which each call marker begins a call that follows its schema."""
        trigger = self._syntax.trigger
        if not trigger:
            # Calls without a marker are whole answers, recognized by their first character.
            return either(self.only_calls(), pattern(_NO_CALL))
        called = sequence(free_text_until_marked(trigger, self._tokens), self._calls(self._syntax, trigger))
        if self._is_single:
            return either(called, free_text())
        return sequence(repeat(called, 0, None), free_text())

    def _call(self, tool: CallerTool) -> Language:
        """From a call's name to its end."""
        if tool.text is not None and tool.text.syntax != "text":
            return self._with_text(tool, tool.text)
        path = f"{tool.path}.function.parameters"
        schema, notices = _parameters(tool, path)
        texts = self._tag_texts()
        arguments = read_schema(
            schema, path, is_strict=tool.is_strict, way_out=OR_NOT_STRICT, tool=tool.name, tags=texts, notices=notices
        )
        self._size.add(arguments.num_chars)
        return self._with_arguments(tool.name, arguments)

    def _tag_texts(self) -> TagTexts | None:
        tags = self._syntax.tags
        if tags is None:
            return None
        before, between, behind, separator = (
            parts_of(text, self._tokens) for text in (tags.before, tags.between, tags.end, tags.separator)
        )
        kinds = {kind: parts_of(text, self._tokens) for kind, text in tags.betweens}
        string_end, quote = (parts_of(text, self._tokens) for text in (tags.string_end, tags.string_quote))
        return TagTexts(
            before,
            between,
            behind,
            separator,
            kinds,
            tags.is_raw,
            string_behind=string_end or None,
            quote=quote,
            item=tags.item,
            is_sorted=tags.is_sorted,
            is_python=tags.is_python,
        )

    def _with_arguments(self, name: str, arguments: Language) -> Language:
        parts = [self._marked(name + self._syntax.between, name), arguments]
        if self._end:
            parts.append(self._marked(self._end, name))
        return sequence(*parts)

    def _marked(self, text: str, name: str = "") -> Language:
        """`text` with a language in each place for an id, a number or the name of a call."""
        parts = re.split(f"({ID}|{INDEX})", text.replace(NAME, name))
        if len(parts) == 1:
            return marked(parts[0], self._tokens)
        places = {ID: _AN_ID, INDEX: _AN_INDEX}
        return sequence(*(places[part] if part in places else marked(part, self._tokens) for part in parts if part))

    def _with_text(self, tool: CallerTool, text: TextFormat) -> Language:
        """A call whose only argument is a text of the caller's grammar."""
        self._size.add(len(text.definition))
        tags = self._syntax.tags
        try:
            if tags is None:
                return self._with_arguments(tool.name, json_text(TEXT_KEY, text))
            written = text_until((tags.string_end or tags.end).replace(KEY, TEXT_KEY), text)
        except ValueError as error:
            reason = errors.clip(str(error), errors.MAX_MESSAGE // 2)
            rule = f"The grammar cannot be enforced: {reason}."
            raise errors.invalid_value(text.path, text.definition, rule) from None
        between = dict(tags.betweens).get("string", tags.between)
        begin = marked(f"{tags.before}{TEXT_KEY}{between}", self._tokens)
        return self._with_arguments(tool.name, sequence(begin, written))


def _parameters(tool: CallerTool, where: str) -> tuple[dict[str, object], list[str]]:
    """(the schema of a tool's arguments, which are an object; what of it is left to the model). Raises
    `RequestError`."""
    value = tool.function.get("parameters")
    if value is None:
        return dict(_NO_PARAMETERS), []
    if not isinstance(value, Mapping):
        raise errors.invalid_type(where, "an object", value)
    kind, notices = value.get("type", "object"), []
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        rule = "The parameters of a function are an 'object'."
        if tool.is_strict:
            raise errors.invalid_value(f"{where}.type", kind, rule)
        owner = errors.clip(tool.name, 64)
        notices = [f"'{where}.type' of the tool '{owner}' is left to the model: parameters are an 'object'"]
    return {**value, "type": "object"}, notices
