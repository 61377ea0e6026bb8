"""The wire kinds of a responses request that are objects of their own: tools, their choice, `text`, `reasoning`, ...

What the caller said is kept beside what it means: the answer repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import orjson

from inferd.server.errors import table as errors
from inferd.server.schema.chat import (
    FUNCTION,
    MAX_TOOLS,
    REASONING_EFFORTS,
    TOOL_WITHOUT_EFFECT,
    VERBOSITIES,
    ReasoningEffort,
    Verbosity,
    check_function,
    function_schema,
)
from inferd.server.schema.kinds import Choice, Json, Schema, Text, check_array, check_properties, object_schema
from inferd.server.schema.structured import AnswerFormat, named_schema
from inferd.server.schema.tool_choice import MAX_NAMED, MODES, Mode, ToolChoice
from inferd.server.structured.language import json_value

LOGPROBS, SEALED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_INCLUDED = (LOGPROBS, SEALED_REASONING)
_SUMMARIES = ("auto", "concise", "detailed")
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions. A web search that may look into a cache alone is left out: there is no such cache here."""

    name: str = "an array of objects"

    def accepts(self, value: object) -> bool:
        return isinstance(value, list)

    def read(self, value: object, where: str) -> tuple[Mapping[str, object], ...]:
        check_array(value, where, self.name, 0, MAX_TOOLS)
        assert isinstance(value, list)
        kept = [(i, tool) for i, tool in enumerate(value) if not _is_idle_search(tool)]
        return tuple(FunctionTool().read(tool, f"{where}[{i}]") for i, tool in kept)

    def schema(self) -> Schema:
        idle = {
            "type": "object",
            "properties": {"type": {"const": "web_search"}, "external_web_access": {"const": False}},
            "required": ["type", "external_web_access"],
        }
        items = {"type": "object", "anyOf": [FunctionTool().schema(), idle]}
        return {"type": "array", "items": items, "maxItems": MAX_TOOLS}


def _is_idle_search(tool: object) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "web_search" and tool.get("external_web_access") is False


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that the model may call, flat as this API has it."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> Mapping[str, object]:
        given = Json().read(value, where)
        if given.get("type") is None:
            raise errors.missing(f"{where}.type")
        _only_functions(given["type"], f"{where}.type")
        tool = check_properties(given, where, ("type", "name"), (*FUNCTION, *_TOOL_OPTIONS), TOOL_WITHOUT_EFFECT)
        for key in _TOOL_OPTIONS:
            if tool.get(key):
                raise errors.unsupported_parameter(f"{where}.{key}", "A function is shown to the model, and called.")
        check_function(tool, where)
        parameters = tool.get("parameters")
        _check_writable(parameters, f"{where}.parameters")
        return {
            "type": "function",
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": {"type": "object", "properties": {}} if parameters is None else parameters,
            "strict": tool.get("strict") is True,
        }

    def schema(self) -> Schema:
        tool = {"type": {"const": "function"}, **function_schema(), **_NO_TOOL_OPTIONS}
        return object_schema(tool, ("type", "name"), TOOL_WITHOUT_EFFECT)


_TOOL_OPTIONS = ("defer_loading", "async", "allowed_callers", "output_schema")
_NO_TOOL_OPTIONS: dict[str, Schema] = {name: {"enum": [False, None, [], {}]} for name in _TOOL_OPTIONS}


def _check_writable(value: object, where: str) -> None:
    """The answer repeats it. Raises `RequestError` for a number that has no place in it."""
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise errors.invalid_value(where, value, "It holds a whole number of more than 64 bits.") from error


def _only_functions(value: object, where: str) -> None:
    kind = Text().read(value, where)
    if kind != "function":
        raise errors.unsupported_value(where, kind, "Only functions are served: the caller runs them.")


@dataclass(frozen=True, slots=True)
class AskedChoice:
    """`tool_choice` as given, and what it means."""

    given: object
    means: ToolChoice


@dataclass(frozen=True, slots=True)
class ToolChoiceOption:
    """A word, one function, or `allowed_tools`."""

    name: str = "one of a string or an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, (str, dict))

    def read(self, value: object, where: str) -> AskedChoice:
        if isinstance(value, str):
            return AskedChoice(value, ToolChoice(cast("Mode", Choice(MODES).read(value, where))))
        if not isinstance(value, dict):
            raise errors.invalid_type(where, self.name, value)
        if value.get("type") == "allowed_tools":
            return AskedChoice(value, _allowed(value, where))
        return AskedChoice(value, ToolChoice("required", (_named(value, where),), is_single=True))

    def schema(self) -> Schema:
        tool = object_schema({"type": {"const": "function"}, "name": Text(1).schema()}, ("type", "name"))
        tools = {"type": "array", "items": tool, "minItems": 1, "maxItems": MAX_NAMED}
        allowed: dict[str, Schema] = {
            "type": {"const": "allowed_tools"},
            "mode": {"enum": ["auto", "required"]},
            "tools": tools,
        }
        return {"anyOf": [{"enum": list(MODES)}, tool, object_schema(allowed, ("type", "mode", "tools"))]}


def _allowed(value: Mapping[str, object], where: str) -> ToolChoice:
    given = check_properties(value, where, ("type", "mode", "tools"), ())
    mode = cast("Mode", Choice(("auto", "required")).read(given["mode"], f"{where}.mode"))
    tools = given["tools"]
    check_array(tools, f"{where}.tools", "an array of objects", 1, MAX_NAMED)
    assert isinstance(tools, list)
    return ToolChoice(mode, tuple(_named(tool, f"{where}.tools[{i}]") for i, tool in enumerate(tools)))


def _named(value: object, where: str) -> tuple[str, str]:
    given = Json().read(value, where)
    if given.get("type") is None:
        raise errors.missing(f"{where}.type")
    _only_functions(given["type"], f"{where}.type")
    tool = check_properties(given, where, ("type", "name"), ())
    return Text(1).read(tool["name"], f"{where}.name"), f"{where}.name"


@dataclass(frozen=True, slots=True)
class TextOption:
    """`text` as given, and what it asks of the answer; None: any text."""

    format: Mapping[str, object]
    means: AnswerFormat | None
    verbosity: Verbosity = "medium"


@dataclass(frozen=True, slots=True)
class TextObject:
    """{format, verbosity}."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> TextOption:
        given = check_properties(value, where, (), ("format", "verbosity"))
        verbosity = given.get("verbosity")
        verbosity = Choice(VERBOSITIES).read("medium" if verbosity is None else verbosity, f"{where}.verbosity")
        verbosity = cast("Verbosity", verbosity)
        if given.get("format") is None:
            return TextOption({"type": "text"}, None, verbosity)
        return _format(Json().read(given["format"], f"{where}.format"), f"{where}.format", verbosity)

    def schema(self) -> Schema:
        named: dict[str, Schema] = {
            "type": {"const": "json_schema"},
            "name": {"type": "string"},
            "schema": {"type": ["object", "boolean"]},
            "description": {"type": ["string", "null"]},
            "strict": {"type": ["boolean", "null"]},
        }
        plain = object_schema({"type": {"enum": ["text", "json_object"]}}, ("type",))
        formats = [plain, object_schema(named, ("type", "name", "schema")), {"type": "null"}]
        return object_schema({"format": {"anyOf": formats}, "verbosity": {"enum": [*VERBOSITIES, None]}})


def _format(given: dict[str, object], where: str, verbosity: Verbosity) -> TextOption:
    if given.get("type") is None:
        raise errors.missing(f"{where}.type")
    kind = Choice(("text", "json_object", "json_schema")).read(given["type"], f"{where}.type")
    if kind == "json_schema":
        _check_writable(given.get("schema"), f"{where}.schema")
        named = named_schema({key: value for key, value in given.items() if key != "type"}, where)
        return TextOption(given, named, verbosity)
    check_properties(given, where, ("type",), ())
    means = None if kind == "text" else AnswerFormat(where, json_value({"type": "object"}))
    return TextOption(given, means, verbosity)


@dataclass(frozen=True, slots=True)
class ReasoningOption:
    """`reasoning` as given; `effort` None: the model's own."""

    effort: ReasoningEffort | None = None
    summary: str | None = None


@dataclass(frozen=True, slots=True)
class ReasoningObject:
    """{effort, summary}."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> ReasoningOption:
        known = ("effort", "summary", "generate_summary", "context", "mode")
        given = check_properties(value, where, (), known)
        for key in ("context", "mode"):
            if given.get(key) not in (None, "auto", "standard"):
                way_out = "Reasoning is shown to the model where its chat template does so."
                raise errors.unsupported_parameter(f"{where}.{key}", way_out)
        summary = given.get("summary") or given.get("generate_summary")
        effort = given.get("effort")
        if effort is not None:
            effort = Choice(REASONING_EFFORTS).read(effort, f"{where}.effort")
        return ReasoningOption(
            cast("ReasoningEffort | None", effort),
            None if summary is None else Choice(_SUMMARIES).read(summary, f"{where}.summary"),
        )

    def schema(self) -> Schema:
        summary: Schema = {"enum": [*_SUMMARIES, None]}
        return object_schema(
            {
                "effort": {"enum": [*REASONING_EFFORTS, None]},
                "summary": summary,
                "generate_summary": summary,
                "context": {"enum": ["auto", None]},
                "mode": {"enum": ["standard", None]},
            }
        )


@dataclass(frozen=True, slots=True)
class Included:
    """One of the names that `include` may have."""

    name: str = "a string"

    def accepts(self, value: object) -> bool:
        return isinstance(value, str)

    def read(self, value: object, where: str) -> str:
        text = Text().read(value, where)
        if text not in _INCLUDED:
            rule = f"Served are {' and '.join(_INCLUDED)}: no hosted tools run here, and there is nothing more to show."
            raise errors.unsupported_value(where, text, rule)
        return text

    def schema(self) -> Schema:
        return Choice(_INCLUDED).schema()


@dataclass(frozen=True, slots=True)
class Metadata:
    """Up to 16 texts under short names."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> Mapping[str, object]:
        pairs = Json(MAX_METADATA).read(value, where)
        for key, text in pairs.items():
            if len(key) > MAX_METADATA_KEY:
                raise errors.string_too_long(f"{where}.{key}", MAX_METADATA_KEY, len(key))
            Text(0, MAX_METADATA_VALUE).read(text, f"{where}.{key}")
        return pairs

    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"maxLength": MAX_METADATA_KEY},
            "additionalProperties": Text(0, MAX_METADATA_VALUE).schema(),
            "maxProperties": MAX_METADATA,
        }
